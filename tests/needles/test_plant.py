import copy
import dataclasses
import random
import re
from typing import Literal

import pytest

from longrecall.needles.dataset import suite_hash
from longrecall.needles.elements import PlantError
from longrecall.needles.haystack import Haystack
from longrecall.needles.lint import Linter, lint
from longrecall.needles.plant import concat_twin, ladder, make_conversations, make_haystack
from longrecall.needles.recipes import BUILT_IN, ELEMENT_KINDS, FORMS, ROLES, Element, Recipe, recipe
from longrecall.needles.render import Ruler, continues, messages_for
from longrecall.needles.schema import Ask, Conversation
from longrecall.needles.values import VALUE_KINDS, ValueSpaceError

# Content hashes of small sets: a change means that a published suite hash no longer names the same bytes. Raise
# plant.GENERATOR_VERSION and say so in the changelog when that is meant.
PINNED = {
    ("gemma", "reference"): "aa4cdb0c6cd82f2c8a9eae8161ce5de0ca05425a9ab483f41cc630f4a413426f",
    ("gemma", "mixed"): "0ddec447f59b93ff51a01c94c5cfcd08f5e26e8c9de04052fd5f0d98ce8d513a",
    ("tekken", "reference"): "5fc1fc1a8722f3d348efb8ee6f86f91e7eb8fc11e1832c35f46ab8d6fa41c2a6",
    ("tekken", "mixed"): "f23947c8d6b7c27a633fd680bcb49d1a47475b768793d692655ab902f4cb0081",
}


@pytest.fixture(scope="session")
def rulers(gemma: Ruler, tekken: Ruler) -> dict[str, Ruler]:
    return {"gemma": gemma, "tekken": tekken}


@pytest.fixture(scope="session")
def haystacks(rulers: dict[str, Ruler]) -> dict[tuple[str, str], Haystack]:
    return {
        (name, split): make_haystack(Recipe(name=split, elements=(Element(),), split=split), ruler, 0)
        for name, ruler in rulers.items()
        for split in ("heldout", "all")
    }


def encoded(ruler: Ruler, conversation: Conversation, ask: Ask) -> list[int]:
    """Token ids of a prompt by the plain route: render, then encode."""
    messages = messages_for(conversation, ask)
    begun = continues(messages)
    text = ruler.render(messages, add_generation_prompt=not begun, continue_final_message=begun)
    ids: list[int] = ruler.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_rulers_count_by_sums(rulers: dict[str, Ruler]) -> None:
    assert rulers["gemma"].additive and rulers["tekken"].additive
    assert rulers["gemma"].tokenizer.get_vocab_size() > 200_000
    assert rulers["tekken"].tokenizer.get_vocab_size() > 100_000


@pytest.mark.parametrize("part", range(5))
def test_500_random_draws_are_exact_nested_true_and_repeatable(
    part: int, rulers: dict[str, Ruler], haystacks: dict[tuple[str, str], Haystack]
) -> None:
    rng = random.Random(f"draws {part}")
    names = sorted(BUILT_IN)
    for draw in range(100):
        chosen = BUILT_IN[names[(part * 100 + draw) % len(names)]]
        ruler_name = rng.choice(["gemma", "tekken"])
        ruler, haystack = rulers[ruler_name], haystacks[ruler_name, chosen.split]
        first = rng.randint(300, 1100)
        steps = [0, rng.randint(1, 9), rng.randint(200, 700)]
        seed = rng.randint(0, 10**6)
        for _ in range(4):
            rungs = [first + step for step in steps]
            where = f"{chosen.name}, {ruler_name}, rungs {rungs}, seed {seed}"
            try:
                [conversation] = make_conversations(
                    chosen, ruler=ruler, rungs=rungs, count=1, seed=seed, haystack=haystack
                )
                break
            except PlantError as error:  # too small: what it names as the minimum must do for that rung
                rung, minimum = re.findall(r"rung (\d+) .*at least (\d+)", str(error))[0]
                assert int(minimum) > int(rung), where
                if int(rung) == rungs[0]:
                    first = int(minimum)
                else:
                    steps[-1] += int(minimum) - int(rung)
        else:
            pytest.fail(f"{where}: the named minimum is never enough")
        # exact
        for ask in {ask.rung: ask for ask in conversation.asks}.values():
            ids = encoded(ruler, conversation, ask)
            assert len(ids) == ask.prompt_tokens == ask.rung, where
            assert ids.count(ruler.bos_id) == 1, where
            if ask.fact_span is not None:
                live = {p.probe_id: p.gold for p in conversation.probes}[ask.probe_id]
                assert live in ruler.tokenizer.decode(ids[slice(*ask.fact_span)]), where
        # nested
        ends = [max((ask.turn_end for ask in conversation.asks if ask.rung == rung), default=0) for rung in rungs]
        assert ends == sorted(ends), where
        assert {ask.rung for ask in conversation.asks} == set(rungs), where
        # true
        assert lint([conversation]) == [], where
        # repeatable, whatever is made around it
        if draw % 5 == 0:
            again = make_conversations(chosen, ruler=ruler, rungs=rungs, count=1, seed=seed, haystack=haystack)
            assert suite_hash(again) == suite_hash([conversation]), where


