"""Recipes: what a conversation plants, as data. Built-in ones by name, your own from TOML.

    recipe("reference")            # what `make eval` uses
    recipe("mine.toml")

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
    [filler]                       # leave out for the built-in prose
    path = "text"                  # arguments of datasets.load_dataset
    data_files = "essays/*.txt"
    column = "text"

Probe kinds (`Probe.kind`) are the element kinds, except that "late" asks "abstain" before and "keys" after its fact is
planted. Probes whose kind begins with "abstain" have no live fact and no gold: saying that it was not said is right.
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

ElementKind = Literal[
    "keys",
    "values",
    "hops",
    "update",
    "retraction",
    "latent",
    "ordinal",
    "order",
    "count",
    "abstain",
    "late",
    "verbatim",
]
"""keys: independent facts. values: several values of one person, told apart by weekday. hops: a chain "the same as".
update: newest value wins. retraction: withdrawn again. latent: asked in words that share nothing with the fact.
ordinal: the i-th of several alike notes. order: the one said right after another. count: how many were said.
abstain: never said. late: asked before and after it is said (needs two rungs). verbatim: a passage to copy back."""
Form = Literal["sentence", "json", "table", "code", "script"]
ELEMENT_KINDS: tuple[str, ...] = get_args(ElementKind)
FORMS: tuple[str, ...] = get_args(Form)
SPLITS: tuple[str, ...] = get_args(Split)
ROLES: tuple[str, ...] = get_args(Role)


class RecipeError(ValueError):
    """A recipe is unknown or wrong; the message names the recipe, the key and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Element:
    """One ingredient: facts of one sort and the probes about them."""

    kind: ElementKind = "keys"
    count: int = 1
    """Facts planted; hops, update, retraction: chains; verbatim: passages; count: about how many are to be counted."""
    value: str = "number"
    """Kind of value; see `values.VALUE_KINDS`."""
    digits: int = 5
    role: Role = "user"
    """Who states the fact."""
    form: Form = "sentence"
    """How it is written (kind keys only): a sentence, JSON, a Markdown table, code, or in another language's script."""
    echo: Literal["value", "noted"] = "value"
    """The assistant's reply repeats the fact, or only says that it is noted."""
    attributes: int = 1
    """Over how many attributes the facts are spread."""
    distractors: int = 0
    """Facts of the same sort about others, never asked about."""
    look_alike: int | None = None
    """Distractor values differ from a real value in exactly so many characters; None: any values."""
    length: int = 2
    """hops: links before the value; update: values after the first."""
    tokens: int = 80
    """verbatim: about how long the passage is."""
    probes: int | None = None
    """How many facts are asked about; None: all."""


@dataclass(frozen=True, kw_only=True)
class Filler:
    """The user's own text, read by `datasets.load_dataset(path, name, data_files=…, split=…)`."""

    path: str
    """A hub id, a folder, or a loader: "text", "json", "parquet", "csv"."""
    name: str | None = None
    data_files: str | None = None
    split: str = "train"
    column: str = "text"
    max_sentences: int = 65_536


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is planted and where."""

    name: str
    elements: tuple[Element, ...]
    depth: Literal["uniform", "grid"] | tuple[float, ...] = "uniform"
    """Where facts lie in the first rung's context: uniform, evenly spaced, or listed percents (cycled)."""
    scope: Literal["first", "all"] = "first"
    """Facts all lie before the first rung's branch, so that each is asked at every rung; or over the whole ladder, and
    each is asked from the rung that contains it on. Distractors lie anywhere in both."""
    split: Split = "all"
    """Templates, words, names and attributes used; the indexer of the reference build is trained on "train"."""
    answer_prefix: bool = False
    """Begin the assistant's answer ("The locker code of Ada is"): base models need it."""
    turn_tokens: tuple[int, int] = (40, 160)
    """Length of a filler reply, in tokens."""
    system: str = ""
    """Text of a system turn; empty: none."""
    filler: Filler | None = None
    """None: the built-in prose."""

    def demands(self) -> list[Demand]:
        """Values a conversation takes at most."""
        return [
            Demand(kind=e.value, count=_values_taken(e), digits=e.digits)
            for e in self.elements
            if e.kind not in ("verbatim", "count")
        ]


