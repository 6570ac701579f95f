"""Values that facts take, unique over a whole set, so that a value of another conversation in a reply is a cache leak.

A `Values` hands out values of a kind; it never gives the same one twice, never gives two of one conversation that
differ in a single character, and never one that contains another of the same conversation. Kinds are those of RULER
(numbers, words, uuids) and those users ask about: dates, names, amounts, paths, code lines.
"""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from longrecall.needles.filler import pick

ValueKind = Literal["number", "uuid", "word", "date", "name", "amount", "path", "code"]
VALUE_KINDS: tuple[str, ...] = get_args(ValueKind)

_MONTHS = ("January February March April May June July August September October November December").split()
CODE_WORDS_A = (
    "amber azure cobalt coral crimson ebony emerald golden indigo ivory jade lilac maroon ochre olive onyx pearl "
    "ruby russet sable sapphire scarlet sienna silver topaz turquoise umber violet magenta mauve teal cyan"
).split()
CODE_WORDS_B = (
    "badger bison cheetah condor coyote dolphin eagle falcon ferret gazelle gecko heron ibex iguana jaguar koala "
    "lemur leopard lynx marmot marten narwhal ocelot orca osprey otter panther pelican puffin puma raven salmon "
    "stoat tapir tiger toucan viper walrus weasel wolverine zebra wombat"
).split()
CODE_WORDS_C = (
    "acorn aspen birch briar cactus cedar clover cypress fern ginger hazel heather holly iris ivy jasmine "
    "juniper larch laurel lotus maple mimosa moss myrtle nettle orchid palm poppy primrose rowan saffron sage "
    "sorrel spruce thistle thyme tulip verbena yarrow yew"
).split()
_SYLLABLES = "bel dor fen gal har kel lun mar nor pel quil ros sel tav ul ven wyn yor zal brin cor dal".split()
_ENDINGS = "a o in en is ar el or um eth".split()
_SETTINGS = (
    "retry_limit cache_rows batch_rows poll_ticks stall_ticks drain_ticks queue_depth burst_size page_rows scan_rows"
).split()

CAPACITY: dict[str, int] = {
    "number": 90_000,
    "uuid": 2**122,
    "word": len(CODE_WORDS_A) * len(CODE_WORDS_B) * len(CODE_WORDS_C),
    "date": 200 * 12 * 28,
    "name": (len(_SYLLABLES) ** 2 * len(_ENDINGS)) ** 2,
    "amount": 9_000_000,
    "path": len(CODE_WORDS_A) * len(CODE_WORDS_B) * len(CODE_WORDS_C) * 900,
    "code": len(_SETTINGS) * 90_000,
}
"""How many different values each kind has (numbers: of 5 digits)."""


class ValueSpaceError(ValueError):
    """More unique values asked than the kind has; the message names both."""


def value_words() -> set[str]:
    """Words that occur in values of the kinds word, path and name; filler must hold none of them."""
    return {*CODE_WORDS_A, *CODE_WORDS_B, *CODE_WORDS_C}


def _number(rng: random.Random, digits: int) -> str:
    low = 10 ** (digits - 1)
    return str(low + int(rng.random() * 9 * low))


def _uuid(rng: random.Random, _: int) -> str:
    bits = f"{rng.getrandbits(128):032x}"
    return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-{'89ab'[int(bits[16], 16) % 4]}{bits[17:20]}-{bits[20:]}"


def _word(rng: random.Random, _: int) -> str:
    return f"{pick(rng, CODE_WORDS_A)}-{pick(rng, CODE_WORDS_B)}-{pick(rng, CODE_WORDS_C)}"


def _date(rng: random.Random, _: int) -> str:
    return f"{1 + int(rng.random() * 28)} {pick(rng, _MONTHS)} {1800 + int(rng.random() * 200)}"


def _is_date(text: str) -> bool:
    day, _, year = text.split()
    return 1 <= int(day) <= 28 and len(str(int(day))) == len(day) and year[0] != "0"


def _name(rng: random.Random, _: int) -> str:
    def part() -> str:
        return (pick(rng, _SYLLABLES) + pick(rng, _SYLLABLES) + pick(rng, _ENDINGS)).capitalize()

    return f"{part()} {part()}"


def _amount(rng: random.Random, _: int) -> str:
    cents = 1_000_000 + int(rng.random() * 9_000_000)
    return f"${cents // 100:,}.{cents % 100:02d}"


def _path(rng: random.Random, _: int) -> str:
    return (
        f"/srv/{pick(rng, CODE_WORDS_A)}/{pick(rng, CODE_WORDS_B)}/{pick(rng, CODE_WORDS_C)}-"
        f"{100 + int(rng.random() * 900)}.cfg"
    )


