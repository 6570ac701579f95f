"""What one reply is: ok, a near miss, another value, a refusal, nothing, a loop, a leak, or missing data.

The grader reads value tokens only; wording, markdown, thinking blocks and explanations around them do not count.
A reply is ok when it commits to the gold value and to no other. A list of values is never ok, however many of them
are right; values told person by person ("Ada: 48213, and 90577 is Bob's") are no list: the one told of the person asked
for is the answer, wherever it stands. The gold plainly told of somebody else ("Bob's code is 48213") is no answer, and
`other`; a reply that names the one asked for as well and does not refuse is read in its favour. Where the assistant
turn was begun for the model ("The locker code of Ada is"), the answer is what comes next, and talk after the first
sentence is not read.
"""

import difflib
import re
from collections.abc import Container
from typing import NamedTuple

from longrecall.evals.owners import People, names_the_asked, not_of_others, of_the_asked
from longrecall.evals.schema import Outcome
from longrecall.evals.values import Kind, Mention, canonical, clean, edit_distance, kind_of, read_values
from longrecall.needles.schema import Conversation, Probe


class Grade(NamedTuple):
    """An outcome and the value it rests on, as written in the reply."""

    outcome: Outcome
    answer: str | None


_SPECIAL = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|<｜[^｜<>\n]{1,60}｜>|</?(?:start_of_turn|end_of_turn|bos|eos|pad|unk|s|mask)>|<unused\d+>"
    r"|\[/?INST\]|<</?SYS>>|<0x[0-9A-F]{2}>|\[(?:gMASK|BOS|EOS|PAD|UNK)\]"
)
_OVERFLOW = re.compile(
    r"overflow|context[ _]length|maximum context|context window|too long|exceeds? the (?:limit|model)", re.I
)
_SAID = r"(?:mentioned|told|said|stated|specified|given|provided|shared|known|available|been)"
_REFUSAL = re.compile(
    r"\b(?:i (?:do not|don't|cannot|can't|could not|couldn't|am unable|am not able|have no|did not|didn't)"
    r"|i'm (?:sorry|unable|not (?:sure|able|aware))|sorry|unable to|no (?:information|record|mention)"
    rf"|not (?:{_SAID}|sure)|never {_SAID}|nothing (?:was |is |has been )?{_SAID}|unknown|unspecified|as an ai"
    rf"|(?:was|were|is|has|have)(?:n't| not) {_SAID}"
    r"|(?:do|does|did)(?:n't| not) (?:know|say|mention|recall|remember|have|contain|appear|tell)"
    r"|none|n/a|not applicable)\b",
    re.I,
)
_NEGATED_BEFORE = re.compile(
    r"(?:\bnot|n't|\bnor|\bnever|instead of|rather than|other than|unlike|formerly|previously|earlier"
    r"|before(?: that)?|\bold(?: value| one| code)?|\bfrom|replac\w+|supersed\w+|no longer|used to be|originally"
    r"|at first|first|\bwas|\bwere)[\s:,('\"a-z]{0,14}$",
    re.I,
)
_NEGATED_AFTER = re.compile(
    r"^[\s'\"),]{0,3}(?:(?:is|was) (?:wrong|old|outdated|the old|no longer)|(?:before|earlier|previously|at first)\b)",
    re.I,
)
_DENIED_BEFORE = re.compile(r"(?:\b(?:not|never)|n't) (?:the |an? )?['\"(]?$", re.I)
_HEDGE = re.compile(
    r"\b(?:or|could|might|may be|maybe|perhaps|possibly|also|alternatively|either|another|as well)\b|/", re.I
)
_CORRECTION = re.compile(
    r"\b(?:actually|wait|correction|i mean|no,|scratch that|sorry|let me correct"
    r"|but (?:it|this|that) was (?:later |since )?(?:changed|updated)|updated to|changed to)\b",
    re.I,
)
_FINAL = re.compile(r"(?:final answer|the answer is|answer)\s*(?:is)?\s*[:=]\s*|\\boxed\s*\{", re.I)
_THINK = re.compile(r"<(think|thinking|reasoning|thought)>.*?</\1>", re.S | re.I)
_THINK_OPEN = re.compile(r"<(think|thinking|reasoning|thought)>", re.I)
_THINK_CLOSE = re.compile(r"^.*</(?:think|thinking|reasoning|thought)>", re.S | re.I)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=\S)|\n+")