def _values_taken(element: Element) -> int:
    if element.kind == "update":
        return element.count * (1 + element.length) + element.distractors
    return element.count + element.distractors


def _mixed(*elements: Element) -> tuple[Element, ...]:
    return elements


BUILT_IN: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="reference",
            elements=(Element(kind="keys", count=8, distractors=8),),
            split="heldout",
            answer_prefix=True,
        ),
        Recipe(name="single", elements=(Element(count=1, distractors=2),)),
        Recipe(name="keys", elements=(Element(count=8, distractors=8),)),
        *(
            Recipe(name=f"keys-{value}", elements=(Element(count=8, distractors=8, value=value),))
            for value in VALUE_KINDS
            if value != "number"
        ),
        Recipe(name="look-alike", elements=(Element(count=6, distractors=12, look_alike=2, digits=7),)),
        Recipe(name="values", elements=(Element(kind="values", count=6, distractors=6),)),
        Recipe(name="hops", elements=(Element(kind="hops", count=3, length=2, distractors=4),)),
        Recipe(name="update", elements=(Element(kind="update", count=4, length=2, distractors=4),)),
        Recipe(
            name="retraction",
            elements=_mixed(Element(kind="retraction", count=2), Element(count=4, distractors=4)),
        ),
        Recipe(name="latent", elements=(Element(kind="latent", count=6, distractors=4),)),
        Recipe(name="ordinal", elements=(Element(kind="ordinal", count=6, distractors=4),)),
        Recipe(name="order", elements=(Element(kind="order", count=8, distractors=4),)),
        Recipe(name="count", elements=(Element(kind="count", count=8, distractors=4),)),
        Recipe(name="abstain", elements=_mixed(Element(kind="abstain", count=4), Element(count=6, distractors=6))),
        Recipe(
            name="late", elements=_mixed(Element(kind="late", count=3), Element(count=5, distractors=6)), scope="first"
        ),
        Recipe(name="verbatim", elements=(Element(kind="verbatim", count=2, distractors=1, tokens=80),)),
        Recipe(name="json", elements=(Element(count=8, distractors=4, form="json"),)),
        Recipe(name="table", elements=(Element(count=8, distractors=4, form="table"),)),
        Recipe(name="code", elements=(Element(count=8, distractors=4, form="code"),)),
        Recipe(name="scripts", elements=(Element(count=8, distractors=4, form="script"),)),
        Recipe(name="assistant-turns", elements=(Element(count=6, distractors=6, role="assistant"),)),
        Recipe(name="tool-turns", elements=(Element(count=6, distractors=6, role="tool"),)),
        Recipe(name="system-turn", elements=(Element(count=6, role="system"), Element(count=2, distractors=6))),
        Recipe(
            name="mixed",
            elements=_mixed(
                Element(count=4, distractors=4, look_alike=2, digits=6),
                Element(count=2, value="uuid", role="assistant", distractors=2),
                Element(kind="update", count=2, length=1),
                Element(kind="hops", count=1, length=2, distractors=1),
                Element(kind="ordinal", count=3),
                Element(kind="latent", count=2),
                Element(kind="abstain", count=2),
                Element(count=2, form="json"),
                Element(kind="verbatim", count=1, tokens=60),
            ),
            scope="all",
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
    if not isinstance(elements, list) or not elements or not all(isinstance(element, dict) for element in elements):
        raise RecipeError(f"{path} has no [[elements]] table: a recipe plants at least one element")
    content.setdefault("name", Path(path).stem)
    if "filler" in content and not isinstance(content["filler"], dict):
        raise RecipeError(f"{path}: filler = {content['filler']!r} is not possible; a [filler] table is right")
    if "filler" in content:
        content["filler"] = _checked(Filler, content["filler"], f"{path}, [filler]")
    for key in ("depth", "turn_tokens"):
        if isinstance(content.get(key), list):
            content[key] = tuple(content[key])
    made = tuple(_checked(Element, element, f"{path}, element {place + 1}") for place, element in enumerate(elements))
    loaded: Recipe = _checked(Recipe, {**content, "elements": made}, str(path))
    validate(loaded, str(path))
    return loaded


_TYPE_NAMES: dict[Any, str] = {bool: "true or false", int: "a whole number", str: "a text in quotes"}


def _checked(kind: type, values: Mapping[str, Any], where: str) -> Any:
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - set(known)):
        raise RecipeError(f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(known))}")
    for name, field in known.items():
        if name not in values:
            if field.default is dataclasses.MISSING:
                raise RecipeError(f"{where}: the key {name!r} is missing")
            continue
        value = values[name]
        if field.type in (bool, int, str) and type(value) is not field.type:  # True is an int to isinstance
            raise RecipeError(f"{where}: {name} = {value!r} is not possible; {_TYPE_NAMES[field.type]} is right")
        if field.type == int | None and type(value) is not int:
            raise RecipeError(f"{where}: {name} = {value!r} is not possible; {_TYPE_NAMES[int]} is right")
    return kind(**values)


