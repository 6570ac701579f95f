"""Each rule is shown to bite: a clean set is damaged in one way and that rule is reported."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from longrecall.needles.lint import Baselines, lint
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import Element, Recipe, recipe
from longrecall.needles.render import Ruler
from longrecall.needles.schema import Conversation


@pytest.fixture(scope="module")
def clean(tekken: Ruler) -> list[Conversation]:
    chosen = Recipe(
        name="all-kinds",
        elements=(
            Element(count=3, distractors=3),
            Element(kind="update", length=1),
            Element(kind="ordinal", count=3),
            Element(kind="order", count=3),
            Element(kind="count", count=4),
            Element(kind="latent", count=1),
            Element(kind="abstain", count=1),
            Element(kind="hops", length=1),
        ),
    )
    return list(make_conversations(chosen, ruler=tekken, rungs=[2400, 2900], count=2, seed=0))


def rules(conversations: list[Conversation], ruler: Ruler | None = None) -> set[str]:
    return {problem.rule for problem in lint(conversations, ruler=ruler)}


def with_turn(conversation: Conversation, place: int, text: str) -> Conversation:
    turns = list(conversation.turns)
    turns[place] = replace(turns[place], content=f"{turns[place].content} {text}".strip())
    return replace(conversation, turns=tuple(turns))


def probe_of(conversation: Conversation, kind: str) -> int:
    return next(place for place, probe in enumerate(conversation.probes) if probe.kind == kind)


def with_probe(conversation: Conversation, kind: str, **changes: object) -> Conversation:
    probes = list(conversation.probes)
    place = probe_of(conversation, kind)
    probes[place] = replace(probes[place], **changes)  # type: ignore[arg-type]
    return replace(conversation, probes=tuple(probes))


def plain_turn(conversation: Conversation) -> int:
    return next(turn.turn_index for turn in conversation.turns if not turn.fact_ids and turn.role == "assistant")


def test_clean_set_has_no_problem(clean: list[Conversation], tekken: Ruler) -> None:
    assert lint(clean, ruler=tekken) == []


DAMAGE: dict[str, Callable[[Conversation], Conversation]] = {
    "answer-elsewhere": lambda c: with_turn(c, plain_turn(c), c.probes[probe_of(c, "keys")].gold),
    "exact": lambda c: replace(c, asks=(replace(c.asks[0], prompt_tokens=c.asks[0].rung - 1), *c.asks[1:])),
    "unique-asks": lambda c: replace(c, asks=(c.asks[0], *c.asks)),
    "nested": lambda c: replace(c, asks=(replace(c.asks[0], turn_end=len(c.turns)), *c.asks[1:])),
    "no-question": lambda c: replace(c, asks=(replace(c.asks[0], tail=()), *c.asks[1:])),
    "turns": lambda c: replace(c, turns=(replace(c.turns[0], content=" "), *c.turns[1:])),
    "stated": lambda c: replace(c, facts=(replace(c.facts[0], value="00000"), *c.facts[1:])),
    "live-fact": lambda c: with_probe(c, "keys", live_fact="nobody"),
    "unknown-probe": lambda c: replace(c, asks=(replace(c.asks[0], probe_id="nobody"), *c.asks[1:])),
    "distractor-is-gold": lambda c: with_probe(c, "keys", distractor_values=(c.probes[probe_of(c, "keys")].gold,)),
    "distractor-contains-gold": lambda c: with_probe(
        c, "keys", distractor_values=(c.probes[probe_of(c, "keys")].gold + "1",)
    ),
    "answer-in-tail": lambda c: replace(
        c,
        asks=tuple(
            replace(
                ask, tail=(replace(ask.tail[0], content=f"Is it {c.probes[probe_of(c, 'keys')].gold}?"), *ask.tail[1:])
            )
            if ask.probe_id == c.probes[probe_of(c, "keys")].probe_id
            else ask
            for ask in c.asks
        ),
    ),
    "unique-ids": lambda c: replace(c, facts=(*c.facts, replace(c.facts[0], value=""))),
}


@pytest.mark.parametrize("rule", sorted(DAMAGE))
def test_rule_bites(rule: str, clean: list[Conversation]) -> None:
    assert rule in rules([DAMAGE[rule](clean[0]), clean[1]])


@pytest.mark.parametrize("kind", ["keys", "update", "ordinal", "order", "count", "hops"])
def test_wrong_gold_is_found_for_every_kind(kind: str, clean: list[Conversation]) -> None:
    probe = clean[0].probes[probe_of(clean[0], kind)]
    assert "true-answer" in rules([with_probe(clean[0], kind, gold="12" if kind == "count" else "00000")]), probe


def test_superseded_value_is_not_live(clean: list[Conversation]) -> None:
    conversation = clean[0]
    old = next(fact for fact in conversation.facts if fact.kind == "update" and fact.supersedes is None)
    assert "true-answer" in rules([with_probe(conversation, "update", gold=old.value, live_fact=old.fact_id)])


def test_answerable_abstention_is_found(clean: list[Conversation]) -> None:
    known = clean[0].probes[probe_of(clean[0], "keys")].question
    assert "true-answer" in rules([with_probe(clean[0], "abstain", question=known)])


def test_question_that_shares_words_with_a_latent_fact_is_found(clean: list[Conversation]) -> None:
    assert "true-answer" in rules([with_probe(clean[0], "latent", question="Which keypad has the view?")])


def test_a_second_answer_to_a_latent_question_is_found(clean: list[Conversation]) -> None:
    conversation = clean[0]
    known = next(fact for fact in conversation.facts if fact.kind == "latent")
    facts = [replace(f, attribute=known.attribute) if f.kind == "keys" else f for f in conversation.facts]
    assert "true-answer" in rules([replace(conversation, facts=tuple(facts))])


def test_value_of_another_conversation_is_found(clean: list[Conversation]) -> None:
    first, second = clean
    stolen = replace(second, facts=(replace(second.facts[0], value=first.facts[0].value), *second.facts[1:]))
    assert "foreign-values" in rules([first, stolen])


def test_wrong_length_is_found_with_a_ruler(clean: list[Conversation], tekken: Ruler) -> None:
    assert "exact" in rules([with_turn(clean[0], 1, "And then some.")], tekken)


def test_constant_answers_are_scored(tekken: Ruler) -> None:
    lonely = Recipe(name="lonely", elements=(Element(count=1),))
    made = list(make_conversations(lonely, ruler=tekken, rungs=[300], count=24, seed=0))
    assert rules(made) == {"last-value"}  # nothing else was ever stated
    silent = Recipe(name="silent", elements=(Element(kind="abstain", count=3, distractors=2), Element(distractors=1)))
    assert rules(list(make_conversations(silent, ruler=tekken, rungs=[400], count=8, seed=0))) == {"not-mentioned"}
    baselines = Baselines()
    for conversation in make_conversations(recipe("single"), ruler=tekken, rungs=[400], count=24, seed=0):
        baselines.add(conversation)
    assert baselines.last_value == 0 and baselines.answerable == 24


def test_one_answer_to_every_question_is_found(clean: list[Conversation]) -> None:
    same = [replace(c, probes=tuple(replace(p, gold="blue") for p in c.probes)) for c in clean]
    assert "constant-answer" in rules(same)


def test_a_small_set_whose_facts_come_late_is_clean(tekken: Ruler) -> None:
    assert rules(list(make_conversations(recipe("late"), ruler=tekken, rungs=[1200, 2500], count=3, seed=0))) == set()


def test_a_conversation_that_asks_nothing_or_off_its_rungs_is_reported(clean: list[Conversation]) -> None:
    first, second = clean
    assert rules([replace(first, rungs=(), asks=()), second]) == {"something-asked"}
    assert rules([replace(first, rungs=()), second]) == {"something-asked"}
    assert rules([replace(first, rungs=first.rungs[:1]), second]) == {"something-asked"}
