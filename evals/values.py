"""Values as people write them, brought to one canonical form, with where they stand in a reply.

"48,213", "4 8 2 1 3", "four eight two one three" and "forty-eight thousand two hundred thirteen" are one number;
"3 May 2031", "May 3rd, 2031" and "2031-05-03" are one date. `read_values` finds every value of the kind that is
asked for; what they mean (right, stale, another conversation's) is decided in grade.py.
"""

import re
import unicodedata
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["digits", "amount", "date", "uuid", "literal", "words", "verbatim"]

VERBATIM_MIN_WORDS = 15
"""Gold texts of at least this many words are copy-back tasks, compared as texts and not looked up as values."""

_UNITS = {
    w: i
    for i, w in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen".split()
    )
}
_TENS = {w: 10 * i for i, w in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2)}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 1_000_000}
_MONTHS = {
    m: i
    for i, m in enumerate(
        "january february march april may june july august september october november december".split(), start=1
    )
}
_MONTHS |= {m[:3]: i for m, i in list(_MONTHS.items())} | {"sept": 9}

_NUMBER_WORD = "|".join(sorted([*_UNITS, *_TENS, *_SCALES, "oh"], key=len, reverse=True))
_SPELLED = re.compile(rf"\b(?:{_NUMBER_WORD})\b(?:(?:[\s,]*-?[\s]*|\s+and\s+)\b(?:{_NUMBER_WORD})\b)*", re.IGNORECASE)
_DIGITS = re.compile(
    r"""(?<![\w.])(?:
        \d{1,3}(?:[,'’_\u00a0\u2009\u202f ]\d{3})+(?![\d])   # 48,213  48 213
      | \d(?:[ \-.,·]{1,2}\d(?!\d)){2,}                        # 4 8 2 1 3, 4-8-2-1-3, 4, 8, 2, 1, 3
      | \d+
    )(?!\w)(?!\.\d)""",
    re.VERBOSE,
)
_DIGITS_GLUED = re.compile(r"\d+")
_UUID = re.compile(r"\b[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}\b", re.IGNORECASE)
_AMOUNT = re.compile(
    r"(?P<pre>[$€£¥]|\b(?:USD|EUR|GBP|CHF|JPY)\s?)?\s?"
    r"(?P<num>\d{1,3}(?:[,' ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
    r"(?:\s?(?P<post>[$€£¥]|USD|EUR|GBP|CHF|JPY|dollars?|euros?|pounds?)(?!\w))?",
    re.IGNORECASE,
)
_CURRENCY = {"$": "usd", "dollar": "usd", "dollars": "usd", "€": "eur", "euro": "eur", "euros": "eur"}
_CURRENCY |= {"£": "gbp", "pound": "gbp", "pounds": "gbp", "¥": "jpy"}
_MONTH = r"(?P<{0}>jan|feb|mar|apr|may|jun|jul|aug|sep|sept|oct|nov|dec)[a-z]*\.?"
_DATES = (
    re.compile(r"\b(?P<y>\d{4})[-/.](?P<m>\d{1,2})[-/.](?P<d>\d{1,2})\b"),
    re.compile(r"\b(?P<d>\d{1,2})/(?P<m>\d{1,2})/(?P<y>\d{4})\b"),  # day first, as the planted aliases are
    re.compile(rf"\b(?P<d>\d{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH.format('mon')},?\s+(?P<y>\d{{4}})\b", re.I),
    re.compile(rf"\b{_MONTH.format('mon')}\s+(?P<d>\d{{1,2}})(?:st|nd|rd|th)?,?\s+(?P<y>\d{{4}})\b", re.I),
)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")  # "amber-fox" and "amber fox" are the same two words
_LITERAL = re.compile(r"\S+")
_FORMAT_CHARACTERS = dict.fromkeys([0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF, 0x00AD])
_SPELLINGS = str.maketrans("‘’‛“”„«»‐‑‒–—−", '\'\'\'"""""------')