@pytest.mark.parametrize(("ruler_name", "recipe_name"), sorted(PINNED))
def test_bytes_are_pinned(
    ruler_name: str, recipe_name: str, rulers: dict[str, Ruler], haystacks: dict[tuple[str, str], Haystack]
) -> None:
    chosen = BUILT_IN[recipe_name]
    # The tokenizer's own hash depends on how a library version writes tokenizer.json: not what is pinned here.
    haystack = copy.copy(haystacks[ruler_name, chosen.split])
    haystack.ruler = copy.copy(rulers[ruler_name])
    haystack.ruler.tokenizer_hash = ruler_name
    made = make_conversations(chosen, ruler=haystack.ruler, rungs=[1200, 2500], count=3, seed=11, haystack=haystack)
    assert suite_hash(made) == PINNED[ruler_name, recipe_name]


def test_a_longer_rung_extends_the_shorter_one_token_by_token(
    gemma: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    [conversation] = make_conversations(
        recipe("reference"),
        ruler=gemma,
        rungs=[448, 1024, 2048],
        count=1,
        seed=3,
        haystack=haystacks["gemma", "heldout"],
    )
    by_rung = {ask.rung: ask for ask in conversation.asks}
    short, long = encoded(gemma, conversation, by_rung[448]), encoded(gemma, conversation, by_rung[2048])
    tail = 45  # question, begun answer and padding at most
    assert short[: 448 - tail] == long[: 448 - tail]
    assert len(conversation.asks) == 3 * 8  # every fact stands before the first branch


def test_reference_tails_are_short(gemma: Ruler, haystacks: dict[tuple[str, str], Haystack]) -> None:
    made = make_conversations(
        recipe("reference"),
        ruler=gemma,
        rungs=[448, 1024, 2048],
        count=10,
        seed=5,
        haystack=haystacks["gemma", "heldout"],
    )
    longest = max(len(gemma.tokenizer.encode(ask.tail[0].content).ids) for c in made for ask in c.asks)
    assert longest <= 32


def test_values_are_unique_over_the_set(gemma: Ruler, haystacks: dict[tuple[str, str], Haystack]) -> None:
    values = [
        fact.value
        for conversation in make_conversations(
            recipe("reference"), ruler=gemma, rungs=[700], count=30, seed=0, haystack=haystacks["gemma", "heldout"]
        )
        for fact in conversation.facts
    ]
    assert len(values) == len(set(values)) == 30 * 16
    assert all(value.isdigit() and len(value) == 5 for value in values)


def test_conversation_does_not_depend_on_how_many_are_made(
    tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    def made(count: int, first: int = 0) -> list[Conversation]:
        return list(
            make_conversations(
                recipe("keys"),
                ruler=tekken,
                rungs=[900],
                count=count,
                seed=4,
                haystack=haystacks["tekken", "all"],
                first=first,
            )
        )

    four = made(4)
    assert made(2) == four[:2]
    assert made(2, first=2) == four[2:]


def test_every_residue_can_be_asked(tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]) -> None:
    rungs = ladder([1000], modulus=64, residues=range(64))
    assert len(rungs) == 64 and rungs[-1] == 1000 and {rung % 64 for rung in rungs} == set(range(64))
    [conversation] = make_conversations(
        recipe("single"), ruler=tekken, rungs=rungs, count=1, seed=1, haystack=haystacks["tekken", "all"]
    )
    lengths = [len(encoded(tekken, conversation, ask)) for ask in conversation.asks]
    assert lengths == rungs
    assert ladder([4096], modulus=4, residues=[0, 1, 2, 3]) == [4093, 4094, 4095, 4096]
    with pytest.raises(PlantError, match="between 0 and 3"):
        ladder([4096], modulus=4, residues=[4])


@pytest.mark.parametrize("name", ["reference", "mixed", "system-turn"])
def test_too_small_a_target_is_an_error_with_the_minimum(
    name: str, gemma: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    chosen = recipe(name)

    def make(rung: int) -> Conversation:
        hay = haystacks["gemma", chosen.split]
        return next(make_conversations(chosen, ruler=gemma, rungs=[rung], count=1, seed=2, haystack=hay))

    minimum = None
    for rung in range(0, 401, 1 if name == "reference" else 20):
        if minimum is not None and rung >= minimum:
            break
        with pytest.raises(PlantError, match=r"need at least \d+ tokens") as caught:
            make(rung)
        minimum = int(str(caught.value).split("at least ")[1].split()[0])
        assert minimum > rung
    assert minimum is not None and make(minimum).asks[0].prompt_tokens == minimum


def test_a_lone_rung_that_is_too_small_names_two_that_do(
    gemma: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    reference = BUILT_IN["reference"]

    def made(rungs: list[int]) -> int:
        haystack = haystacks["gemma", reference.split]
        return len(list(make_conversations(reference, ruler=gemma, rungs=rungs, count=1, seed=0, haystack=haystack)))

    with pytest.raises(PlantError, match="a longer rung after it") as error:
        made([448])
    [two] = re.findall(r"\((\d+,\d+)\)", str(error.value))
    assert made([int(rung) for rung in two.split(",")]) == 1
    with pytest.raises(PlantError) as error:
        made([60])
    assert "a longer rung" not in str(error.value)


def test_impossible_arguments_are_named(gemma: Ruler, haystacks: dict[tuple[str, str], Haystack]) -> None:
    def make(**changes: object) -> None:
        arguments = {"rungs": [900], "count": 1, "seed": 0} | changes
        chosen = arguments.pop("recipe", recipe("keys"))
        list(make_conversations(chosen, ruler=gemma, haystack=haystacks["gemma", "all"], **arguments))  # type: ignore[arg-type]

    with pytest.raises(PlantError, match=r"\[900, 800\]"):
        make(rungs=[900, 800])
    with pytest.raises(PlantError, match="1048576"):
        make(rungs=[2**20 + 1])
    with pytest.raises(PlantError, match="two rungs"):
        make(recipe=recipe("late"))
    with pytest.raises(ValueSpaceError, match="160,000 unique values of kind number of 5 digits"):
        make(count=10_000)
    crowd = Recipe(name="crowd", elements=(Element(count=150, distractors=100),))
    with pytest.raises(PlantError, match="more names than there are"):
        make(recipe=crowd, rungs=[100_000])


@pytest.mark.parametrize("depth", ["grid", (10.0, 50.0, 90.0)])
def test_depth_is_where_it_was_asked(depth: object, tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]) -> None:
    count = 4 if depth == "grid" else 3
    chosen = Recipe(name="deep", elements=(Element(count=count),), depth=depth)  # type: ignore[arg-type]
    wanted = [12.5, 37.5, 62.5, 87.5] if depth == "grid" else [10, 50, 90]
    for conversation in make_conversations(
        chosen, ruler=tekken, rungs=[8000], count=5, seed=0, haystack=haystacks["tekken", "all"]
    ):
        found = sorted(ask.depth_pct for ask in conversation.asks if ask.depth_pct is not None)
        assert found == pytest.approx(wanted, abs=4)


def test_concat_twin_has_the_same_facts_and_lengths(gemma: Ruler, haystacks: dict[tuple[str, str], Haystack]) -> None:
    hay = haystacks["gemma", "heldout"]
    originals = list(
        make_conversations(recipe("reference"), ruler=gemma, rungs=[700, 1300], count=2, seed=8, haystack=hay)
    )
    twins = [concat_twin(conversation, hay) for conversation in originals]
    for original, twin in zip(originals, twins, strict=True):
        assert twin.cluster_id == original.conversation_id and not twin.turns
        assert [fact.value for fact in twin.facts] == [fact.value for fact in original.facts]
        for ask in twin.asks:
            assert [turn.role for turn in ask.tail] == ["user", "assistant"]
            ids = encoded(gemma, twin, ask)
            assert len(ids) == ask.rung
            assert ask.fact_span is not None
            gold = {probe.probe_id: probe.gold for probe in twin.probes}[ask.probe_id]
            assert gold in gemma.tokenizer.decode(ids[slice(*ask.fact_span)])
    assert lint(twins, ruler=gemma) == []


REWRITING = (
    "{{ bos_token }}{% for m in messages %}{% if loop.index0 % 6 == 5 %}[note {{ loop.index0 }}]{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


def test_a_template_that_depends_on_the_place_is_measured_prompt_by_prompt(tekken: Ruler) -> None:
    ruler = Ruler(tekken.tokenizer, REWRITING, config={"bos_token": "<s>"}, tokenizer_hash=tekken.tokenizer_hash)
    assert not ruler.additive
    made = list(make_conversations(recipe("reference"), ruler=ruler, rungs=[900, 2000], count=2, seed=1))
    assert lint(made, ruler=ruler) == []
    ask = made[0].asks[0]
    assert ask.fact_span is not None
    gold = {probe.probe_id: probe.gold for probe in made[0].probes}[ask.probe_id]
    assert gold in ruler.tokenizer.decode(encoded(ruler, made[0], ask)[slice(*ask.fact_span)])


def test_thinking_policy_changes_the_count_and_the_template_hash(tekken: Ruler) -> None:
    template = tekken.template.replace(
        "<|im_start|>assistant\\n'", "<|im_start|>assistant\\n' + ('' if thinking else '<think></think>')"
    )
    made = {}
    for thinking in (True, False):
        ruler = Ruler(
            tekken.tokenizer,
            template,
            config={"bos_token": "<s>"},
            tokenizer_hash=tekken.tokenizer_hash,
            template_args={"thinking": thinking},
        )
        [conversation] = make_conversations(recipe("single"), ruler=ruler, rungs=[600], count=1, seed=1)
        assert lint([conversation], ruler=ruler) == []
        made[thinking] = conversation
    assert made[True].template_hash != made[False].template_hash


def test_long_conversations_are_exact_too(tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]) -> None:
    [conversation] = make_conversations(
        recipe("keys"), ruler=tekken, rungs=[1024, 131_072], count=1, seed=6, haystack=haystacks["tekken", "all"]
    )
    assert len(encoded(tekken, conversation, conversation.asks[-1])) == 131_072
    sentences = [turn.content for turn in conversation.turns if turn.role == "assistant" and len(turn.content) > 100]
    assert len(set(sentences)) == len(sentences)


def test_built_in_sets_score_nothing_for_answers_without_reading(
    tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    for name in ("reference", "single", "update", "hops", "mixed"):
        chosen = recipe(name)
        linter = Linter()
        for conversation in make_conversations(
            chosen, ruler=tekken, rungs=[1400, 1900], count=24, seed=9, haystack=haystacks["tekken", chosen.split]
        ):
            linter.add(conversation)
        assert linter.problems() == [], name
        shares = linter.baselines
        assert shares.last_value <= 0.05 * shares.answerable
        assert max(shares.golds.values()) / shares.golds.total() <= 0.05


def test_mixed_recipe_asks_late_facts_only_once_they_stand(
    tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    [conversation] = make_conversations(
        recipe("late"), ruler=tekken, rungs=[900, 2500], count=1, seed=0, haystack=haystacks["tekken", "all"]
    )
    kinds = {probe.probe_id: probe.kind for probe in conversation.probes}
    early = {ask.rung for ask in conversation.asks if kinds[ask.probe_id] == "abstain-early"}
    assert early == {900}
    moved = dataclasses.replace(
        conversation,
        asks=tuple(
            dataclasses.replace(ask, turn_end=len(conversation.turns))
            if kinds[ask.probe_id] == "abstain-early"
            else ask
            for ask in conversation.asks
        ),
    )
    assert any(problem.rule == "true-answer" for problem in lint([moved]))


@pytest.mark.parametrize("form", ["json", "table", "code"])
def test_rows_of_a_list_say_which_attribute_they_hold(
    form: Literal["json", "table", "code"], tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    chosen = Recipe(name="rows", elements=(Element(count=4, attributes=2, form=form),))
    [conversation] = make_conversations(
        chosen, ruler=tekken, rungs=[600], count=1, seed=0, haystack=haystacks["tekken", "all"]
    )
    assert len({fact.attribute for fact in conversation.facts}) == 2
    for fact in conversation.facts:
        [row] = [line for line in conversation.turns[fact.turn_index].content.splitlines() if fact.value in line]
        assert fact.entity in row and fact.attribute in row.replace("_", " ")


def test_elements_of_one_kind_share_no_place_box_or_subject(
    tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    twice = (
        Element(kind="latent", count=8, distractors=2),
        Element(kind="count", count=4, distractors=1),
        Element(kind="ordinal", count=2, distractors=1),
    )

    def made(*elements: Element) -> list[Conversation]:
        chosen = Recipe(name="twice", elements=elements)
        hay = haystacks["tekken", "all"]
        return list(make_conversations(chosen, ruler=tekken, rungs=[4000], count=6, seed=0, haystack=hay))

    assert lint(made(*twice, *twice)) == []
    with pytest.raises(PlantError, match="kind latent has 20 places a conversation; 10 were asked of 0"):
        made(*twice, *twice, twice[0])
    with pytest.raises(PlantError, match="kind count has 8 boxes, two for each"):
        made(*[twice[1]] * 5)


@pytest.mark.parametrize("value", ["date", "code", "amount"])
def test_look_alikes_of_every_kind_can_be_planted(
    value: str, tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    chosen = Recipe(name="alike", elements=(Element(count=3, distractors=6, look_alike=2, value=value),))
    hay = haystacks["tekken", "all"]
    assert lint(make_conversations(chosen, ruler=tekken, rungs=[900], count=3, seed=0, haystack=hay)) == []


def random_recipe(rng: random.Random, name: str) -> Recipe:
    """One to four elements of any kind, with any settings that fit together."""
    elements = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(ELEMENT_KINDS)
        form, role = ("sentence", "user") if kind != "keys" else (rng.choice(FORMS), rng.choice(["user", "tool"]))
        if kind in ("keys", "abstain") and form == "sentence":
            role = rng.choice(ROLES)
        elements.append(
            Element(
                kind=kind,  # type: ignore[arg-type]
                count=rng.randint(1, 2 if kind == "verbatim" else 5),
                value=rng.choice(VALUE_KINDS),
                digits=rng.choice([4, 5, 8, 12]),
                role=role,  # type: ignore[arg-type]
                form=form,  # type: ignore[arg-type]
                echo=rng.choice(["value", "noted"]),  # type: ignore[arg-type]
                attributes=rng.randint(1, 3),
                distractors=rng.choice([0, 1, 3]),
                look_alike=rng.choice([None, 2, 4]),
                length=rng.randint(1, 3),
                tokens=rng.randint(50, 200),
                probes=rng.choice([None, None, 2]),
            )
        )
    return Recipe(
        name=name,
        elements=tuple(elements),
        depth=rng.choice(["uniform", "grid", (5.0, 50.0)]),
        scope=rng.choice(["first", "all"]),
        split=rng.choice(["heldout", "all"]),
        answer_prefix=rng.random() < 0.3,
    )


@pytest.mark.parametrize("part", range(3))
def test_random_mixtures_are_exact_and_true(
    part: int, tekken: Ruler, haystacks: dict[tuple[str, str], Haystack]
) -> None:
    rng = random.Random(f"mixtures {part}")
    for draw in range(20):
        chosen = random_recipe(rng, f"mixture-{part}-{draw}")
        rungs = [4000, 4000 + rng.randint(1, 300), 4800]
        hay = haystacks["tekken", chosen.split]
        made = list(make_conversations(chosen, ruler=tekken, rungs=rungs, count=2, seed=draw, haystack=hay))
        # what answers without reading score is the recipe's doing: no distractors, or more abstentions than facts
        found = [p for p in lint(made) if p.rule not in ("last-value", "not-mentioned")]
        assert found == [], chosen
        for conversation in made:
            for ask in {ask.rung: ask for ask in conversation.asks}.values():
                assert len(encoded(tekken, conversation, ask)) == ask.rung, chosen
