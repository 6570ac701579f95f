"""Plant facts in growing conversations: exact to the token, rung by rung, every rung a prefix of the next.

    ruler = Ruler.from_folder(folder)
    for conversation in make_conversations(recipe("reference"), ruler=ruler, rungs=[448, 1024, 2048], count=40, seed=7):
        ...

Each conversation is written once, front to back. Before rung r's length is reached the history stops short by the
longest question (plus a few tokens of padding); every probe of the rung is a tail of exactly the missing length, so
planned and realised length agree for each prompt, the history is shared between probes, and it is a prefix of rung
r+1's. Rungs that lie close together (the residues of one length) share a history and differ in the tail alone.

Lengths are sums of counted pieces (`render.Ruler`); then prompts are encoded whole and compared, as many of each
conversation as cost little, and a window of long ones. A ruler without exact sums (a server's
`/tokenize`, a template that rewrites earlier turns) is asked about every prompt instead. Same (recipe, seed,
tokenizer, version): same bytes.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import cast

from longrecall.needles.elements import (
    DraftFact,
    DraftProbe,
    DraftTurn,
    Event,
    PlantError,
    Script,
    Statement,
    draft_script,
)
from longrecall.needles.filler import Prose, pick
from longrecall.needles.haystack import SHORT_ASKS, FillerError, Haystack, Piece, Walk, own_sentences, say
from longrecall.needles.recipes import Recipe, validate
from longrecall.needles.render import Meter, Ruler, Span, as_messages, messages_for
from longrecall.needles.schema import Ask, Conversation, Fact, Probe, Role, Turn
from longrecall.needles.values import Values

__all__ = ["ExactnessError", "PlantError", "concat_twin", "ladder", "make_conversations", "make_haystack", "recipe_id"]

GENERATOR_VERSION = 1
"""Goes into every conversation; raised whenever the same arguments would give other bytes."""

MAX_RUNG = 2**20
_SLACK = 3
"""Tokens kept free beyond the longest question, so that every question is padded by 0 or at least 2."""
_MEASURED_SLACK = 12
"""The same for rulers whose sums are estimates."""
_ESTIMATE_MARGIN = 4
"""Tokens by which the estimated size of a fact's turns may be too small."""
_ENCODE_WHOLE_TOKENS = 5_000
"""So many tokens of each conversation's prompts are encoded whole and compared."""
_WINDOW_CHARACTERS = 6_000
"""And a window of so many characters of what is longer."""
_SHORT_TURN = 12
_LEADS = ("So", "Now", "And", "Well", "Then", "Hm", "Oh", "Yes", "Ok", "So,", "Now,", "Well,")
"""Single words before a question, for the one length that no phrase has."""


class ExactnessError(RuntimeError):
    """A prompt did not come out at its planned length: a defect in the counts, never to be served."""


def recipe_id(recipe: Recipe) -> str:
    """Name and content hash of a recipe."""
    payload = json.dumps(asdict(recipe), sort_keys=True, ensure_ascii=False)
    return f"{recipe.name}-{hashlib.sha256(payload.encode()).hexdigest()[:8]}"


def ladder(rungs: Sequence[int], *, modulus: int = 1, residues: Sequence[int] = (0,)) -> list[int]:
    """For each rung and residue the largest length that is not longer and leaves that residue.

    `ladder([4096], modulus=4, residues=[0, 1, 2, 3])` is [4093, 4094, 4095, 4096].
    """
    if modulus < 1 or not residues or not all(0 <= residue < modulus for residue in residues):
        raise PlantError(
            f"residues {list(residues)} of {modulus} are not possible: each lies between 0 and {modulus - 1}"
        )
    lengths = {rung - (rung - residue) % modulus for rung in rungs for residue in residues}
    return sorted(length for length in lengths if length > 0)


