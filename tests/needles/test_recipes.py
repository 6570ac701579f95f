import random
import re
from pathlib import Path

import pytest

from longrecall.needles.recipes import BUILT_IN, Element, Recipe, RecipeError, load_recipe, recipe, validate
from longrecall.needles.values import VALUE_KINDS, Demand, Values, ValueSpaceError, aliases, closer_than

GOOD = """
name = "mine"
depth = [10, 90.5]
turn_tokens = [30, 60]
answer_prefix = true
[[elements]]
kind = "keys"
count = 8
value = "uuid"
look_alike = 2
[[elements]]
kind = "update"
[filler]
path = "text"
data_files = "essays/*.txt"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_toml_recipe_is_read(tmp_path: Path) -> None:
    mine = recipe(str(write(tmp_path, GOOD)))
    assert mine.elements[0] == Element(kind="keys", count=8, value="uuid", look_alike=2)
    assert mine.depth == (10, 90.5) and mine.turn_tokens == (30, 60) and mine.answer_prefix
    assert mine.filler is not None and mine.filler.data_files == "essays/*.txt"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('value = "uuid"', 'value = "colour"'), "value = 'colour' is not possible; one of number, uuid"),
        (('kind = "update"', 'kind = "udpate"'), "kind = 'udpate' is not possible; one of keys"),
        (("count = 8", "count = 0"), "count = 0 is not possible; between 1 and 512"),
        (("count = 8", 'count = "8"'), "count = '8' is not possible; a whole number is right"),
        (("look_alike = 2", "look_alike = 1"), "look_alike = 1"),
        (("look_alike = 2", "look_alike = 2.5"), "look_alike = 2.5 is not possible; a whole number is right"),
        (("look_alike = 2", 'probes = "all"'), "probes = 'all' is not possible; a whole number is right"),
        (("name = ", 'name = "../up"\n# '), "name = '../up' is not possible"),
        (("depth = [10, 90.5]", "depth = [10, 101]"), "percents lie between 0 and 100"),
        (("depth = [10, 90.5]", 'depth = "deep"'), '"uniform", "grid" or a list'),
        (("turn_tokens = [30, 60]", "turn_tokens = [60, 30]"), "the smaller first"),
        (("answer_prefix", "answer_prefx"), "unknown key 'answer_prefx'; the keys are answer_prefix"),
        (("[[elements]]", "[[element]]"), r"no \[\[elements\]\] table"),
        (('path = "text"', 'paths = "text"'), "unknown key 'paths'"),
        (('path = "text"', ""), "the key 'path' is missing"),
        (("name = ", "name == "), "not valid TOML"),
    ],
)
def test_wrong_recipe_is_one_clear_error(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace(*change))
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert "mine.toml" in str(caught.value)


def test_filler_that_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"filler = 5 is not possible; a \[filler\] table is right"):
        load_recipe(write(tmp_path, "filler = 5\n[[elements]]\ncount = 1\n"))


def test_unknown_recipe_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown recipe 'nedles'; built in are reference, single"):
        recipe("nedles")
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        recipe(tmp_path / "missing.toml")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_recipes_are_valid(name: str) -> None:
    validate(BUILT_IN[name], name)
    assert BUILT_IN[name].name == name


def test_forms_and_roles_that_cannot_be_are_refused() -> None:
    with pytest.raises(RecipeError, match="only for kind"):
        validate(Recipe(name="x", elements=(Element(kind="hops", form="json"),)), "x")
    with pytest.raises(RecipeError, match="stated by others"):
        validate(Recipe(name="x", elements=(Element(kind="hops", role="tool"),)), "x")


def test_a_recipe_that_asks_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="at least one element has to ask"):
        validate(Recipe(name="x", elements=(Element(probes=0), Element(kind="hops", probes=0))), "x")


@pytest.mark.parametrize("kind", VALUE_KINDS)
def test_values_never_repeat_and_never_lie_one_edit_apart(kind: str) -> None:
    values, rng = Values(), random.Random(0)
    drawn = []
    for _ in range(20):
        values.next_conversation()
        here = [values.draw(rng, kind) for _ in range(16)]
        assert not any(closer_than(a, b, 2) for a in here for b in here if a != b)
        drawn += here
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("kind", VALUE_KINDS)
def test_look_alikes_differ_in_exactly_so_many_characters(kind: str) -> None:
    values, rng = Values(), random.Random(1)
    for distance in (2, 3, 4):
        value = values.draw(rng, kind)
        other = values.look_alike(rng, value, distance=distance, kind=kind)
        aliases(other, kind)
        assert len(other) == len(value) and sum(a != b for a, b in zip(value, other, strict=True)) == distance


def test_value_space_is_checked_before_anything_is_made() -> None:
    values = Values()
    values.check([Demand(kind="number", count=45)], 1000)
    with pytest.raises(ValueSpaceError, match="46,000 unique values of kind number of 5 digits; at most 45,000"):
        values.check([Demand(kind="number", count=46)], 1000)
    with pytest.raises(ValueSpaceError, match="unknown value kind 'hue'"):
        values.check([Demand(kind="hue", count=1)], 1)
    values.check([Demand(kind="number", count=46, digits=7)], 1000)


def test_a_value_space_that_runs_out_is_an_error_not_a_loop() -> None:
    values, rng = Values(), random.Random(0)
    with pytest.raises(ValueSpaceError, match="no unused value"):
        for _ in range(20):
            values.draw(rng, "number", digits=1)


def test_aliases_are_other_spellings() -> None:
    assert "1931-05-03" in aliases("3 May 1931", "date")
    assert "48213.57" in aliases("$48,213.57", "amount")
    assert aliases("retry_limit = 48213", "code") == ("retry_limit=48213", "48213")
    assert re.fullmatch(r"\d{5}", Values().draw(random.Random(0), "number"))