BEGUN_SLACK_CHARS = 8
"""A begun answer that is this much longer than the gold and states no value was not cut short by the budget: it is
wrong. Otherwise a damaged build that babbles up to the limit would count as missing data, and no longer as a loss."""


def grade(
    text: str | None,
    finish_reason: str | None,
    error: str | None,
    probe: Probe,
    conversation: Conversation,
    foreign_values: Container[str] = frozenset(),
) -> Grade:
    """Outcome of one reply, and the value it gave.

    foreign_values: canonical values (see `score.foreign_index`) planted in other conversations and not in this one.
    """
    if error is not None:
        return Grade("overflow" if _OVERFLOW.search(error) else "error", None)
    if text is None:
        return Grade("truncated" if finish_reason == "length" else "empty", None)
    cut = finish_reason in ("length", "max_tokens")
    if finish_reason in ("abort", "error"):
        return Grade("error", None)
    text = _THINK.sub(" ", text)
    if _THINK_CLOSE.match(text):  # the template opened the block, the reply only closes it
        text = _THINK_CLOSE.sub(" ", text)
    opened = _THINK_OPEN.search(text)
    if opened:
        text = text[: opened.start()]
        if not text.strip():
            return Grade("truncated" if cut else "empty", None)
    leak = _SPECIAL.search(text)
    body = clean(_SPECIAL.sub(" ", text))
    if leak:
        return Grade("special-token", _answer(body, probe, conversation, foreign_values, cut=False).answer)
    if not re.search(r"\w", body):
        return Grade("truncated" if cut and not probe.answer_prefix else "empty", None)
    return _answer(body, probe, conversation, foreign_values, cut=cut)


def _answer(body: str, probe: Probe, conversation: Conversation, foreign: Container[str], *, cut: bool) -> Grade:
    if _is_abstention(probe):
        return _grade_abstention(body, probe, conversation, foreign, cut=cut)
    kind = kind_of(probe.gold)
    if kind == "verbatim":
        return _grade_verbatim(body, probe, cut=cut)
    reader = _Reader.of(probe, conversation, foreign, kind)
    segment = _first_sentence(body) if probe.answer_prefix else body
    values = reader.read(segment)
    if probe.answer_prefix and not values and not _REFUSAL.search(segment):
        # a begun answer may open with a line of its own ("as follows:\n48213")
        segment = _first_sentence(body, sentences=2)
        values = reader.read(segment)
    if is_loop(segment):
        return Grade("loop", reader.written(body, values[0]) if values else None)
    if not values:
        return _no_value(body, segment, probe, reader, cut=cut)
    told = values
    if not probe.answer_prefix:
        values = of_the_asked(segment, told, reader.people) or told
    chosen = _commit(segment, values, begun=bool(probe.answer_prefix))
    last = chosen[-1]
    if (
        cut
        and last.end >= len(segment.rstrip())
        and len(segment) >= len(body.rstrip())
        and last.canonical not in reader.gold
    ):
        if any(gold.startswith(last.canonical) and gold != last.canonical for gold in reader.gold):
            return Grade("truncated", None)
    wrong = [m for m in chosen if m.canonical not in reader.gold]
    if not wrong and all(_DENIED_BEFORE.search(segment[: m.start]) for m in values if m.canonical in reader.gold):
        return Grade("other", reader.written(segment, chosen[0]))  # "it is not 48213"
    if not wrong and not probe.answer_prefix and reader.people.asked:
        ours = chosen[0] in not_of_others(segment, told, reader.people)
        if not ours and (not names_the_asked(segment, reader.people) or _REFUSAL.search(segment)):
            return Grade("other", reader.written(segment, chosen[0]))  # "Bob's code is 48213"
    if not wrong:
        return Grade("ok", reader.written(segment, chosen[0]))
    return Grade(reader.classify(wrong), reader.written(segment, wrong[0]))