class Mention(NamedTuple):
    """One value in a text."""

    canonical: str
    start: int
    end: int


def clean(text: str) -> str:
    """NFKC, plain quotes, dashes and digits, no invisible characters; markdown and LaTeX wrappers taken off."""
    text = _plain(text)
    text = re.sub(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}", r" \1 ", text)
    text = text.replace("{,}", ",").replace("\\,", "")
    text = re.sub(r"```[\w+-]*\n?|[`~]{1,3}", "", text)
    text = re.sub(r"\*{1,3}|(?<!\w)_{1,3}|_{1,3}(?!\w)", "", text)
    return re.sub(r"(?m)^[ \t]*(?:#{1,6}|>+)[ \t]+", "", text)


def kind_of(gold: str) -> Kind:
    """How a gold value is compared: by its digits, as a date, letter by letter, as words, or as a whole text."""
    gold = gold.strip()
    if len(gold.split()) >= VERBATIM_MIN_WORDS:
        return "verbatim"
    if re.fullmatch(r"\d+", gold):
        return "digits"
    if _UUID.fullmatch(gold):
        return "uuid"
    if any(pattern.fullmatch(gold) for pattern in _DATES):
        return "date"
    if re.search(r"\d", gold) and _AMOUNT.fullmatch(gold):
        return "amount"
    if re.search(r"[/\\_=(){}\[\]<>@:;.#]", gold) or (re.search(r"\d", gold) and re.search(r"[^\W\d]", gold)):
        return "literal"
    return "words"


@lru_cache(maxsize=65536)  # every reply of a conversation is held against the same few values
def canonical(value: str, kind: Kind | None = None) -> str:
    """The form two spellings of one value share; case is kept only where it is part of the value."""
    kind = kind or kind_of(value)
    text = clean_value(value)
    if kind == "digits":
        found = read_values(text, "digits")
        return found[0].canonical if len(found) == 1 else re.sub(r"\s", "", text)
    if kind == "uuid":
        return text.replace("-", "").lower()
    if kind in ("date", "amount"):
        found = read_values(text, kind)
        return found[0].canonical if len(found) == 1 else text.lower()
    if kind == "literal":
        return " ".join(text.split())
    return " ".join(word.lower() for word in _WORD.findall(text)) or text.lower()


def clean_value(value: str) -> str:
    """A stored value with the same Unicode treatment as a reply; its own underscores and stars stay."""
    return _plain(value).strip()


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).translate(_FORMAT_CHARACTERS).translate(_SPELLINGS)
    if text.isascii():
        return text
    return re.sub(r"[^\x00-\x7f]", lambda m: str(unicodedata.decimal(m.group(), m.group())), text)  # ٤٨ is 48


def _cardinal(words: list[str]) -> int | None:
    """ "forty", "eight", "thousand", "two", "hundred", "thirteen" as a number; None for digit-by-digit speech."""
    if not any(w in _SCALES or w in _TENS or _UNITS.get(w, 0) > 9 for w in words) and len(words) > 1:
        return None
    total, group, last = 0, 0, 0
    for word in words:
        if word == "hundred":
            group, last = max(group, 1) * 100, 100
        elif word in _SCALES:
            total, group, last = total + max(group, 1) * _SCALES[word], 0, 1000
        else:
            value = _TENS.get(word, _UNITS.get(word, 0))
            if group % 100 and not (group % 10 == 0 and last in _TENS.values() and value < 10):
                return None
            group, last = group + value, value
    return total + group


def _spelled_numbers(text: str) -> list[Mention]:
    found = []
    for match in _SPELLED.finditer(text):
        words = [w.lower() for w in re.findall(_NUMBER_WORD, match.group(), re.IGNORECASE)]
        if all(w == "oh" or _UNITS.get(w, 10) < 10 for w in words):
            digits = "".join("0" if w == "oh" else str(_UNITS[w]) for w in words)
        else:
            number = _cardinal([w for w in words if w != "oh"])
            if number is None:
                continue
            digits = str(number)
        found.append(Mention(digits, match.start(), match.end()))
    return found


