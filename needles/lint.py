"""Proofs, for a generated set, that every probe has one true answer that can only be read where it was planted.

    problems = lint(conversations)               # [] is a clean set; streams
    problems = lint(conversations, ruler=ruler)  # also encodes every prompt and compares with its planned length

For each prompt: exactly one live value of what is asked stands in the history and it is the gold; the gold occurs
nowhere but in the turns that state it. For each abstention: nothing that answers it stands there. Over the set: ids are
unique, values are unique across conversations (so a foreign value in a reply is a cache leak), and constant answers
score about 0 (`Baselines`).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from longrecall.needles.render import Ruler, messages_for
from longrecall.needles.schema import Ask, Conversation, Fact, Probe

MAX_BASELINE = 0.05
"""A constant answer may be right on at most this share of the prompts that have an answer."""
MAX_ABSTENTIONS = 0.5
"""And "it was not mentioned" on at most this share of all prompts."""
_FEW = 20
"""Shares of fewer prompts than this say nothing."""
_SAME_ANSWERS = ("count",)
"""Kinds whose answers are small numbers and repeat by nature; they are left out of the constant-answer rule."""
_COMMON = frozenset(
    "a an and are at by came did do does for from has have i in is it its of on one or right so somebody takes that "
    "the their there they this to up was were what when which who whose with you".split()
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One broken rule."""

    rule: str
    conversation_id: str | None
    """None: the rule is about the whole set."""
    probe_id: str | None
    message: str


@dataclass
class Baselines:
    """What answers without reading would score, gathered conversation by conversation."""

    prompts: int = 0
    abstentions: int = 0
    last_value: int = 0
    """Prompts whose answer is the last value stated before the branch."""
    frequent_value: float = 0.0
    """Prompts right in expectation by naming a value that the history states most often (ties broken by chance)."""
    golds: Counter[str] = field(default_factory=Counter)
    """Answers of probes, each probe counted once however many rungs ask it."""

    def add(self, conversation: Conversation) -> None:
        """Count one more conversation."""
        probes = {probe.probe_id: probe for probe in conversation.probes}
        stated = sorted((fact for fact in conversation.facts if fact.value), key=lambda fact: fact.turn_index)
        mentions = [(turn.turn_index, set(turn.fact_ids)) for turn in conversation.turns if turn.fact_ids]
        ends: dict[int, tuple[str | None, list[str]]] = {}
        asked = {ask.probe_id for ask in conversation.asks}
        self.golds.update(
            probe.gold
            for key, probe in probes.items()
            if key in asked and probe.gold and probe.kind not in _SAME_ANSWERS
        )
        for ask in conversation.asks:
            probe = probes.get(ask.probe_id)
            if probe is None:
                continue
            self.prompts += 1
            if not probe.gold:
                self.abstentions += 1
                continue
            if ask.turn_end not in ends:
                before = [fact for fact in stated if fact.turn_index < ask.turn_end]
                times = Counter(key for turn, keys in mentions if turn < ask.turn_end for key in keys)
                most = [fact.value for fact in before if times[fact.fact_id] == max(times.values())]
                ends[ask.turn_end] = (before[-1].value if before else None, most)
            last, frequent = ends[ask.turn_end]
            self.last_value += last == probe.gold
            self.frequent_value += (probe.gold in frequent) / max(1, len(frequent))

    @property
    def answerable(self) -> int:
        return self.prompts - self.abstentions

    def problems(self) -> list[Problem]:
        """Answers that do too well."""
        found = []

        def add(rule: str, message: str) -> None:
            found.append(Problem(rule=rule, conversation_id=None, probe_id=None, message=message))

        if (probes := self.golds.total()) >= _FEW:
            answer, times = self.golds.most_common(1)[0]
            if times / probes > MAX_BASELINE:
                add("constant-answer", f"{answer!r} is right on {times} of {probes} probes")
        if self.answerable >= _FEW:
            if self.last_value / self.answerable > MAX_BASELINE:
                said = f"the last value stated is right on {self.last_value} of {self.answerable} prompts"
                add("last-value", f"{said}; more distractors cure it")
        if self.prompts >= _FEW and self.abstentions / self.prompts > MAX_ABSTENTIONS:
            said = f'"not mentioned" is right on {self.abstentions} of {self.prompts} prompts'
            add("not-mentioned", f"{said}; more facts that are asked about cure it")
        return found


class Linter:
    """Lints a stream: `add` every conversation, then read `problems()`."""

    def __init__(self, ruler: Ruler | None = None) -> None:
        self.baselines = Baselines()
        self._ruler = ruler
        self._ids: set[str] = set()
        self._owner: dict[str, str] = {}
        self._found: list[Problem] = []

    def add(self, conversation: Conversation) -> None:
        """Check one more conversation."""
        self._found += _Check(conversation, self._ruler).run()
        for key in (
            conversation.conversation_id,
            *(fact.fact_id for fact in conversation.facts),
            *(probe.probe_id for probe in conversation.probes),
        ):
            if key in self._ids:
                self._found.append(_problem("unique-ids", conversation, None, f"the id {key!r} occurs twice"))
            self._ids.add(key)
        for fact in conversation.facts:
            if fact.value:
                other = self._owner.setdefault(fact.value, conversation.conversation_id)
                if other != conversation.conversation_id:
                    message = f"the value {fact.value!r} is also planted in {other}"
                    self._found.append(_problem("foreign-values", conversation, None, message))
        self.baselines.add(conversation)

    def problems(self) -> list[Problem]:
        """Every broken rule so far."""
        return [*self._found, *self.baselines.problems()]