def _no_value(body: str, segment: str, probe: Probe, reader: "_Reader", *, cut: bool) -> Grade:
    if _REFUSAL.search(segment):
        return Grade("refusal", None)
    if is_loop(body):
        return Grade("loop", None)
    if cut and not (probe.answer_prefix and len(body.strip()) >= len(probe.gold) + BEGUN_SLACK_CHARS):
        return Grade("truncated", None)
    near = reader.nearest(segment)
    if near is not None:
        return Grade("near-miss", near)
    return Grade("other", segment.strip()[:80] or None)


def _is_abstention(probe: Probe) -> bool:
    return probe.live_fact is None and (not probe.gold.strip() or "abst" in probe.kind or "absent" in probe.kind)


def _grade_abstention(
    body: str, probe: Probe, conversation: Conversation, foreign: Container[str], *, cut: bool
) -> Grade:
    """Ok is to say that nothing was said; any value is an invention, named by where it comes from.

    Except beside a refusal, of somebody else: "You never told me Ada's code; Bob's is 90577."
    """
    values = [v for fact in conversation.facts for v in (fact.value, *fact.aliases) if v]
    if is_loop(body):
        return Grade("loop", None)
    kinds: set[Kind] = ({kind_of(v) for v in values} - {"verbatim"}) | {"digits"}
    planted = {canonical(v) for v in values}
    words = min(4, max((len(v.split()) for v in planted), default=1))
    refused = _REFUSAL.search(body) is not None
    seen: dict[str, str] = {}
    for kind in sorted(kinds):
        mentions = read_values(body, kind, max_words=words)
        if refused:
            # "Sorry, it is 70011" invents all the same; a word of another conversation may stand in any refusal
            mentions = [m for m in mentions if m.canonical in planted or _digits(m.canonical) >= 3]
            mentions = not_of_others(body, mentions, _people(probe, conversation))
        seen |= {m.canonical: body[m.start : m.end] for m in mentions}
    for value, written in seen.items():
        if value in planted:
            return Grade("distractor", written)
    for value, written in seen.items():
        if value in foreign:
            return Grade("foreign", written)
    if refused:
        lengths = {_digits(value) for value in planted}
        dates = _dates_in(body)
        for value, written in seen.items():
            if value.isdigit() and len(value) in lengths and not any(written in date for date in dates):
                return Grade("other", written)
        return Grade("ok", None)
    return Grade("truncated" if cut else "other", body.strip()[:80])


def _digits(value: str) -> int:
    return sum(character.isdigit() for character in value)


def _dates_in(text: str) -> list[str]:
    return [text[m.start : m.end] for m in read_values(text, "date")]


def _grade_verbatim(body: str, probe: Probe, *, cut: bool) -> Grade:
    """Copy-back: equal word by word, found whole in the reply, or nearly so (word similarity of at least .9)."""
    gold = canonical(probe.gold, "words").split()
    said = canonical(body, "words").split()
    if any(said[i : i + len(gold)] == gold for i in range(len(said) - len(gold) + 1)):
        return Grade("ok", None)
    if is_loop(body):
        return Grade("loop", None)
    if cut and len(said) < len(gold):
        return Grade("truncated", None)
    if difflib.SequenceMatcher(None, gold, said, autojunk=False).ratio() >= 0.9:
        return Grade("near-miss", body.strip()[:80])
    return Grade("refusal" if _REFUSAL.search(body) else "other", body.strip()[:80])