def _amounts(text: str) -> list[Mention]:
    found = []
    for match in _AMOUNT.finditer(text):
        number = re.sub(r"[,' ]", "", match["num"])
        if "." in number:
            number = number.rstrip("0").rstrip(".")
        unit = (match["pre"] or match["post"] or "").strip().lower()
        found.append(Mention(f"{_CURRENCY.get(unit, unit)}{number}", match.start("num"), match.end()))
    return found


def _dates(text: str) -> list[Mention]:
    found = []
    for pattern in _DATES:
        for match in pattern.finditer(text):
            groups = match.groupdict()
            month = _MONTHS[groups["mon"].lower()] if groups.get("mon") else int(groups["m"])
            found.append(Mention(f"{groups['y']}-{month:02d}-{int(groups['d']):02d}", *match.span()))
    return sorted(found, key=lambda m: m.start)


def _digit_runs(text: str, length: int | None) -> list[Mention]:
    """Numbers in figures; separated groups are one number unless its length says they are several."""
    found = []
    for match in _DIGITS.finditer(text):
        joined = re.sub(r"\D", "", match.group())
        slack = 0 if ", " in match.group() else 1  # a comma and a space also part the values of a list
        if length is None or joined == match.group() or abs(len(joined) - length) <= slack:
            found.append(Mention(joined, *match.span()))
        else:
            pieces = _DIGITS_GLUED.finditer(text, match.start(), match.end())
            found += [Mention(piece.group(), *piece.span()) for piece in pieces]
    return found


def read_values(text: str, kind: Kind, *, max_words: int = 1, length: int | None = None) -> list[Mention]:
    """Every value of `kind` in a cleaned text, in order.

    max_words: for words and literals, every run of up to so many words. length: for digits, the expected count of
    digits: "4, 8, 2, 1, 3" is one number when five are expected and five numbers when one is.
    """
    if kind == "digits":
        digits = _digit_runs(text, length)
        spans = [(m.start, m.end) for m in digits]
        glued = [  # digits stuck to letters ("code48213", "48213kg"): still the digits
            Mention(m.group(), *m.span())
            for m in _DIGITS_GLUED.finditer(text)
            if len(m.group()) > 2 and not any(a <= m.start() < b for a, b in spans)
        ]
        return sorted([*digits, *glued, *_spelled_numbers(text)], key=lambda m: m.start)
    if kind == "uuid":
        return [Mention(m.group().replace("-", "").lower(), *m.span()) for m in _UUID.finditer(text)]
    if kind == "date":
        return _dates(text)
    if kind == "amount":
        return _amounts(text)
    pattern = _LITERAL if kind == "literal" else _WORD
    tokens = [(re.sub(r"'s$", "", m.group()), m.start(), m.end()) for m in pattern.finditer(text)]
    found = []
    for i in range(len(tokens)):
        for n in range(1, max_words + 1):
            if i + n > len(tokens):
                break
            start, end = tokens[i][1], tokens[i + n - 1][2]
            if kind == "literal":
                raw = " ".join(t[0] for t in tokens[i : i + n])
                stripped = raw.strip("\"'.,;:!?")
                found.append(Mention(raw, start, end))
                for variant in {stripped, stripped.strip("()[]{}<>")} - {raw, ""}:
                    found.append(Mention(variant, start, end))
            else:
                found.append(Mention(" ".join(t[0].lower() for t in tokens[i : i + n]), start, end))
    return found


def edit_distance(a: str, b: str, *, limit: int) -> int:
    """Optimal string alignment distance (insert, delete, replace, swap neighbours); `limit` + 1 when beyond it."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        current = [i]
        for j, y in enumerate(b, start=1):
            cost = min(row[j] + 1, current[j - 1] + 1, row[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            current.append(cost)
        if min(current) > limit:
            return limit + 1
        before, row = row, current
    return row[-1]