def validate(checked: Recipe, where: str) -> None:
    """Refuse a recipe with a value out of range."""

    def refuse(key: str, value: object, right: str) -> None:
        raise RecipeError(f"{where}: {key} = {value!r} is not possible; {right}")

    def one_of(key: str, value: object, options: tuple[str, ...]) -> None:
        if value not in options:
            refuse(key, value, f"one of {', '.join(options)}")

    if not checked.name or len(checked.name) > 100 or not checked.name.isprintable() or "/" in checked.name:
        refuse("name", checked.name, "it begins every conversation's id: 1 to 100 characters, no slash or line break")
    one_of("split", checked.split, SPLITS)
    one_of("scope", checked.scope, ("first", "all"))
    if not isinstance(checked.depth, tuple) and checked.depth not in ("uniform", "grid"):
        refuse("depth", checked.depth, '"uniform", "grid" or a list of percents')
    if isinstance(checked.depth, tuple) and not (
        checked.depth and all(isinstance(d, int | float) and 0 <= d <= 100 for d in checked.depth)
    ):
        refuse("depth", checked.depth, "percents lie between 0 and 100")
    if not (
        isinstance(checked.turn_tokens, tuple)
        and len(checked.turn_tokens) == 2
        and all(isinstance(count, int) for count in checked.turn_tokens)
        and 20 <= checked.turn_tokens[0] <= checked.turn_tokens[1]
    ):
        refuse("turn_tokens", checked.turn_tokens, "two counts, the smaller first, at least 20")
    if all(element.probes == 0 for element in checked.elements):
        refuse("probes", 0, "at least one element has to ask about something")
    for element in checked.elements:
        one_of("kind", element.kind, ELEMENT_KINDS)
        one_of("value", element.value, VALUE_KINDS)
        one_of("role", element.role, ROLES)
        one_of("form", element.form, FORMS)
        one_of("echo", element.echo, ("value", "noted"))
        for key, low, high in (
            ("count", 1, 512),
            ("distractors", 0, 512),
            ("attributes", 1, 32),
            ("digits", 1, 18),
            ("length", 1, 16),
            ("tokens", 50, 200),
        ):
            value = getattr(element, key)
            if not low <= value <= high:
                refuse(key, value, f"between {low} and {high}")
        if element.look_alike is not None and not 2 <= element.look_alike <= 16:
            refuse("look_alike", element.look_alike, "between 2 (one edit is the near-miss outcome) and 16")
        if element.probes is not None and element.probes < 0:
            refuse("probes", element.probes, "0 or more")
        if element.form != "sentence" and (element.kind != "keys" or element.role not in ("user", "tool")):
            refuse("form", element.form, 'only for kind "keys" stated by user or tool')
        if element.kind == "values" and element.count > 7:
            refuse("count", element.count, "one value per weekday: at most 7")
        if element.role != "user" and element.kind not in ("keys", "abstain"):
            refuse("role", element.role, 'only kind "keys" can be stated by others than the user')