def _code(rng: random.Random, digits: int) -> str:
    return f"{pick(rng, _SETTINGS)} = {_number(rng, digits)}"


_DRAW: dict[str, Callable[[random.Random, int], str]] = {
    "number": _number,
    "uuid": _uuid,
    "word": _word,
    "date": _date,
    "name": _name,
    "amount": _amount,
    "path": _path,
    "code": _code,
}


def aliases(value: str, kind: str) -> tuple[str, ...]:
    """Other spellings of the value that count as right."""
    if kind == "date":
        day, month, year = value.split()
        number = _MONTHS.index(month) + 1
        return (f"{month} {day}, {year}", f"{year}-{number:02d}-{int(day):02d}", f"{int(day):02d}/{number:02d}/{year}")
    if kind == "amount":
        return (value[1:], value.replace(",", ""), value[1:].replace(",", ""))
    if kind == "code":
        setting, digits = value.split(" = ")
        return (f"{setting}={digits}", digits)
    return ()


def closer_than(left: str, right: str, distance: int) -> bool:
    """Whether two values of equal length differ in fewer than `distance` characters, or one contains the other."""
    if len(left) != len(right):
        return left in right or right in left
    return sum(a != b for a, b in zip(left, right, strict=True)) < distance


@dataclass(frozen=True, kw_only=True)
class Demand:
    """How many values of one kind a conversation takes."""

    kind: str
    count: int
    digits: int = 5


def capacity(kind: str, digits: int = 5) -> int:
    """How many different values the kind has."""
    if kind not in CAPACITY:
        raise ValueSpaceError(f"unknown value kind {kind!r}; the kinds are {', '.join(VALUE_KINDS)}")
    scale = 10.0 ** (digits - 5) if kind in ("number", "code") else 1.0
    return int(CAPACITY[kind] * scale)


class Values:
    """Hands out values that are unique over everything drawn from it."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._here: list[str] = []

    def check(self, demands: Sequence[Demand], conversations: int) -> None:
        """Refuse, before anything is made, a set that would use more than half of a value space."""
        totals: dict[tuple[str, int], int] = {}
        for demand in demands:
            key = (demand.kind, demand.digits)
            totals[key] = totals.get(key, 0) + demand.count * conversations
        for (kind, digits), total in totals.items():
            room = capacity(kind, digits) // 2
            if total > room:
                size = f" of {digits} digits" if kind in ("number", "code") else ""
                raise ValueSpaceError(
                    f"{conversations} conversations need {total:,} unique values of kind {kind}{size}; at most "
                    f"{room:,} can be drawn (half of what there is): fewer conversations or facts, or more digits"
                )

    def next_conversation(self) -> None:
        """Values drawn from now on belong to another conversation."""
        self._here = []

    def draw(self, rng: random.Random, kind: str, *, digits: int = 5) -> str:
        """A new value, at least two characters away from each other of this conversation."""
        make = _DRAW[kind]
        for _ in range(10_000):
            value = make(rng, digits)
            if value not in self._used and not any(closer_than(value, other, 2) for other in self._here):
                return self._keep(value)
        raise ValueSpaceError(
            f"no unused value of kind {kind} is left after 10,000 tries: ask for fewer or more digits"
        )

    def look_alike(self, rng: random.Random, value: str, *, distance: int, kind: str) -> str:
        """A new value exactly `distance` characters away from `value` (digits stay digits, letters letters).

        Of a date only digits change, and it stays one.
        """
        date = kind == "date"
        places = [place for place, c in enumerate(value) if (c.isdigit() if date else c.isalnum())]
        if distance > len(places):
            raise ValueSpaceError(
                f"no look-alike of {value!r} differs in {distance} characters: it has {len(places)} to change"
            )
        for _ in range(10_000):
            characters = list(value)
            rest = list(places)
            for _ in range(distance):
                place = rest.pop(int(rng.random() * len(rest)))
                old = value[place]
                pool = (
                    string.digits
                    if old.isdigit()
                    else string.ascii_uppercase
                    if old.isupper()
                    else string.ascii_lowercase
                )
                characters[place] = pick(rng, [c for c in pool if c != old and not (place == 0 and c == "0")])
            found = "".join(characters)
            if date and not _is_date(found):
                continue
            others = [other for other in self._here if other != value]
            if found not in self._used and not any(closer_than(found, other, 2) for other in others):
                return self._keep(found)
        raise ValueSpaceError(f"no unused look-alike of {value!r} at distance {distance} is left")

    def claim(self, text: str) -> None:
        """Mark a long value made elsewhere as used; one that was used before is an error."""
        if text in self._used:
            raise ValueSpaceError(f"the text {text[:40]!r}… was planted before")
        self._used.add(text)

    def _keep(self, value: str) -> str:
        self._used.add(value)
        self._here.append(value)
        return value