class _Reader(NamedTuple):
    """How to find and name the values one probe can be answered with."""

    kind: Kind
    gold: frozenset[str]
    stale: frozenset[str]
    distractors: frozenset[str]
    foreign: Container[str]
    max_words: int
    n_digits: int
    people: People

    @classmethod
    def of(cls, probe: Probe, conversation: Conversation, foreign: Container[str], kind: Kind) -> "_Reader":
        def forms(values: list[str] | tuple[str, ...]) -> frozenset[str]:
            return frozenset(canonical(v, kind) for v in values if v)

        gold = forms((probe.gold, *probe.aliases))
        if kind == "amount":  # the number alone counts: the question named the currency
            gold |= {re.sub(r"^[^\d]+", "", v) for v in gold}
        stale = forms(probe.stale_values) - gold
        planted = [value for fact in conversation.facts for value in (fact.value, *fact.aliases)]
        distractors = forms([*probe.distractor_values, *planted]) - gold - stale
        known = [*gold, *stale, *distractors]
        return cls(
            kind=kind,
            gold=gold,
            stale=stale,
            distractors=distractors,
            foreign=foreign,
            max_words=min(6, max(len(v.split()) for v in known)),
            n_digits=len(canonical(probe.gold, kind)),
            people=_people(probe, conversation),
        )

    def read(self, segment: str) -> list[Mention]:
        """Value-shaped mentions in order. Numbers far from the gold's length ("turn 3") are not values."""
        mentions = read_values(segment, self.kind, max_words=self.max_words, length=self.n_digits)
        if self.kind == "digits":
            slack = 1 if self.n_digits >= 3 else 0
            near = [m for m in mentions if self._known(m) or abs(len(m.canonical) - self.n_digits) <= slack]
            dates = read_values(segment, "date") if near[1:] else []  # the year of "on 3 May 2031" is not an answer
            return [m for m in near if self._known(m) or not any(d.start <= m.start < d.end for d in dates)]
        if self.kind in ("words", "literal"):
            return _longest([m for m in mentions if self._known(m)])
        if self.kind == "amount":
            return [m for m in mentions if self._known(m) or len(re.sub(r"\D", "", m.canonical)) >= 3]
        return mentions

    def _known(self, mention: Mention) -> bool:
        value = mention.canonical
        return value in self.gold or value in self.stale or value in self.distractors or value in self.foreign

    def classify(self, wrong: list[Mention]) -> Outcome:
        """The gravest reading of the wrong values named: stale, then distractor, near miss, foreign, other."""
        values = [m.canonical for m in wrong]
        if any(v in self.stale for v in values):
            return "stale"
        if any(v in self.distractors for v in values):
            return "distractor"
        # a value one edit away is far likelier misread than leaked, though it may be planted elsewhere by chance
        if any(self._near(v) for v in values):
            return "near-miss"
        if any(v in self.foreign for v in values):
            return "foreign"
        return "other"

    def _near(self, value: str) -> bool:
        return any(1 <= edit_distance(value, g, limit=_edits(g)) <= _edits(g) for g in self.gold if len(g) > 2)

    def nearest(self, segment: str) -> str | None:
        """A misspelt word or literal value, as written; None for kinds that `read` sees misspelt already."""
        if self.kind == "uuid":
            tokens = [m.group() for m in re.finditer(r"[0-9A-Za-z-]{24,44}", segment)]
            return next((t for t in tokens if self._near(t.replace("-", "").lower())), None)
        if self.kind not in ("words", "literal"):
            return None
        for m in read_values(segment, self.kind, max_words=self.max_words):
            if self._near(m.canonical):
                return segment[m.start : m.end]
        return None

    def written(self, segment: str, mention: Mention) -> str:
        return segment[mention.start : mention.end].strip()


def _people(probe: Probe, conversation: Conversation) -> People:
    own = [fact for fact in conversation.facts if fact.fact_id == probe.live_fact]
    links = [fact for fact in conversation.facts if fact.fact_id in probe.needs and not fact.value]
    named = {fact.entity for fact in [*conversation.facts, *links] if fact.entity and (fact.value or fact in links)}
    return People(
        named=frozenset(named),
        asked=frozenset(name for name in named if re.search(rf"\b{re.escape(name)}\b", probe.question, re.I)),
        right=frozenset(fact.entity for fact in [*own, *links] if fact.entity),
    )