def make_haystack(recipe: Recipe, ruler: Ruler, seed: int) -> Haystack:
    """The filler of a set; reading and counting it takes most of a second, so pass it on between calls."""
    own = own_sentences(recipe.filler, ruler) if recipe.filler is not None else None
    return Haystack(ruler, Prose(recipe.split), f"{recipe.split}:{seed}", own=own)


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
    """`count` conversations of one set, in order, from number `first` on; number i is the same whatever `count` is.

    `rungs` are prompt lengths in tokens, template included. Raises before the first conversation when the arguments
    cannot be met.
    """
    validate(recipe, f"recipe {recipe.name!r}")
    if not rungs or list(rungs) != sorted(set(rungs)):
        raise PlantError(f"rungs {list(rungs)} are not possible: at least one length, growing, none twice")
    if rungs[-1] > MAX_RUNG:
        raise PlantError(f"rung {rungs[-1]} is not possible: at most {MAX_RUNG} tokens")
    if count < 0 or first < 0:
        raise PlantError(f"count {count} from number {first} is not possible: 0 or more")
    values = Values()
    values.check(recipe.demands(), first + count)
    if haystack is None:
        haystack = make_haystack(recipe, ruler, seed)
    if recipe.filler is not None and haystack.tokens < rungs[-1]:
        raise FillerError(
            f"the filler {recipe.filler.path!r} has {haystack.tokens:,} usable tokens; rung {rungs[-1]} needs as many: "
            "add text or lower the rung"
        )
    for number in range(first + count):
        rng = random.Random(f"{GENERATOR_VERSION}:{recipe_id(recipe)}:{seed}:{number}")
        script = draft_script(recipe, values, rng, haystack.prose)  # skipped ones too: values are unique over the set
        if number >= first:
            yield _Assembly(recipe, script, haystack, rungs, seed, number, rng).make()


