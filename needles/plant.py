"""Plant facts in growing conversations: exact to the token, rung by rung, every rung a prefix of the next.

    ruler = Ruler.from_folder(folder)
    for conversation in make_conversations(recipe("reference"), ruler=ruler, rungs=[448, 1024, 2048], count=40, seed=7):
        ...

Each conversation is written once, front to back. Before rung r's length is reached the history stops short by the
longest question (plus a few tokens of padding); every probe of the rung is a tail of exactly the missing length, so
`planned == realised` for each prompt and the history stays shared between probes and is a prefix of rung r+1's.
Lengths are sums of counted pieces (`render.Ruler`); prompts are then encoded whole and compared (all of them in short
conversations, samples in long ones). Same (recipe, seed, tokenizer, version): same bytes.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from longrecall.needles.filler import Prose, fill, pick, shuffled, wordings
from longrecall.needles.haystack import Haystack, say
from longrecall.needles.recipes import Element, Recipe
from longrecall.needles.render import Meter, Ruler, Span, messages_for
from longrecall.needles.schema import Ask, Conversation, Fact, Probe, Role, Turn
from longrecall.needles.values import Values, aliases
from longrecall.needles.vocabulary import ATTRIBUTES, NAMES, split_words

GENERATOR_VERSION = 1
"""Goes into every conversation id; raised whenever the same arguments would give other bytes."""

_SLACK = 3
"""Tokens kept free for padding beyond the longest question, so that every question gets 0 or at least 2."""
_ENCODE_WHOLE_TOKENS = 40_000
"""Conversations whose prompts sum to fewer tokens have every prompt encoded whole and compared."""


class PlantError(ValueError):
    """The conversation cannot be made as asked; the message says what would be possible."""


class ExactnessError(RuntimeError):
    """A prompt did not come out at its planned length: a defect in the counts, never to be served."""


@dataclass
class Statement:
    """A sentence of a draft turn; `key` names the fact it states."""

    text: str
    key: str | None = None


@dataclass
class DraftTurn:
    role: Role
    parts: list[Statement]


@dataclass
class Event:
    """Turns that stay together: a fact stated and acknowledged."""

    turns: list[DraftTurn]
    required_first: bool = True
    """Must lie before the first rung's branch; else anywhere on the ladder."""
    tokens: int = 0


@dataclass
class DraftFact:
    key: str
    entity: str
    attribute: str
    value: str
    kind: str
    value_kind: str
    supersedes: str | None = None


@dataclass
class DraftProbe:
    kind: str
    question: str
    gold: str
    live: str | None
    aliases: tuple[str, ...] = ()
    distractors: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    prefix: str = ""


@dataclass
class Script:
    """What a recipe wants in one conversation."""

    facts: list[DraftFact] = field(default_factory=list)
    groups: list[list[Event]] = field(default_factory=list)
    """Events of one group keep their order."""
    probes: list[DraftProbe] = field(default_factory=list)


class _Cast:
    """Names and attributes, each handed out once per conversation."""

    def __init__(self, rng: random.Random, recipe: Recipe) -> None:
        self._names = shuffled(rng, split_words(NAMES, recipe.split))
        self._attributes = shuffled(rng, split_words(ATTRIBUTES, recipe.split))

    def name(self) -> str:
        if not self._names:
            raise PlantError(
                'the recipe needs more names than the word list has: fewer facts and distractors, or split "all"'
            )
        return self._names.pop()

    def attribute(self) -> str:
        if not self._attributes:
            raise PlantError(
                'the recipe needs more attributes than the word list has: lower `attributes`, or split "all"'
            )
        return self._attributes.pop()


