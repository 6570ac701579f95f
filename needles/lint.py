"""Proofs, for a generated set, that every probe has one true answer that can only be read where it was planted.

    problems = lint(conversations)              # [] is a clean set
    problems = lint(conversations, ruler=ruler) # also encodes every prompt and compares with its planned length

For each probe: exactly one live value at that turn and it is the gold; the gold occurs nowhere but in the turns that
state it. Over the set: ids unique, values unique across conversations (so a foreign value in a reply is a cache leak),
and constant answers score about 0.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longrecall.needles.render import Ruler, messages_for
from longrecall.needles.schema import Ask, Conversation, Fact, Probe

MAX_BASELINE = 0.05
"""A constant answer may be right on at most this share of the probes."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One broken rule."""

    rule: str
    conversation_id: str | None
    """None: the rule is about the whole set."""
    probe_id: str | None
    message: str


def lint(conversations: Iterable[Conversation], *, ruler: Ruler | None = None) -> list[Problem]:
    """Every broken rule of a set; streams, keeping only ids and values."""
    problems: list[Problem] = []
    ids: set[str] = set()
    owner_of: dict[str, str] = {}
    golds: Counter[str] = Counter()
    last_right = total = 0
    for conversation in conversations:
        found = _lint_one(conversation, ruler)
        for key in [
            conversation.conversation_id,
            *(f.fact_id for f in conversation.facts),
            *(p.probe_id for p in conversation.probes),
        ]:
            if key in ids:
                found.append(_problem("unique-ids", conversation, None, f"the id {key!r} occurs twice"))
            ids.add(key)
        for fact in conversation.facts:
            other = owner_of.setdefault(fact.value, conversation.conversation_id)
            if other != conversation.conversation_id:
                found.append(
                    _problem(
                        "foreign-values", conversation, None, f"the value {fact.value!r} is also planted in {other}"
                    )
                )
        problems += found
        golds.update(probe.gold for probe in conversation.probes if probe.live_fact is not None)
        right, asked = last_value_score(conversation)
        last_right, total = last_right + right, total + asked
    if total:
        answer, times = golds.most_common(1)[0]
        number = golds.total()
        if number >= 20 and times / number > MAX_BASELINE:
            problems.append(
                Problem(
                    rule="constant-answer",
                    conversation_id=None,
                    probe_id=None,
                    message=f"answering {answer!r} every time is right on {times} of {number} probes",
                )
            )
        if total >= 20 and last_right / total > MAX_BASELINE:
            problems.append(
                Problem(
                    rule="last-value",
                    conversation_id=None,
                    probe_id=None,
                    message=f"answering the last value stated is right on {last_right} of {total} prompts",
                )
            )
    return problems


def last_value_score(conversation: Conversation) -> tuple[int, int]:
    """On how many prompts the last value stated before the branch is the answer, of how many."""
    stated = sorted(conversation.facts, key=lambda fact: fact.turn_index)
    gold_of = {probe.probe_id: probe for probe in conversation.probes}
    right = asked = 0
    for ask in conversation.asks:
        probe = gold_of[ask.probe_id]
        if probe.live_fact is None:
            continue
        asked += 1
        before = [fact for fact in stated if fact.turn_index < ask.turn_end]
        right += bool(before) and before[-1].value == probe.gold
    return right, asked


def _problem(rule: str, conversation: Conversation, probe: Probe | None, message: str) -> Problem:
    return Problem(
        rule=rule,
        conversation_id=conversation.conversation_id,
        probe_id=probe.probe_id if probe else None,
        message=message,
    )


def _lint_one(conversation: Conversation, ruler: Ruler | None) -> list[Problem]:
    found: list[Problem] = []

    def add(rule: str, probe: Probe | None, message: str) -> None:
        found.append(_problem(rule, conversation, probe, message))

    facts = {fact.fact_id: fact for fact in conversation.facts}
    probes = {probe.probe_id: probe for probe in conversation.probes}
    planned = Counter((ask.rung, ask.probe_id) for ask in conversation.asks)
    for key, times in planned.items():
        if times > 1:
            add("unique-asks", probes.get(key[1]), f"rung {key[0]} is asked {times} times")
    ends: dict[int, set[int]] = {}
    for ask in conversation.asks:
        ends.setdefault(ask.rung, set()).add(ask.turn_end)
        if ask.prompt_tokens != ask.rung:
            add("exact", probes.get(ask.probe_id), f"{ask.prompt_tokens} tokens on rung {ask.rung}")
    growing = [max(ends[rung]) for rung in sorted(ends)]
    if growing != sorted(growing):
        add("nested", None, f"the history does not grow with the rungs: {growing}")
    for fact in conversation.facts:
        turn = conversation.turns[fact.turn_index]
        if fact.fact_id not in turn.fact_ids or fact.value not in turn.content:
            add("stated", None, f"turn {fact.turn_index} does not state {fact.fact_id}")
    for probe in conversation.probes:
        _lint_probe(conversation, probe, facts, add)
    for ask in conversation.asks:
        probe = probes[ask.probe_id]
        if probe.live_fact is not None:
            if problem := _live_problem(conversation, facts, probe, ask):
                add("one-live-value", probe, f"rung {ask.rung}: {problem}")
        if any(probe.gold in turn.content for turn in ask.tail):
            add("answer-in-tail", probe, f"the question of rung {ask.rung} contains the answer {probe.gold!r}")
        if ruler is not None:
            realised = ruler.prompt_tokens(messages_for(conversation, ask))
            if realised != ask.prompt_tokens:
                add("exact", probe, f"rung {ask.rung}: planned {ask.prompt_tokens}, encoded {realised}")
    return found


def _lint_probe(conversation: Conversation, probe: Probe, facts: dict[str, Fact], add: object) -> None:
    report = add
    assert callable(report)
    if probe.live_fact is None:
        return
    live = facts.get(probe.live_fact)
    if live is None:
        report("live-fact", probe, f"there is no fact {probe.live_fact}")
        return
    for turn in conversation.turns:
        if probe.gold in turn.content and live.fact_id not in turn.fact_ids:
            report(
                "answer-elsewhere", probe, f"turn {turn.turn_index} contains {probe.gold!r} without stating the fact"
            )
    for value in (*probe.distractor_values, *probe.stale_values):
        if value == probe.gold:
            report("distractor-is-gold", probe, f"{value!r} is the answer and a wrong answer")
        elif value and (value in probe.gold or probe.gold in value):
            report("distractor-contains-gold", probe, f"{value!r} and the answer {probe.gold!r} contain each other")


def _live_problem(conversation: Conversation, facts: dict[str, Fact], probe: Probe, ask: Ask) -> str | None:
    """Why not exactly one live value of the asked (entity, attribute) exists at this branch."""
    assert probe.live_fact is not None
    live = facts[probe.live_fact]
    before: Sequence[Fact] = [fact for fact in conversation.facts if fact.turn_index < ask.turn_end]
    replaced = {fact.supersedes for fact in before}
    current = [
        fact
        for fact in before
        if (fact.entity, fact.attribute) == (live.entity, live.attribute) and fact.fact_id not in replaced
    ]
    if [fact.fact_id for fact in current] != [live.fact_id]:
        return f"live values of {live.attribute} of {live.entity} are {[fact.value for fact in current]}"
    if live.value != probe.gold:
        return f"the live value is {live.value!r}, the gold {probe.gold!r}"
    return None