def lint(conversations: Iterable[Conversation], *, ruler: Ruler | None = None) -> list[Problem]:
    """Every broken rule of a set."""
    linter = Linter(ruler)
    for conversation in conversations:
        linter.add(conversation)
    return linter.problems()


def _problem(rule: str, conversation: Conversation, probe: Probe | None, message: str) -> Problem:
    return Problem(
        rule=rule,
        conversation_id=conversation.conversation_id,
        probe_id=probe.probe_id if probe else None,
        message=message,
    )


class _Check:
    """The rules about one conversation."""

    def __init__(self, conversation: Conversation, ruler: Ruler | None) -> None:
        self.conversation, self.ruler = conversation, ruler
        self.facts = {fact.fact_id: fact for fact in conversation.facts}
        self.probes = {probe.probe_id: probe for probe in conversation.probes}
        self.found: list[Problem] = []

    def add(self, rule: str, probe: Probe | None, message: str) -> None:
        self.found.append(_problem(rule, self.conversation, probe, message))

    def run(self) -> list[Problem]:
        self._shape()
        for fact in self.conversation.facts:
            self._stated(fact)
        for probe in self.conversation.probes:
            self._only_there(probe)
        for ask in self.conversation.asks:
            if ask.probe_id not in self.probes:
                self.add("unknown-probe", None, f"rung {ask.rung} asks {ask.probe_id}, which does not exist")
                continue
            probe = self.probes[ask.probe_id]
            if self.conversation.turns or not self.conversation.facts:
                if (why := self._untrue(probe, ask)) is not None:
                    self.add("true-answer", probe, f"rung {ask.rung}: {why}")
                if len(probe.gold) > 2 and any(probe.gold in turn.content for turn in ask.tail):
                    self.add("answer-in-tail", probe, f"the tail of rung {ask.rung} contains the answer {probe.gold!r}")
            elif probe.live_fact is not None:  # the concat twin: its original is linted, its tails hold everything
                if not any(probe.gold in turn.content for turn in ask.tail):
                    self.add("stated", probe, f"the prompt of rung {ask.rung} does not state {probe.gold!r}")
            if self.ruler is not None:
                realised = self.ruler.prompt_tokens(messages_for(self.conversation, ask))
                if realised != ask.prompt_tokens:
                    self.add("exact", probe, f"rung {ask.rung}: planned {ask.prompt_tokens}, encoded {realised}")
        return self.found

    def _shape(self) -> None:
        conversation = self.conversation
        if not conversation.rungs or not conversation.asks:
            self.add("something-asked", None, "it has no rungs or asks nothing, so it measures nothing")
        for rung in sorted({ask.rung for ask in conversation.asks} - set(conversation.rungs)):
            self.add("something-asked", None, f"prompts of rung {rung}, which is none of {list(conversation.rungs)}")
        for (rung, probe_id), times in Counter((ask.rung, ask.probe_id) for ask in conversation.asks).items():
            if times > 1:
                self.add("unique-asks", self.probes.get(probe_id), f"rung {rung} is asked {times} times")
        ends: dict[int, set[int]] = {}
        for ask in conversation.asks:
            ends.setdefault(ask.rung, set()).add(ask.turn_end)
            if ask.prompt_tokens != ask.rung:
                self.add("exact", self.probes.get(ask.probe_id), f"{ask.prompt_tokens} tokens on rung {ask.rung}")
            if not ask.tail or not any(turn.role == "user" for turn in ask.tail):
                self.add("no-question", self.probes.get(ask.probe_id), f"rung {ask.rung} has no user turn in its tail")
        growing = [end for rung in sorted(ends) for end in sorted(ends[rung])]
        if growing != sorted(growing) or any(len(found) > 1 for found in ends.values()):
            self.add("nested", None, f"the histories of growing rungs end at turns {growing}")
        for before, turn in zip((None, *conversation.turns), conversation.turns, strict=False):
            if before is not None and before.role == turn.role:
                self.add("turns", None, f"turns {before.turn_index} and {turn.turn_index} are both of {turn.role}")
            if not turn.content.strip():
                self.add("turns", None, f"turn {turn.turn_index} is empty")
            if self.ruler is not None:
                for text in self.ruler.special_strings:
                    if text in turn.content:
                        self.add("control-token", None, f"turn {turn.turn_index} holds the control token {text!r}")

    def _stated(self, fact: Fact) -> None:
        turns = self.conversation.turns
        if not turns:  # the concat twin: everything stands in the tails
            if not all(any(fact.value in turn.content for turn in ask.tail) for ask in self.conversation.asks[-1:]):
                self.add("stated", None, f"the longest prompt does not state {fact.fact_id}")
        elif fact.turn_index >= len(turns) or fact.fact_id not in turns[fact.turn_index].fact_ids:
            self.add("stated", None, f"turn {fact.turn_index} does not state {fact.fact_id}")
        elif fact.value not in turns[fact.turn_index].content:
            self.add("stated", None, f"turn {fact.turn_index} does not contain {fact.value!r} of {fact.fact_id}")

    def _only_there(self, probe: Probe) -> None:
        if probe.live_fact is None:
            return
        if probe.live_fact not in self.facts:
            self.add("live-fact", probe, f"there is no fact {probe.live_fact}")
            return
        for turn in self.conversation.turns:
            if probe.gold in turn.content and probe.live_fact not in turn.fact_ids:
                self.add(
                    "answer-elsewhere", probe, f"turn {turn.turn_index} contains {probe.gold!r} without stating it"
                )
        for value in (*probe.distractor_values, *probe.stale_values):
            if value == probe.gold:
                self.add("distractor-is-gold", probe, f"{value!r} is both the answer and a wrong answer")
            elif value and (value in probe.gold or probe.gold in value):
                self.add(
                    "distractor-contains-gold", probe, f"{value!r} and the answer {probe.gold!r} contain each other"
                )

    def _untrue(self, probe: Probe, ask: Ask) -> str | None:
        """Why the gold is not the one right answer at this branch; None when it is."""
        end = ask.turn_end
        before = [fact for fact in self.conversation.facts if fact.turn_index < end]
        replaced = {fact.supersedes for fact in before}
        current = [fact for fact in before if fact.fact_id not in replaced]
        known = {fact.fact_id for fact in before}
        if absent := [key for key in probe.needs if key not in known]:
            return f"{absent[0]} is needed and not stated yet"
        if probe.live_fact is None:
            return self._untrue_without_fact(probe, current)
        if probe.live_fact not in self.facts:
            return None  # reported above
        live = self.facts[probe.live_fact]
        same = [fact for fact in current if (fact.entity, fact.attribute) == (live.entity, live.attribute)]
        if [fact.fact_id for fact in same] != [live.fact_id]:
            return f"the live values of {live.attribute} of {live.entity} are {[fact.value for fact in same]}"
        if live.value != probe.gold:
            return f"the live value is {live.value!r}, the gold {probe.gold!r}"
        special: dict[str, Callable[[Probe, Fact, list[Fact]], str | None]] = {
            "ordinal": self._ordinal,
            "order": self._order,
            "latent": self._latent,
        }
        return special[probe.kind](probe, live, before) if probe.kind in special else None

    def _untrue_without_fact(self, probe: Probe, current: list[Fact]) -> str | None:
        if probe.kind == "count":
            asked = {self.facts[key].attribute for key in probe.needs}
            number = sum(fact.attribute in asked for fact in current)
            return None if str(number) == probe.gold else f"{number} were said, the gold is {probe.gold!r}"
        if probe.gold:
            return f"there is a gold {probe.gold!r} but no fact to read it from"
        for fact in current:
            if fact.value and _names(probe.question, fact.entity) and _names(probe.question, fact.attribute):
                return f"it should be unanswerable, but {fact.fact_id} answers it with {fact.value!r}"
        return None

    def _ordinal(self, probe: Probe, live: Fact, before: list[Fact]) -> str | None:
        kind = live.entity.split(" ", 1)[1]
        alike = [f for f in sorted(before, key=lambda f: f.turn_index) if f.entity.split(" ", 1)[-1] == kind]
        place = alike.index(live)
        if len([key for key in probe.needs if key != live.fact_id]) != place:
            return f"{live.entity} is number {place + 1} of the notes alike"
        return None

    def _order(self, probe: Probe, live: Fact, before: list[Fact]) -> str | None:
        alike = [f for f in sorted(before, key=lambda f: f.turn_index) if f.attribute == live.attribute]
        place = alike.index(live)
        if place == 0 or alike[place - 1].fact_id not in probe.needs or alike[place - 1].entity not in probe.question:
            return f"{live.value!r} does not come right after the fact that the question names"
        return None

    def _latent(self, probe: Probe, live: Fact, before: list[Fact]) -> str | None:
        if other := next((f for f in before if f.attribute == live.attribute and f.fact_id != live.fact_id), None):
            return f"{other.entity} answers to the question as well as {live.entity}"
        sentence = next(
            (
                part
                for part in re.split(r"(?<=\.) ", self.conversation.turns[live.turn_index].content)
                if live.value in part
            ),
            "",
        )
        shared = _content_words(probe.question) & _content_words(sentence)
        return f"the question shares {sorted(shared)} with the fact" if shared else None


def _names(question: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", question) is not None


def _content_words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower())) - _COMMON
