"""Recipes: what a conversation plants, as data. Built-in ones by name, your own from TOML.

    recipe("reference")            # what `make eval` uses
    load_recipe("mine.toml")

A recipe is a list of elements (each plants facts and asks about them) and how they lie in the conversation:

    name = "mine"
    depth = "grid"                 # or "uniform", or a list of percents
    [[elements]]
    kind = "keys"
    count = 8
    value = "uuid"
    distractors = 8
    look_alike = 2                 # distractor values differ from a real one in two characters
    [[elements]]
    kind = "update"
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from longrecall.needles.schema import Role
from longrecall.needles.values import VALUE_KINDS, Demand
from longrecall.needles.vocabulary import Split

ElementKind = Literal["keys",]
ELEMENT_KINDS: tuple[str, ...] = get_args(ElementKind)
SPLITS: tuple[str, ...] = get_args(Split)


class RecipeError(ValueError):
    """A recipe is unknown or wrong; the message names the recipe, the key and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Element:
    """One ingredient: facts of one sort and the probes about them."""

    kind: ElementKind = "keys"
    count: int = 1
    """Facts planted (chains, updates, …: how many of them)."""
    value: str = "number"
    """Kind of value; see `values.VALUE_KINDS`."""
    digits: int = 5
    role: Role = "user"
    """Who states the fact."""
    echo: Literal["value", "noted"] = "value"
    """The assistant's reply repeats the fact, or only says that it is noted."""
    attributes: int = 1
    """Over how many attributes the facts are spread."""
    distractors: int = 0
    """Facts of the same kind about others, never asked about."""
    look_alike: int | None = None
    """Distractor values differ from a real value in exactly so many characters; None: any values."""
    probes: int | None = None
    """How many facts are asked about; None: all."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is planted and where."""

    name: str
    elements: tuple[Element, ...]
    depth: Literal["uniform", "grid"] | tuple[float, ...] = "uniform"
    """Where facts lie in the first rung's context: uniform, evenly spaced, or listed percents (cycled)."""
    scope: Literal["first", "all"] = "first"
    """Facts all lie before the first rung's branch, so that each is asked at every rung; or over the whole ladder."""
    split: Split = "all"
    """Templates, words, names and attributes used; the indexer of the reference build is trained on "train"."""
    answer_prefix: bool = False
    """Begin the assistant's answer ("The locker code of Ada is"): base models need it."""
    turn_tokens: tuple[int, int] = (40, 160)
    """Length of a filler reply, in tokens."""
    system: str = ""
    """Text of a system turn; empty: none."""

    def demands(self) -> list[Demand]:
        """Values a conversation takes."""
        return [
            Demand(kind=element.value, count=element.count + element.distractors, digits=element.digits)
            for element in self.elements
        ]


BUILT_IN: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="reference",
            elements=(Element(kind="keys", count=8, distractors=8),),
            split="heldout",
            answer_prefix=True,
        ),
    )
}


def recipe(name: str | Path) -> Recipe:
    """A built-in recipe by name, or the one in a TOML file."""
    if str(name) in BUILT_IN:
        return BUILT_IN[str(name)]
    if str(name).endswith(".toml"):
        return load_recipe(name)
    raise RecipeError(f"unknown recipe {str(name)!r}; built in are {', '.join(BUILT_IN)}; or name a .toml file")


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from TOML; unknown keys and wrong values are errors that name them."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    elements = content.pop("elements", None)
    if not isinstance(elements, list) or not elements:
        raise RecipeError(f"{path} has no [[elements]] table: a recipe plants at least one element")
    content.setdefault("name", Path(path).stem)
    if isinstance(content.get("depth"), list):
        content["depth"] = tuple(float(value) for value in content["depth"])
    if isinstance(content.get("turn_tokens"), list):
        content["turn_tokens"] = tuple(content["turn_tokens"])
    made = tuple(_checked(Element, element, f"{path}, element {place + 1}") for place, element in enumerate(elements))
    loaded: Recipe = _checked(Recipe, {**content, "elements": made}, str(path))
    validate(loaded, str(path))
    return loaded


def _checked(kind: type, values: Mapping[str, Any], where: str) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - known):
        raise RecipeError(f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(known))}")
    return kind(**values)


def validate(checked: Recipe, where: str) -> None:
    """Refuse a recipe with a value out of range."""

    def refuse(key: str, value: object, right: str) -> None:
        raise RecipeError(f"{where}: {key} = {value!r} is not possible; {right}")

    if checked.split not in SPLITS:
        refuse("split", checked.split, f"one of {', '.join(SPLITS)}")
    if checked.scope not in ("first", "all"):
        refuse("scope", checked.scope, '"first" or "all"')
    if not isinstance(checked.depth, tuple) and checked.depth not in ("uniform", "grid"):
        refuse("depth", checked.depth, '"uniform", "grid" or a list of percents')
    if isinstance(checked.depth, tuple) and not (checked.depth and all(0 <= d <= 100 for d in checked.depth)):
        refuse("depth", checked.depth, "percents lie between 0 and 100")
    low, high = checked.turn_tokens
    if not 20 <= low <= high:
        refuse("turn_tokens", checked.turn_tokens, "two counts, the smaller first, at least 20")
    for element in checked.elements:
        if element.kind not in ELEMENT_KINDS:
            refuse("kind", element.kind, f"one of {', '.join(ELEMENT_KINDS)}")
        if element.value not in VALUE_KINDS:
            refuse("value", element.value, f"one of {', '.join(VALUE_KINDS)}")
        if element.count < 1 or element.distractors < 0 or element.attributes < 1:
            refuse("count", element.count, "count and attributes are at least 1, distractors at least 0")
        if not 1 <= element.digits <= 18:
            refuse("digits", element.digits, "between 1 and 18")