def _edits(gold: str) -> int:
    """Edits that still make a near miss: 1 up to 11 characters, then one per 6."""
    return max(1, len(gold) // 6)


def _longest(mentions: list[Mention]) -> list[Mention]:
    """Overlapping mentions reduced to the longest ("red fox" over "fox")."""
    kept: list[Mention] = []
    for m in sorted(mentions, key=lambda m: (m.start - m.end, m.start)):
        if not any(m.start < k.end and k.start < m.end for k in kept):
            kept.append(m)
    return sorted(kept, key=lambda m: m.start)


def _first_sentence(body: str, sentences: int = 1) -> str:
    """The first sentence (or line) that holds a word."""
    position = 0
    for match in _SENTENCE_END.finditer(body):
        if re.search(r"\w", body[position : match.start()]):
            sentences -= 1
            if not sentences:
                return body[: match.start()]
        position = match.end()
    return body


def _commit(segment: str, values: list[Mention], *, begun: bool) -> list[Mention]:
    """The distinct values the reply stands by: one, or several when it lists or hedges."""
    final = list(_FINAL.finditer(segment))
    if final and any(m.start >= final[-1].start() for m in values):
        values = [m for m in values if m.start >= final[-1].start()]
    if len({m.canonical for m in values}) == 1:
        return values[:1]
    if begun:
        return _distinct(_run_on(segment, values))
    standing = [m for m in values if not _is_set_aside(segment, m)]
    values = standing or values
    kept = [values[0]]
    for m in values[1:]:
        gap = segment[kept[-1].end : m.start]
        if m.canonical in {k.canonical for k in kept}:
            continue
        if _CORRECTION.search(gap):
            kept = [m]
        elif not _SENTENCE_END.search(gap) or _HEDGE.search(gap) or _is_list_gap(gap):
            kept.append(m)
    return _distinct(kept)


def _distinct(values: list[Mention]) -> list[Mention]:
    return list({m.canonical: m for m in reversed(values)}.values())[::-1]


def _is_set_aside(segment: str, mention: Mention) -> bool:
    """Named only to be ruled out or as what used to be true."""
    clause = re.split(r"[.;!?\n]", segment[: mention.start])[-1]
    return bool(_NEGATED_BEFORE.search(clause) or _NEGATED_AFTER.search(segment[mention.end :]))


def _run_on(segment: str, values: list[Mention]) -> list[Mention]:
    """The first value and those listed right after it; a later clause about something else is not an answer."""
    kept = [values[0]]
    if _is_set_aside(segment, values[0]) and len(values) > 1:  # "not 90577 but 48213"
        kept, values = [values[1]], values[1:]
    for m in values[1:]:
        if not _is_list_gap(segment[kept[-1].end : m.start]) or _is_set_aside(segment, m):
            break
        kept.append(m)
    return kept


def _is_list_gap(gap: str) -> bool:
    """Only separators and joining words between two values."""
    words = re.findall(r"[^\W\d_]+", gap.lower())
    joining = {
        "and",
        "or",
        "then",
        "also",
        "maybe",
        "perhaps",
        "possibly",
        "either",
        "it",
        "is",
        "might",
        "could",
        "be",
    }
    return len(words) <= 4 and all(w in joining for w in words)


def is_loop(text: str) -> bool:
    """True when the reply ends in one unit repeated at least 4 times over at least 40 characters and half of it.

    Single characters and short tokens need 12 repeats, so that a row of dashes or "ha ha ha" is not a loop.
    """
    text = text.strip()
    if len(text) < 40:
        return False
    tail = text[-2000:]
    for unit in range(1, min(400, len(tail) // 4) + 1):
        if tail[-unit:] != tail[-2 * unit : -unit]:
            continue
        piece, repeats = tail[-unit:], 2
        if not piece.strip(" -_=*.\n"):
            continue
        while tail[-(repeats + 1) * unit : -repeats * unit] == piece:
            repeats += 1
        if repeats >= (12 if unit <= 3 else 4) and repeats * unit >= max(40, len(tail) // 2):
            return True
    return False