class _Assembly:
    """One conversation being written."""

    def __init__(
        self,
        recipe: Recipe,
        script: Script,
        haystack: Haystack,
        rungs: Sequence[int],
        seed: int,
        number: int,
        rng: random.Random,
    ) -> None:
        self.recipe, self.script, self.haystack, self.ruler = recipe, script, haystack, haystack.ruler
        self.rungs, self.seed, self.rng = rungs, seed, rng
        self.walk = Walk(haystack.pieces, rng)
        self.meter = Meter(self.ruler)
        self.turns: list[Turn] = []
        self.undo: list[tuple[int, Meter]] = []
        """State before each filler exchange since the last event, for rulers whose sums are estimates."""
        self.spans: dict[str, Span] = {}
        """By fact key: where it is stated first."""
        self.turn_of: dict[str, int] = {}
        content = (
            GENERATOR_VERSION,
            recipe_id(recipe),
            self.ruler.tokenizer_hash,
            self.ruler.template_hash,
            *rungs,
            seed,
        )
        stem = hashlib.sha256(f"{content}:{number}".encode()).hexdigest()[:12]
        self.conversation_id = f"{recipe.name}-{number:05d}-{stem}"
        self.slack = _SLACK if self.ruler.additive else _MEASURED_SLACK

    def make(self) -> Conversation:
        longest = max((self._tail_tokens(probe) for probe in self.script.probes), default=0)
        ends = [rung - longest - self.slack for rung in self.rungs]
        segments = self._schedule(ends)
        if self.recipe.system or self.script.system:
            opening = [Statement(self.recipe.system)] if self.recipe.system else []
            self._turn("system", opening + self.script.system)
        branches = []
        for events, end in zip(segments, ends, strict=True):
            self._segment(events, end)
            branches.append((len(self.turns), self.meter.copy()))
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
            asks=tuple(
                self._ask(rung, turn_end, meter, place)
                for rung, (turn_end, meter) in zip(self.rungs, branches, strict=True)
                for place, probe in enumerate(self.script.probes)
                if self._fair(probe, turn_end)
            ),
        )
        _verify(conversation, self.ruler, self.rng)
        return conversation

    def _fair(self, probe: DraftProbe, turn_end: int) -> bool:
        """Whether the history holds what the probe needs and nothing that would change its answer."""
        stated = all(self.turn_of[key] < turn_end for key in probe.needs)
        return stated and not any(self.turn_of[key] < turn_end for key in probe.absent)

    # What must fit where

    def _after_filler(self) -> Meter:
        meter = Meter(self.ruler)
        meter.turn("user", "Go on.")
        meter.turn("assistant", "It rained slowly.")
        return meter

    def _event_tokens(self, event: Event) -> int:
        meter = self._after_filler()
        before = meter.tokens
        for turn in event.turns:
            meter.turn(turn.role, _joined(turn.parts))
        return meter.tokens - before

    def _tail_tokens(self, probe: DraftProbe) -> int:
        """Tokens of a question without padding."""
        meter = self._after_filler()
        before = meter.tokens
        _append_tail(meter, probe, "")
        return meter.tokens - before

    def _start_tokens(self) -> int:
        meter = Meter(self.ruler)
        if self.recipe.system or self.script.system:
            opening = [Statement(self.recipe.system)] if self.recipe.system else []
            meter.turn("system", _joined(opening + self.script.system))
        meter.open("user")
        return meter.tokens

    def _schedule(self, ends: list[int]) -> list[list[tuple[Event, int]]]:
        """Events of each rung's segment, with the token position at which each should begin."""
        rng = self.rng
        groups = [list(group) for group in self.script.groups]
        for group in groups:
            for event in group:
                event.tokens = self._event_tokens(event) + (0 if self.ruler.additive else _ESTIMATE_MARGIN)
        order = shuffled_places(rng, groups)
        queue = [groups[place].pop(0) for place in order]
        if self.recipe.scope == "first" and (spare := next((e for e in queue if not e.probed), None)) is not None:
            spare.where = "first"  # one distractor in the first rung at least: see below
        start = self._start_tokens()
        begins = [start, *ends[:-1]]
        rooms = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if len(ends) == 1 and any(event.where == "later" for event in queue):
            raise PlantError(
                f"recipe {self.recipe.name!r} plants facts after the first rung: it needs at least two rungs"
            )
        must = sum(event.tokens for event in queue if event.where == "first" or len(ends) == 1)
        if must > rooms[0]:
            minimum = self.rungs[0] + must - rooms[0]
            movable = sum(event.tokens for event in queue if event.where != "first") if len(ends) == 1 else 0
            raise PlantError(
                f"rung {self.rungs[0]} is too small for recipe {self.recipe.name!r}: its facts, the template and the "
                f"longest question need at least {minimum} tokens in conversation {self.conversation_id}"
                + (
                    f"; with a longer rung after it ({self.rungs[0]},{2 * minimum}) the distractors can stand there"
                    if 0 < must - movable <= rooms[0]
                    else ""
                )
            )
        where = {id(event): 0 for event in queue if event.where == "first" or len(ends) == 1}
        free = [rooms[0] - must, *rooms[1:]]
        if len(ends) > 1:
            self._place(queue, where, free, ends, start)
        segments = []
        for segment, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            here = [event for event in queue if where[id(event)] == segment]
            # Repeating the last value stated should not be right: a distractor, where there is one, ends the segment.
            others = [place for place, event in enumerate(here) if not event.probed]
            if others and here[-1].probed:
                here.append(here.pop(others[-1]))
            segments.append(self._positions(here, begin, end, by_depth=segment == 0))
        return segments

    def _place(self, queue: list[Event], where: dict[int, int], free: list[int], ends: list[int], start: int) -> None:
        """Choose a segment for each event that may lie after the first branch: in order, uniformly, as they fit."""
        for kind, lowest in (("any", 0), ("later", 1)):
            events = [event for event in queue if event.where == kind]
            if not events:
                continue
            low = start if lowest == 0 else ends[0]
            targets = sorted(low + self.rng.random() * (ends[-1] - low) for _ in events)
            if kind == "any" and self.recipe.scope == "first":
                # A quarter of the distractors at least stand in the first rung, where room allows.
                targets[: (len(events) + 3) // 4] = [0.0] * ((len(events) + 3) // 4)
            wanted = [max(lowest, sum(target >= end for end in ends[:-1])) for target in targets]
            chosen = _fit(events, wanted, free) or _fit(events, [lowest] * len(events), free)
            if chosen is None:
                endless = [*free[:-1], sum(event.tokens for event in events)]
                packed = _fit(events, [lowest] * len(events), endless)
                assert packed is not None
                last = sum(event.tokens for event, at in zip(events, packed, strict=True) if at == len(free) - 1)
                raise PlantError(
                    f"rung {self.rungs[-1]} is too small for recipe {self.recipe.name!r}: its facts and distractors "
                    f"need at least {self.rungs[-1] + last - free[-1]} tokens there, or fewer rungs close together"
                )
            for event, segment in zip(events, chosen, strict=True):
                where[id(event)] = segment
                free[segment] -= event.tokens

    def _positions(self, events: list[Event], start: int, end: int, *, by_depth: bool) -> list[tuple[Event, int]]:
        """Begin positions: the recipe's depths, pushed apart so that nothing overlaps and everything fits."""
        depth = self.recipe.depth
        if depth == "uniform" or not by_depth:
            wanted = sorted(start + self.rng.random() * (end - start) for _ in events)
        elif depth == "grid":
            wanted = [start + (place + 0.5) / len(events) * (end - start) for place in range(len(events))]
        else:
            assert isinstance(depth, tuple)
            wanted = sorted(depth[place % len(depth)] / 100 * end for place in range(len(events)))
        out = []
        after = sum(event.tokens for event in events)
        earliest = start
        for event, position in zip(events, wanted, strict=True):
            at = min(max(earliest, int(position)), end - after)
            out.append((event, at))
            earliest = at + event.tokens
            after -= event.tokens
        return out

    # Writing

    def _segment(self, events: list[tuple[Event, int]], end: int) -> None:
        """Write events at their positions, filler between, and stop at exactly `end` tokens if there is room to."""
        needed = sum(event.tokens for event, _ in events)
        for event, position in events:
            self._correct()
            self._filler(min(position, end - needed))
            for turn in event.turns:
                self._turn(turn.role, turn.parts)
            needed -= event.tokens
        self.undo = []
        if self.ruler.additive:
            self._filler(end, exact=True)
            return
        self._correct()
        self._filler(end - (end - self.meter.tokens) // 16 - self.slack)
        for _ in range(4):
            self._correct()
            before = len(self.turns)
            self._filler(end, exact=True)
            if len(self.turns) == before:
                break
        self._correct()
        while self.meter.tokens > end + self.slack - 2 and self.undo:
            turns, self.meter = self.undo.pop()
            del self.turns[turns:]
            self._correct()

    def _correct(self) -> None:
        """Set an estimating meter right by a measurement."""
        if not self.ruler.additive and self.turns:
            self.meter.shift(self._measured_error())

    def _measured_error(self) -> int:
        """Real minus summed tokens of the history with a question after it."""
        probe = self.script.probes[0] if self.script.probes else DraftProbe("", "What else?", "", None)
        meter = self.meter.copy()
        _append_tail(meter, probe, "")
        return self.ruler.prompt_tokens([*as_messages(self.turns), *_tail_messages(probe, "")]) - meter.tokens

    def _filler(self, end: int, *, exact: bool = False) -> None:
        """Filler exchanges up to `end` tokens: at most that, or exactly that where an exchange fits at all."""
        low, high = self.recipe.turn_tokens
        haystack, rng = self.haystack, self.rng
        while end - (tokens := self.meter.tokens) > _SHORT_TURN:
            ask, opener = pick(rng, haystack.asks), pick(rng, haystack.prose.openers)
            meter = self.meter.copy()
            meter.exchange(ask, opener)
            begun = meter.tokens
            rest = end - begun
            if rest < haystack.shortest:
                if exact:
                    self._short_exchange(end)
                return
            reply = low + int(rng.random() * (high - low + 1))
            least = begun - tokens + haystack.longest
            pieces: list[Piece] | None
            if exact and rest < reply + least:
                # What would remain is too small for another exchange: this reply is the last one.
                pieces = haystack.exactly(rng, self.walk, rest)
                if pieces is None:
                    return
            else:
                pieces = self.walk.take(min(reply, rest))
                if not pieces:
                    return
            if not self.ruler.additive:
                self.undo.append((len(self.turns), self.meter))
            content = opener + say(meter, pieces)
            self.meter = meter
            self._record("user", ask)
            self._record("assistant", content)

    def _short_exchange(self, end: int) -> None:
        """A few words each, to the exact token; nothing when that cannot be."""
        meter = self.meter.copy()
        ask = pick(self.rng, SHORT_ASKS)
        meter.turn("user", ask)
        meter.open("assistant")
        wanted = end - meter.tokens
        for _ in range(6):
            if not self.haystack.closers.reachable(wanted) or wanted < 1:
                return
            content = "".join(piece.text for piece in self.haystack.closers.make(self.rng, wanted)).strip()
            trial = meter.copy()
            trial.text(content)
            if trial.tokens == end:
                self.undo.append((len(self.turns), self.meter))
                self.meter = trial
                self._record("user", ask)
                self._record("assistant", content)
                return
            wanted += end - trial.tokens

    def _record(self, role: Role, content: str, keys: Sequence[str] = ()) -> None:
        fact_ids = tuple([f"{self.conversation_id}/{key}" for key in keys]) if keys else ()
        self.turns.append(Turn(turn_index=len(self.turns), role=role, content=content, fact_ids=fact_ids))

    def _turn(self, role: Role, parts: Sequence[Statement]) -> None:
        self.meter.open(role)
        content = ""
        for part in parts:
            lead = part.lead if content else ""
            if part.key is not None and part.key not in self.turn_of:
                self.turn_of[part.key] = len(self.turns)
                if self.ruler.additive:
                    shift, base = len(self.meter.pending + lead), self.meter.tokens_before_pending
                    length = len(self._bare(part))
                    span = self.ruler.spans(self.meter.pending + lead + part.text, [(shift, shift + length)])[0]
                    self.spans[part.key] = Span(base + span.start, base + span.end)
            self.meter.text(lead + part.text)
            content += lead + part.text
        self._record(role, content, list(dict.fromkeys(part.key for part in parts if part.key is not None)))

    def _bare(self, part: Statement) -> str:
        """The statement without a full stop that is not part of the value: tokens merge it with what follows."""
        value = next(fact.value for fact in self.script.facts if fact.key == part.key)
        return part.text if value and part.text.endswith(value) else part.text.rstrip(".!。")

    def _ask(self, rung: int, turn_end: int, history: Meter, place: int) -> Ask:
        """The tail of one probe, padded to the rung's exact length."""
        probe = self.script.probes[place]
        past = as_messages(self.turns[:turn_end]) if not self.ruler.additive else []

        def measured(pad: str) -> int:
            if self.ruler.additive:
                meter = history.copy()
                _append_tail(meter, probe, pad)
                return meter.tokens
            return self.ruler.prompt_tokens([*past, *_tail_messages(probe, pad)])

        pad = padded(self.haystack, self.rng, rung, measured, self.conversation_id)
        messages = _tail_messages(probe, pad)
        tail = tuple(
            Turn(turn_index=turn_end + i, role=cast(Role, message["role"]), content=message["content"])
            for i, message in enumerate(messages)
        )
        span = self._span(probe, turn_end, tail)
        return Ask(
            rung=rung,
            probe_id=f"{self.conversation_id}/p{place}",
            turn_end=turn_end,
            tail=tail,
            prompt_tokens=rung,
            fact_span=(span.start, span.end) if span else None,
            depth_pct=round(100 * span.start / rung, 3) if span else None,
            distance_tokens=rung - span.end if span else None,
            distance_turns=turn_end - self.turn_of[probe.live] if probe.live is not None else None,
        )

    def _span(self, probe: DraftProbe, turn_end: int, tail: tuple[Turn, ...]) -> Span | None:
        """Where the live fact is stated, in tokens of the prompt."""
        if probe.live is None:
            return None
        if probe.live not in self.spans:
            at = self.turn_of[probe.live]
            statement = next(
                self._bare(part)
                for group in (*self.script.groups, [Event([DraftTurn("system", self.script.system)])])
                for event in group
                for turn in event.turns
                for part in turn.parts
                if part.key == probe.live
            )
            found = self.ruler.find(as_messages([*self.turns[:turn_end], *tail]), at, statement)
            if found is None:
                return None
            return found  # not kept: an estimating template may shift it from rung to rung
        return self.spans[probe.live]

    # Records

    def _fact(self, fact: DraftFact) -> Fact:
        return Fact(
            fact_id=f"{self.conversation_id}/{fact.key}",
            entity=fact.entity,
            attribute=fact.attribute,
            value=fact.value,
            kind=fact.kind,
            turn_index=self.turn_of[fact.key],
            supersedes=f"{self.conversation_id}/{fact.supersedes}" if fact.supersedes else None,
            aliases=fact.aliases,
        )

    def _probe(self, place: int, probe: DraftProbe) -> Probe:
        return Probe(
            probe_id=f"{self.conversation_id}/p{place}",
            kind=probe.kind,
            question=probe.question,
            gold=probe.gold,
            aliases=probe.aliases,
            live_fact=f"{self.conversation_id}/{probe.live}" if probe.live is not None else None,
            distractor_values=tuple(dict.fromkeys(probe.distractors)),
            stale_values=probe.stale,
            answer_prefix=probe.prefix,
            needs=tuple(dict.fromkeys(f"{self.conversation_id}/{key}" for key in probe.needs)),
        )


def shuffled_places(rng: random.Random, groups: Sequence[Sequence[Event]]) -> list[int]:
    """Group numbers in a seeded order, each as often as its group has events."""
    places = [place for place, group in enumerate(groups) for _ in group]
    for last in range(len(places) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        places[last], places[other] = places[other], places[last]
    return places


def _fit(events: Sequence[Event], wanted: Sequence[int], free: Sequence[int]) -> list[int] | None:
    """Segments not before the wanted ones, never going back, with room for every event; None when one finds no room."""
    left = list(free)
    chosen: list[int] = []
    segment = 0
    for event, target in zip(events, wanted, strict=True):
        segment = max(segment, target)
        while segment < len(left) and left[segment] < event.tokens:
            segment += 1
        if segment == len(left):
            return None
        left[segment] -= event.tokens
        chosen.append(segment)
    return chosen


def _joined(parts: Sequence[Statement]) -> str:
    return "".join((part.lead if place else "") + part.text for place, part in enumerate(parts))


def _tail_messages(probe: DraftProbe, pad: str) -> list[dict[str, str]]:
    tail = [{"role": "user", "content": f"{pad} {probe.question}".strip()}]
    if probe.prefix:
        tail.append({"role": "assistant", "content": probe.prefix})
    return tail


def _append_tail(meter: Meter, probe: DraftProbe, pad: str) -> None:
    meter.turn("user", f"{pad} {probe.question}".strip())
    if probe.prefix:
        meter.turn("assistant", probe.prefix, begun=True)
    else:
        meter.close()


def padded(haystack: Haystack, rng: random.Random, rung: int, measured: Callable[[str], int], where: str) -> str:
    """Text of a length that makes `measured(text)` exactly `rung`."""
    missing = rung - measured("")
    if missing == 0:
        return ""
    if missing < 0:
        raise PlantError(f"rung {rung} is too small for {where}: at least {rung - missing} tokens are needed")
    wanted = missing
    for _ in range(32):
        pad = haystack.pad(rng, wanted) if wanted > 0 else None
        if pad is None:
            wanted += 1 if wanted < 2 else -1
            if wanted < 2 and missing < 2:
                break
            continue
        tokens = measured(pad)
        if tokens == rung:
            return pad
        wanted += rung - tokens
    for word in _LEADS:
        if measured(word) == rung:
            return word
    raise ExactnessError(f"{where}, rung {rung}: no padding of {missing} tokens was found")


def _verify(conversation: Conversation, ruler: Ruler, rng: random.Random) -> None:
    """Compare sums with encodings: whole prompts while the budget lasts, then a window at a seeded place."""
    if not ruler.additive:
        return  # every prompt was measured
    budget = _ENCODE_WHOLE_TOKENS
    per_rung = max(1, len(conversation.probes))
    turn_about = sorted(range(len(conversation.asks)), key=lambda place: (place % per_rung, place))
    for ask in (conversation.asks[place] for place in turn_about):
        budget -= ask.prompt_tokens
        if budget < 0:
            break
        realised = ruler.prompt_tokens(messages_for(conversation, ask))
        if realised != ask.prompt_tokens:
            raise ExactnessError(
                f"{ask.probe_id}: planned {ask.rung} tokens, counted {ask.prompt_tokens}, encoded {realised}"
            )
    if budget < 0 and len(conversation.turns) > 2:
        text, previous = "", ""
        for turn in conversation.turns[int(rng.random() * (len(conversation.turns) - 2)) :]:
            text += (ruler.layout.between[previous, turn.role] if previous else "") + turn.content
            previous = turn.role
            if len(text) > _WINDOW_CHARACTERS:
                break
        window = "".join(ruler.chunks(text)[1:])  # what follows the first cut
        if window and ruler.count(window) != ruler.count_whole(window):
            raise ExactnessError(
                f"{conversation.conversation_id}: a window of {ruler.count_whole(window)} tokens was counted as "
                f"{ruler.count(window)}"
            )


def concat_twin(conversation: Conversation, haystack: Haystack) -> Conversation:
    """The same facts in one user turn: every prompt as long as its original, the turns joined by line breaks.

    The twin has no history; each tail holds the whole text. It shares its original's cluster.
    """
    ruler = haystack.ruler
    rng = random.Random(f"concat:{conversation.conversation_id}")
    probes = {probe.probe_id: probe for probe in conversation.probes}
    facts = {fact.fact_id: fact for fact in conversation.facts}
    name = f"{conversation.conversation_id}-concat"

    def renamed(identifier: str) -> str:
        return name + identifier.removeprefix(conversation.conversation_id)

    def stated(fact: Fact) -> str:
        return next(part for part in conversation.turns[fact.turn_index].content.split("\n") if fact.value in part)

    # What the prompts of one history have in common is joined, counted and encoded once.
    joined: dict[int, tuple[list[dict[str, str]], str, Meter | None]] = {}
    spans: dict[tuple[int, str], Span | None] = {}

    def join(turn_end: int) -> tuple[list[dict[str, str]], str, Meter | None]:
        history = conversation.turns[:turn_end]
        system = [{"role": "system", "content": turn.content} for turn in history if turn.role == "system"]
        text = "\n".join(turn.content for turn in history if turn.role != "system").strip()
        meter = Meter(ruler) if ruler.additive and text else None
        if meter is not None:
            for message in system:
                meter.turn(message["role"], message["content"])
            meter.turn("user", text)
        return system, text, meter

    asks = []
    for ask in conversation.asks:
        probe = probes[ask.probe_id]
        if ask.turn_end not in joined:
            joined[ask.turn_end] = join(ask.turn_end)
        system, text, common = joined[ask.turn_end]
        begun = [{"role": "assistant", "content": probe.answer_prefix}] if probe.answer_prefix else []

        def prompt(pad: str) -> list[dict[str, str]]:
            question = f"{pad} {probe.question}".strip()  # noqa: B023 - called within this iteration only
            return [*system, {"role": "user", "content": f"{text}\n{question}".strip()}, *begun]  # noqa: B023

        def measured(pad: str) -> int:
            if not ruler.additive:
                return ruler.prompt_tokens(prompt(pad))
            if common is None:  # noqa: B023
                meter, rest = Meter(ruler), prompt(pad)
            else:
                meter, rest = common.copy(), begun  # noqa: B023
                meter.text(f"\n{f'{pad} {probe.question}'.strip()}")  # noqa: B023
            for message in rest:
                meter.turn(message["role"], message["content"], begun=message["role"] == "assistant")
            meter.close()
            return meter.tokens

        messages = prompt(padded(haystack, rng, ask.rung, measured, name))
        span = None
        if probe.live_fact is not None:
            if (ask.turn_end, probe.live_fact) not in spans:
                needed = {probes[a.probe_id].live_fact for a in conversation.asks if a.turn_end == ask.turn_end}
                wanted = [key for key in needed if key is not None]
                found = ruler.find_all(messages, len(system), [stated(facts[key]) for key in wanted])
                spans.update({(ask.turn_end, key): one for key, one in zip(wanted, found, strict=True)})
            span = spans[ask.turn_end, probe.live_fact]
        asks.append(
            replace(
                ask,
                probe_id=renamed(ask.probe_id),
                turn_end=0,
                tail=tuple(
                    Turn(turn_index=place, role=cast(Role, message["role"]), content=message["content"])
                    for place, message in enumerate(messages)
                ),
                fact_span=(span.start, span.end) if span else None,
                depth_pct=round(100 * span.start / ask.rung, 3) if span else None,
                distance_tokens=ask.rung - span.end if span else None,
                distance_turns=0 if span else None,
            )
        )
    return replace(
        conversation,
        conversation_id=name,
        turns=(),
        facts=tuple(
            replace(
                fact,
                fact_id=renamed(fact.fact_id),
                turn_index=0,
                supersedes=renamed(fact.supersedes) if fact.supersedes else None,
            )
            for fact in conversation.facts
        ),
        probes=tuple(
            replace(
                probe,
                probe_id=renamed(probe.probe_id),
                live_fact=renamed(probe.live_fact) if probe.live_fact else None,
                needs=tuple(map(renamed, probe.needs)),
            )
            for probe in conversation.probes
        ),
        asks=tuple(asks),
        cluster_id=conversation.cluster_id or conversation.conversation_id,
    )
