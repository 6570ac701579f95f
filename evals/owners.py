"""Of whom a reply tells a value: "Ada's code is 48213, and 90577 is Bob's" gives each person one.

The person after a value owns it where a word says so ("48213 is Ada's", "48213 for Ada", "48213 (Ada)"), else the
nearest person named before it in its line.
"""

import re
from typing import NamedTuple

from longrecall.evals.values import Mention

_OTHER_CLAUSE = r"(?!(?:and|but|while|whereas|or|not|never|different|unlike)\b)"
_OF_THE_NEXT_PERSON = (
    r"[\"')\]]*(?: *\((?=[^():=\d\n]*\)) *(?:for |of )?"  # 48213 (Ada)
    r"| +(?:is|was) +"  # 48213 is Ada's
    rf"|(?: +(?:is|was|belongs|goes)\b(?: +{_OTHER_CLAUSE}[\w']+){{0,4}}?)? +(?:of|for|to) +)"  # is the code of Ada
)
_COMPARED = re.compile(
    r"\b(?:same|like|not|than|instead|rather|after|before|following|by|according)\b|n't\b", re.IGNORECASE
)
_LABELLED = re.compile(r"[^\w.;!?\n]{0,6}[:=|>-][^\w.;!?\n]{0,6}")
_POSSESSIVE = re.compile(r"'s?\b[^.;!?\n]{0,60}")
_HOLDS = re.compile(r"\s+(?:has|had|is|was|got|gets|uses|used)\b[^.;!?\n]{0,60}", re.IGNORECASE)
_OF_THIS_PERSON = re.compile(r"\b(?:of|for|to)\s+$", re.IGNORECASE)


class People(NamedTuple):
    """Persons and things that values of a conversation belong to."""

    named: frozenset[str]
    asked: frozenset[str]
    """Those that the question names."""
    right: frozenset[str]
    """Those of whom the gold is true: its own fact's, and the links of the chain that leads to it."""


class Owner(NamedTuple):
    name: str
    plain: bool
    """The words say so; false where it is the nearest name only ("Bob said it was 48213")."""


def owners(text: str, mentions: list[Mention], names: frozenset[str]) -> list[Owner | None]:
    """The person each value is told of; None where no name stands in its line."""
    if not names:
        return [None] * len(mentions)
    people = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    of_the_next = re.compile(rf"{_OF_THE_NEXT_PERSON}(?P<name>{people})\b", re.IGNORECASE)
    spelt = {name.lower(): name for name in names}
    places = [
        place
        for place in re.finditer(rf"\b(?:{people})\b", text, re.IGNORECASE)
        if not any(m.start < place.end() and place.start() < m.end for m in mentions)
    ]
    told: list[Owner | None] = []
    taken = 0  # a name that owns the value before it owns none after it
    for mention in mentions:
        after = of_the_next.match(text, mention.end)
        if after:
            told.append(Owner(spelt[after["name"].lower()], True))
            taken = after.end()
            continue
        line = max(taken, text.rfind("\n", 0, mention.start) + 1)
        before = [place for place in places if line <= place.start() and place.end() <= mention.start]
        if before:
            place = before[-1]
            plain = _says_so(text[line : place.start()], text[place.end() : mention.start])
            told.append(Owner(spelt[place.group().lower()], plain))
        else:
            told.append(None)
    return told


def _says_so(before: str, between: str) -> bool:
    """Whether what stands around a name makes it the owner of the value that follows."""
    before = re.split(r"[.;!?]", before)[-1]
    if _COMPARED.search(before) or _COMPARED.search(between):
        return False
    if _OF_THIS_PERSON.search(before):
        return bool(re.fullmatch(r"[^.;!?\n]{0,60}", between))
    return any(form.fullmatch(between) for form in (_LABELLED, _POSSESSIVE, _HOLDS))


def of_the_asked(text: str, mentions: list[Mention], people: People) -> list[Mention] | None:
    """Of values told of several persons, those of the one asked for; None for other replies.

    Every value must have its person, and exactly one of them be one that the question is about.
    """
    told = owners(text, mentions, people.named)
    names = [owner.name if owner else "" for owner in told]
    if not people.asked or "" in names or len(set(names)) < 2:
        return None
    for group in (people.asked & people.right, people.right, people.asked):
        own = group & set(names)
        if own:
            return [m for m, name in zip(mentions, names, strict=True) if name in own] if len(own) == 1 else None
    return None


def not_of_others(text: str, mentions: list[Mention], people: People) -> list[Mention]:
    """The values that are not plainly told of a person whom the question is not about."""
    told = owners(text, mentions, people.named)
    ours = people.asked | people.right
    return [
        m for m, owner in zip(mentions, told, strict=True) if not (owner and owner.plain and owner.name not in ours)
    ]


def names_the_asked(text: str, people: People) -> bool:
    """One of those that the question is about is named."""
    return any(re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE) for name in people.asked | people.right)