def _build_keys(
    script: Script, element: Element, recipe: Recipe, cast: _Cast, values: Values, rng: random.Random
) -> None:
    """Independent facts of a few attributes about different people, and distractors nobody asks about."""
    attributes = [cast.attribute() for _ in range(element.attributes)]
    other = cast.attribute() if element.distractors else ""
    options = wordings(recipe.split)
    own: list[DraftFact] = []
    for place in range(element.count):
        fact = DraftFact(
            key=f"f{len(script.facts)}",
            entity=cast.name(),
            attribute=attributes[place % len(attributes)],
            value=values.draw(rng, element.value, digits=element.digits),
            kind="key",
            value_kind=element.value,
        )
        script.facts.append(fact)
        own.append(fact)
        script.groups.append([_stated(fact, element, pick(rng, options))])
    extra: list[DraftFact] = []
    for place in range(element.distractors):
        # Half of them: the same people under another attribute; half: the same attribute of other people.
        about_same = place % 2 == 0 and place // 2 < len(own)
        value = (
            values.look_alike(rng, own[place % len(own)].value, distance=element.look_alike)
            if element.look_alike
            else values.draw(rng, element.value, digits=element.digits)
        )
        fact = DraftFact(
            key=f"f{len(script.facts)}",
            entity=own[place // 2].entity if about_same else cast.name(),
            attribute=other if about_same else attributes[place % len(attributes)],
            value=value,
            kind="distractor",
            value_kind=element.value,
        )
        script.facts.append(fact)
        extra.append(fact)
        event = _stated(fact, replace(element, echo="noted"), pick(rng, options))
        event.required_first = False
        script.groups.append([event])
    for fact in own[: element.probes]:
        others = tuple(f.value for f in (*own, *extra) if f is not fact)
        script.probes.append(
            DraftProbe(
                kind="keys",
                question=f"What is the {fact.attribute} of {fact.entity}?",
                gold=fact.value,
                live=fact.key,
                aliases=aliases(fact.value, element.value),
                distractors=others,
                prefix=f"The {fact.attribute} of {fact.entity} is" if recipe.answer_prefix else "",
            )
        )


_NOTED = ("Noted.", "Okay.", "Understood.", "Got it.", "All right, noted.", "Thanks, noted.")


def _stated(fact: DraftFact, element: Element, wording: object) -> Event:
    slots = {"name": fact.entity, "attribute": fact.attribute, "value": fact.value}
    statement = fill(wording.statement, **slots)  # type: ignore[attr-defined]
    # The acknowledgement is drawn from the key, not the generator, so that echo modes share everything else.
    reply = _NOTED[int(hashlib.sha256(f"{fact.entity}{fact.value}".encode()).hexdigest(), 16) % len(_NOTED)]
    echo = Statement(fill(wording.echo, **slots), fact.key) if element.echo == "value" else Statement(reply)  # type: ignore[attr-defined]
    return Event([DraftTurn(element.role, [Statement(statement, fact.key)]), DraftTurn("assistant", [echo])])


_BUILDERS = {"keys": _build_keys}


def draft(recipe: Recipe, values: Values, rng: random.Random) -> Script:
    """Facts, events and probes of one conversation."""
    script = Script()
    cast = _Cast(rng, recipe)
    values.next_conversation()
    for element in recipe.elements:
        _BUILDERS[element.kind](script, element, recipe, cast, values, rng)
    return script


def recipe_id(recipe: Recipe) -> str:
    """Name and content hash of a recipe."""
    payload = json.dumps(asdict(recipe), sort_keys=True, ensure_ascii=False)
    return f"{recipe.name}-{hashlib.sha256(payload.encode()).hexdigest()[:8]}"


def make_conversations(
    recipe: Recipe,
    *,
    ruler: Ruler,
    rungs: Sequence[int],
    count: int,
    seed: int,
    haystack: Haystack | None = None,
    first: int = 0,
) -> Iterator[Conversation]:
    """`count` conversations of one set, in order; conversation i is the same whatever `count` is.

    `rungs` are prompt lengths in tokens, template included. Raises `PlantError` before the first conversation when the
    arguments cannot be met.
    """
    ladder = sorted(set(rungs))
    if not ladder or list(rungs) != ladder:
        raise PlantError(f"rungs {list(rungs)} are not possible: at least one length, growing, none twice")
    if ladder[0] < 1 or ladder[-1] > 2**21:
        raise PlantError(f"rungs {list(rungs)} are not possible: lengths lie between 1 and {2**21}")
    if count < 0:
        raise PlantError(f"count {count} is not possible: 0 or more")
    values = Values()
    values.check(recipe.demands(), first + count)
    if haystack is None:
        haystack = Haystack(ruler, Prose(recipe.split), f"{recipe.split}:{seed}")
    for index in range(first + count):
        rng = random.Random(f"{GENERATOR_VERSION}:{recipe_id(recipe)}:{seed}:{index}")
        script = draft(recipe, values, rng)  # also for skipped ones: values must be unique over the whole set
        if index >= first:
            yield _Assembly(recipe, script, ruler, haystack, ladder, seed, index, rng).make()


class _Assembly:
    """One conversation being written."""

    def __init__(
        self,
        recipe: Recipe,
        script: Script,
        ruler: Ruler,
        haystack: Haystack,
        rungs: Sequence[int],
        seed: int,
        index: int,
        rng: random.Random,
    ) -> None:
        self.recipe, self.script, self.ruler, self.haystack = recipe, script, ruler, haystack
        self.rungs, self.seed, self.index, self.rng = rungs, seed, index, rng
        self.meter = Meter(ruler)
        self.turns: list[Turn] = []
        self.spans: dict[str, Span] = {}
        """By fact key: where its first statement stands."""
        self.turn_of: dict[str, int] = {}
        self.ids: dict[str, str] = {}
        stem = hashlib.sha256(
            f"{GENERATOR_VERSION}:{recipe_id(recipe)}:{ruler.tokenizer_hash}:{ruler.template_hash}:{list(rungs)}:{seed}:{index}".encode()
        ).hexdigest()[:12]
        self.conversation_id = f"{recipe.name}-{index:05d}-{stem}"
        for fact in script.facts:
            self.ids[fact.key] = f"{self.conversation_id}/{fact.key}"

    def make(self) -> Conversation:
        tails = [self._tail_tokens(probe) for probe in self.script.probes]
        longest = max(tails, default=0)
        ends = [rung - longest - _SLACK for rung in self.rungs]
        events = self._schedule(ends)
        if self.recipe.system:
            self._turn("system", [Statement(self.recipe.system)])
        branches = []
        for rung_events, end in zip(events, ends, strict=True):
            self._segment(rung_events, end)
            branches.append((len(self.turns), self.meter.copy()))
        asks = [
            self._ask(rung, turn_end, meter, place)
            for rung, (turn_end, meter) in zip(self.rungs, branches, strict=True)
            for place in range(len(self.script.probes))
        ]
        conversation = Conversation(
            conversation_id=self.conversation_id,
            recipe=recipe_id(self.recipe),
            seed=self.seed,
            tokenizer_hash=self.ruler.tokenizer_hash,
            template_hash=self.ruler.template_hash,
            rungs=tuple(self.rungs),
            turns=tuple(self.turns),
            facts=tuple(self._fact(fact) for fact in self.script.facts),
            probes=tuple(self._probe(place, probe) for place, probe in enumerate(self.script.probes)),
            asks=tuple(asks),
        )
        self._verify(conversation)
        return conversation

    # What must fit where

    def _sample(self, turns: Sequence[DraftTurn]) -> int:
        """Tokens that turns add to a history that ends in an assistant turn."""
        meter = Meter(self.ruler)
        meter.turn("user", "Go on.")
        meter.turn("assistant", "It was slowly.")
        before = meter.tokens
        for turn in turns:
            meter.turn(turn.role, " ".join(part.text for part in turn.parts))
        return meter.tokens - before

    def _tail_tokens(self, probe: DraftProbe) -> int:
        """Tokens of a question without padding."""
        meter = Meter(self.ruler)
        meter.turn("user", "Go on.")
        meter.turn("assistant", "It was slowly.")
        before = meter.tokens
        self._append_tail(meter, probe, "")
        return meter.tokens - before

    @staticmethod
    def _append_tail(meter: Meter, probe: DraftProbe, pad: str) -> None:
        meter.turn("user", f"{pad} {probe.question}".strip())
        if probe.prefix:
            meter.turn("assistant", probe.prefix, begun=True)
        else:
            meter.close()

    def _start_tokens(self) -> int:
        meter = Meter(self.ruler)
        if self.recipe.system:
            meter.turn("system", self.recipe.system)
            meter.open("user")
        else:
            meter.open("user")
        return meter.tokens

    def _schedule(self, ends: list[int]) -> list[list[tuple[Event, float]]]:
        """Events of each rung's segment with the token position at which each should begin."""
        rng = self.rng
        groups = [list(group) for group in self.script.groups]
        for group in groups:
            for event in group:
                event.tokens = self._sample(event.turns)
        start = self._start_tokens()
        first_only = self.recipe.scope == "first"
        here: list[Event] = []
        later: list[Event] = []
        order = shuffled(rng, [place for place, group in enumerate(groups) for _ in group])
        queue = [groups[place].pop(0) for place in order]
        room = ends[0] - start
        if first_only or len(ends) == 1:
            must = [event for event in queue if event.required_first]
            fixed = sum(event.tokens for event in must)
            self._require(room - fixed, ends[0], start + fixed)
            spread = [event for event in queue if not event.required_first]
            share = ends[0] / ends[-1]
            free = room - fixed
            wanted = max(sum(rng.random() < share for _ in spread), (len(spread) + 3) // 4)
            if len(ends) == 1:
                wanted = len(spread)
                self._require(
                    free - sum(event.tokens for event in spread), ends[0], start + fixed + sum(e.tokens for e in spread)
                )
            early: set[int] = set()
            for event in spread[:wanted]:
                if event.tokens <= free:
                    free -= event.tokens
                    early.add(id(event))
            here = [event for event in queue if event.required_first or id(event) in early]
            later = [event for event in queue if not (event.required_first or id(event) in early)]
        else:
            later = queue
        segments: list[list[tuple[Event, float]]] = [[] for _ in ends]
        segments[0] = self._positions(here, start, ends[0])
        if later:
            self._spread(later, segments, ends, 0 if not here and not first_only else 1, start)
        return segments

    def _require(self, free: int, end: int, needed: int) -> None:
        if free < 0:
            minimum = self.rungs[0] - end + needed
            raise PlantError(
                f"rung {self.rungs[0]} is too small for recipe {self.recipe.name!r}: its facts, the template and the "
                f"longest question need at least {minimum} tokens here"
            )

    def _positions(self, events: list[Event], start: int, end: int) -> list[tuple[Event, float]]:
        """Begin positions: the recipe's depths, pushed apart so that nothing overlaps and everything fits."""
        if not events:
            return []
        depth = self.recipe.depth
        if depth == "uniform":
            wanted = sorted(self.rng.random() for _ in events)
        elif depth == "grid":
            wanted = [(place + 0.5) / len(events) for place in range(len(events))]
        else:
            assert isinstance(depth, tuple)
            wanted = sorted(depth[place % len(depth)] / 100 for place in range(len(events)))
        out: list[tuple[Event, float]] = []
        after = sum(event.tokens for event in events)
        earliest = float(start)
        for event, fraction in zip(events, wanted, strict=True):
            position = min(max(earliest, fraction * end), end - after)
            out.append((event, position))
            earliest = position + event.tokens
            after -= event.tokens
        return out

    def _spread(
        self, events: list[Event], segments: list[list[tuple[Event, float]]], ends: list[int], first: int, start: int
    ) -> None:
        """Put events into the segments from `first` on, in order, as uniformly as they fit."""
        begins = [start, *ends[:-1]]
        rooms = [max(0, end - begin) for begin, end in zip(begins, ends, strict=True)]
        total = sum(rooms[first:])
        needed = sum(event.tokens for event in events)
        if needed > total:
            raise PlantError(
                f"rung {self.rungs[-1]} is too small for recipe {self.recipe.name!r}: {needed - total} tokens are "
                f"missing for its facts; at least {self.rungs[-1] + needed - total} are needed there"
            )
        segment, used = first, 0
        chosen: list[list[Event]] = [[] for _ in ends]
        wanted = sorted(self.rng.random() * total for _ in events)
        passed = 0
        for place, event in enumerate(events):
            rest = sum(e.tokens for e in events[place:])
            while segment < len(ends) - 1 and (
                used + event.tokens > rooms[segment]
                or (wanted[place] > passed + rooms[segment] and rest <= sum(rooms[segment + 1 :]))
            ):
                passed += rooms[segment]
                segment, used = segment + 1, 0
            if used + event.tokens > rooms[segment]:
                raise PlantError(
                    f"the rungs {list(self.rungs)} lie too close together for the facts of recipe {self.recipe.name!r}"
                )
            chosen[segment].append(event)
            used += event.tokens
        for place, found in enumerate(chosen):
            if found:
                segments[place] += self._positions_uniform(found, begins[place], ends[place])

    def _positions_uniform(self, events: list[Event], start: int, end: int) -> list[tuple[Event, float]]:
        wanted = sorted(start + self.rng.random() * (end - start) for _ in events)
        out = []
        after = sum(event.tokens for event in events)
        earliest = float(start)
        for event, position in zip(events, wanted, strict=True):
            at = min(max(earliest, position), end - after)
            out.append((event, at))
            earliest = at + event.tokens
            after -= event.tokens
        return out

    # Writing

    def _segment(self, events: list[tuple[Event, float]], end: int) -> None:
        """Write events at their positions, filler between, and stop at exactly `end` tokens if there is room to."""
        needed = sum(event.tokens for event, _ in events)
        for event, position in events:
            # Filler before the event may not eat the room of what must follow it.
            self._filler(min(int(position), end - needed))
            self._event(event)
            needed -= event.tokens
        self._filler(end, exact=True)

    def _filler(self, end: int, *, exact: bool = False) -> None:
        """Filler exchanges up to `end` tokens: at most that, or exactly that where an exchange fits at all."""
        low, high = self.recipe.turn_tokens
        while True:
            ask = pick(self.rng, self.haystack.asks)
            opener = pick(self.rng, self.haystack.prose.openers)
            trial = self.meter.copy()
            trial.turn("user", ask)
            trial.turn("assistant", opener)
            rest = end - trial.tokens
            if rest < self.haystack.shortest or (exact and not self.haystack.reachable(rest)):
                if rest < self.haystack.shortest or not exact:
                    return
                continue  # a rare remainder that no sentences add up to: another question
            reply = low + int(self.rng.random() * (high - low + 1))
            minimum = trial.tokens - self.meter.tokens + self.haystack.longest * 2
            if rest <= reply or (exact and rest - reply < minimum):
                size = rest if rest <= high + minimum else reply
                if exact and size == rest:
                    pieces = self.haystack.pieces_of(self.rng, rest)
                    self._say(trial, ask, opener, pieces)
                    return
            size = min(reply, rest)
            pieces, used = [], 0
            while True:
                piece = self.haystack.sentence(self.rng)
                if used + piece.tokens > size:
                    break
                pieces.append(piece)
                used += piece.tokens
            if not pieces:
                pieces = [pick(self.rng, self.haystack.by_tokens[self.haystack.shortest])]
            self._say(trial, ask, opener, pieces)

    def _say(self, meter: Meter, ask: str, opener: str, pieces: Sequence[object]) -> None:
        content = opener + say(meter, pieces)  # type: ignore[arg-type]
        self.meter = meter
        self.turns.append(Turn(turn_index=len(self.turns), role="user", content=ask))
        self.turns.append(Turn(turn_index=len(self.turns), role="assistant", content=content))

    def _event(self, event: Event) -> None:
        for turn in event.turns:
            self._turn(turn.role, turn.parts)

    def _turn(self, role: Role, parts: Sequence[Statement]) -> None:
        self.meter.open(role)
        keys = []
        content = ""
        for part in parts:
            lead = " " if content else ""
            if part.key is not None:
                keys.append(part.key)
                if part.key not in self.spans:
                    shift, base = len(self.meter.pending + lead), self.meter.tokens_before_pending
                    bare = part.text.rstrip(".!")
                    span = self.ruler.spans(self.meter.pending + lead + part.text, [(shift, shift + len(bare))])[0]
                    self.spans[part.key] = Span(base + span.start, base + span.end)
                    self.turn_of[part.key] = len(self.turns)
            self.meter.text(lead + part.text)
            content += lead + part.text
        fact_ids = tuple(self.ids[key] for key in keys)
        self.turns.append(Turn(turn_index=len(self.turns), role=role, content=content, fact_ids=fact_ids))

    def _ask(self, rung: int, turn_end: int, history: Meter, place: int) -> Ask:
        """The tail of one probe, padded to the rung's exact length."""
        probe = self.script.probes[place]
        bare = history.copy()
        self._append_tail(bare, probe, "")
        missing = rung - bare.tokens
        pad, wanted, tokens = "", missing, bare.tokens
        for _ in range(24):
            if tokens == rung:
                break
            found = self.haystack.pad(self.rng, wanted)
            if found is None:
                wanted += 1 if wanted < 2 else -1
                continue
            pad = found
            meter = history.copy()
            self._append_tail(meter, probe, pad)
            tokens = meter.tokens
            wanted += rung - tokens
        if tokens != rung:
            raise ExactnessError(
                f"{self.conversation_id}, rung {rung}: the prompt came out at {tokens} tokens and no padding of "
                f"{missing} tokens was found"
            )
        tail = [Turn(turn_index=turn_end, role="user", content=f"{pad} {probe.question}".strip())]
        if probe.prefix:
            tail.append(Turn(turn_index=turn_end + 1, role="assistant", content=probe.prefix))
        span = self.spans[probe.live] if probe.live is not None else None
        return Ask(
            rung=rung,
            probe_id=f"{self.conversation_id}/p{place}",
            turn_end=turn_end,
            tail=tuple(tail),
            prompt_tokens=tokens,
            fact_span=(span.start, span.end) if span else None,
            depth_pct=round(100 * span.start / tokens, 3) if span else None,
            distance_tokens=tokens - span.end if span else None,
            distance_turns=turn_end - self.turn_of[probe.live] if probe.live is not None else None,
        )

    # Records

    def _fact(self, fact: DraftFact) -> Fact:
        return Fact(
            fact_id=self.ids[fact.key],
            entity=fact.entity,
            attribute=fact.attribute,
            value=fact.value,
            kind=fact.kind,
            turn_index=self.turn_of[fact.key],
            supersedes=self.ids[fact.supersedes] if fact.supersedes else None,
            aliases=aliases(fact.value, fact.value_kind),
        )

    def _probe(self, place: int, probe: DraftProbe) -> Probe:
        return Probe(
            probe_id=f"{self.conversation_id}/p{place}",
            kind=probe.kind,
            question=probe.question,
            gold=probe.gold,
            aliases=probe.aliases,
            live_fact=self.ids[probe.live] if probe.live is not None else None,
            distractor_values=probe.distractors,
            stale_values=probe.stale,
            answer_prefix=probe.prefix,
        )

    def _verify(self, conversation: Conversation) -> None:
        """Encode prompts whole and compare with the sums: all of a short conversation's, as many as cost little else."""
        budget = _ENCODE_WHOLE_TOKENS
        for ask in conversation.asks:
            budget -= ask.prompt_tokens
            if budget < 0:
                break
            realised = self.ruler.prompt_tokens(messages_for(conversation, ask))
            if realised != ask.prompt_tokens:
                raise ExactnessError(
                    f"{ask.probe_id}: planned {ask.rung} tokens, counted {ask.prompt_tokens}, encoded {realised}"
                )
