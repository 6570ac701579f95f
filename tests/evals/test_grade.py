"""Grading: a golden table of reply texts and properties that hold for any value and any wording."""

import csv
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.evals.grade import grade, is_loop
from longrecall.evals.values import canonical, edit_distance, kind_of
from longrecall.needles.schema import Conversation, Fact, Probe

FOREIGN = frozenset({"70011", "80022", "walrus"})
VERBATIM = "The quick harvest moved along the river road while seven grey barrels rolled past the old mill at noon"


def _probe(gold, *, stale=(), distractors=(), prefix="", aliases=(), live="f0", kind="single", question="?"):
    return Probe(
        probe_id="p0",
        kind=kind,
        question=question,
        gold=gold,
        aliases=aliases,
        live_fact=live,
        distractor_values=distractors,
        stale_values=stale,
        answer_prefix=prefix,
    )


PROBES = {
    "begun": _probe("48213", stale=("11902",), distractors=("90577",), prefix="The locker code of Ada is"),
    "open": _probe("48213", stale=("11902",), distractors=("90577",)),
    "people": _probe(
        "48213",
        stale=("11902",),
        distractors=("90577", "31415"),
        live="f2",
        question="What is the locker code of Ada?",
    ),
    "word": _probe("heron", stale=("otter",), distractors=("badger",)),
    "name": _probe("Maria Delgado", aliases=("Delgado",), distractors=("Jonas Brandt",)),
    "date": _probe("2031-05-03", stale=("2031-04-30",)),
    "amount": _probe("$1,234.50", distractors=("$987.00",)),
    "uuid": _probe("9b2e4c1a-77d0-4f3e-8a61-0c5d9e7f1b23", distractors=("1f0c3b5d-0a9e-4c88-b7d2-5e6f7a8b9c0d",)),
    "path": _probe("/srv/data/ledger_7.csv", distractors=("/srv/data/audit_2.csv",)),
    "codeword": _probe("amber-falcon-stone", distractors=("cobalt-heron-reed",)),
    "setting": _probe(
        "max_retries = 48213", aliases=("max_retries=48213", "48213"), distractors=("min_delay = 90577", "90577")
    ),
    "count": _probe("3", kind="count"),
    "absent": _probe("", live=None, kind="abstention"),
    "verbatim": _probe(VERBATIM, kind="verbatim"),
}


PEOPLE = {"48213": "Ada", "11902": "Ada", "90577": "Bob", "31415": "Eve"}


def _conversation(*values):
    facts = tuple(
        Fact(fact_id=f"f{i}", entity=PEOPLE.get(v, "Bob"), attribute="x", value=v, kind="single", turn_index=0)
        for i, v in enumerate(values)
    )
    return Conversation(
        conversation_id="c0",
        recipe="r",
        seed=0,
        tokenizer_hash="t",
        template_hash="t",
        rungs=(64,),
        turns=(),
        facts=facts,
        probes=(),
        asks=(),
    )


def _conversation_of(probe):
    digits = kind_of(probe.gold) == "digits" or not probe.gold
    return _conversation("31415", "90577", "48213", "11902") if digits else _conversation(probe.gold)


def _golden():
    path = Path(__file__).with_name("golden_grades.tsv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [pytest.param(row, id=f"{i}-{row['probe']}-{row['expected']}") for i, row in enumerate(rows, start=2)]


def test_golden_table_has_at_least_150_replies_and_every_class():
    rows = [p.values[0] for p in _golden()]
    assert len(rows) >= 150
    assert len({row["expected"] for row in rows}) == 13


@pytest.mark.parametrize("row", _golden())
def test_golden_reply_gets_its_class(row):
    probe = PROBES[row["probe"]]
    text = row["text"].replace("\\\\", "\0").replace("\\n", "\n").replace("\\t", "\t").replace("\0", "\\")
    result = grade(text, row["finish_reason"], row["error"] or None, probe, _conversation_of(probe), FOREIGN)
    assert result.outcome == row["expected"], (text, result)


five_digits = st.integers(10_000, 99_999).map(str)
WRAPPERS = [
    "{}",
    " {}.",
    "**{}**",
    "The locker code of Ada is {}.",
    "`{}`",
    'It is "{}", as you said.',
    "Sure!\n\n{}\n",
    "<think>is it 00000?</think>{}",
    "{} (you told me in turn 3)",
]


def _spell(value):
    words = "zero one two three four five six seven eight nine".split()
    return " ".join(words[int(d)] for d in value)


SPELLINGS = [
    str,
    lambda v: f"{v[:2]},{v[2:]}",
    lambda v: f"{v[:2]} {v[2:]}",
    " ".join,
    "-".join,
    _spell,
    lambda v: v.translate(str.maketrans("0123456789", "０１２３４５６７８９")),
]


@given(five_digits, st.sampled_from(WRAPPERS), st.sampled_from(SPELLINGS))
def test_gold_is_ok_however_it_is_written(value, wrapper, spelling):
    probe = _probe(value)
    assert grade(wrapper.format(spelling(value)), "stop", None, probe, _conversation(value)).outcome == "ok"


@given(five_digits, five_digits, st.sampled_from(WRAPPERS), st.sampled_from(SPELLINGS))
def test_another_value_is_never_ok(value, other, wrapper, spelling):
    if value == other:
        return
    probe = _probe(value)
    got = grade(wrapper.format(spelling(other)), "stop", None, probe, _conversation(value, other)).outcome
    assert got == "distractor"
    far = edit_distance(value, other, limit=1) > 1
    assert grade(other, "stop", None, probe, _conversation(value)).outcome == ("other" if far else "near-miss")
    if far:
        assert grade(other, "stop", None, probe, _conversation(value), frozenset({other})).outcome == "foreign"


@given(
    st.lists(five_digits, min_size=2, max_size=6, unique=True),
    st.sampled_from([", ", " and ", " or ", "\n", " / ", "; "]),
)
def test_a_list_of_values_is_never_ok_even_with_the_gold_in_it(values, separator):
    for prefix in ("", "The locker code of Ada is"):
        probe = _probe(values[0], prefix=prefix)
        lines = separator == "\n" and prefix
        got = grade(separator.join(values), "stop", None, probe, _conversation(*values)).outcome
        assert (got == "ok") == bool(lines)  # a begun answer ends with its line


TELLINGS = [
    "{name}'s code is {value}",
    "{name}'s is {value}",
    "{name}: {value}",
    "the locker code of {name} is {value}",
    "for {name} it is {value}",
    "{value} is {name}'s",
    "{value} ({name})",
    "{value} belongs to {name}",
    "{value} is the code of {name}",
    "{value} was given to {name}",
    "{value} for {name}",
]
JOINTS = [", ", "; ", "\n", "\n- ", " and ", ", and ", ", while ", ". "]


def _ask_of_ada(people):
    facts = tuple(
        Fact(fact_id=name, entity=name, attribute="locker code", value=value, kind="keys", turn_index=0)
        for name, value in people.items()
    )
    probe = _probe(people["Ada"], live="Ada", question="What is the locker code of Ada?")
    return probe, dataclasses.replace(_conversation("1"), facts=facts)


@given(
    st.lists(five_digits, min_size=3, max_size=3, unique=True),
    st.permutations(["Ada", "Bob", "Eve"]),
    st.integers(2, 3),
    st.lists(st.sampled_from(TELLINGS), min_size=3, max_size=3),
    st.sampled_from(JOINTS),
)
def test_the_value_told_of_the_asked_is_the_answer_on_whichever_side_the_name_stands(values, order, n, forms, joint):
    probe, conversation = _ask_of_ada(dict(zip(("Ada", "Bob", "Eve"), values, strict=True)))
    told = list(dict.fromkeys(["Ada", *order]))[:n]
    told.sort(key=order.index)
    true = dict(zip(("Ada", "Bob", "Eve"), values, strict=True))
    swapped = true | {"Ada": true[other := next(name for name in told if name != "Ada")], other: true["Ada"]}
    for said, expected in ((true, "ok"), (swapped, "distractor")):
        text = joint.join(form.format(name=name, value=said[name]) for form, name in zip(forms, told, strict=False))
        assert grade(text + ".", "stop", None, probe, conversation).outcome == expected, text


@given(st.lists(five_digits, min_size=2, max_size=2, unique=True), st.sampled_from(TELLINGS))
def test_the_gold_told_of_somebody_else_is_not_the_answer(values, form):
    probe, conversation = _ask_of_ada({"Ada": values[0], "Bob": values[1]})
    told = {name: form.format(name=name, value=values[0]) for name in ("Ada", "Bob")}
    plain = [wrapper for wrapper in WRAPPERS if "Ada" not in wrapper and "It is" not in wrapper]
    for name, expected in (("Bob", "other"), ("Ada", "ok")):
        assert grade(told[name], "stop", None, probe, conversation).outcome == expected
        for shown in plain:
            assert grade(shown.format(told[name]), "stop", None, probe, conversation).outcome == expected
    refused = f"I do not know the code of Ada; {told['Bob']}."
    assert grade(refused, "stop", None, probe, conversation).outcome == "other"
    assert grade(f"{told['Bob']}. So is Ada's.", "stop", None, probe, conversation).outcome == "ok"


@given(st.lists(five_digits, min_size=2, max_size=2, unique=True), st.sampled_from(TELLINGS), st.sampled_from(JOINTS))
def test_a_refusal_may_tell_the_values_of_others_and_no_value_of_its_own(values, form, joint):
    _, conversation = _ask_of_ada({"Ada": values[0], "Bob": values[1]})
    probe = _probe("", live=None, kind="abstention", question="What is the locker code of Zoe?")
    refusal = "You never told me the locker code of Zoe. "
    told = [form.format(name=name, value=value) for name, value in zip(("Ada", "Bob"), values, strict=True)]
    assert grade(refusal + joint.join(told), "stop", None, probe, conversation).outcome == "ok"
    assert grade(joint.join(told), "stop", None, probe, conversation).outcome == "distractor"
    own = form.format(name="Zoe", value=values[1])
    assert grade(refusal + own, "stop", None, probe, conversation).outcome == "distractor"


def test_a_chain_or_the_next_in_order_is_told_of_the_person_it_ends_at():
    hop = _conversation("48213", "90577")
    facts = (
        Fact(fact_id="f0", entity="Cid", attribute="code", value="48213", kind="hops", turn_index=0),
        Fact(fact_id="f1", entity="Eve", attribute="code", value="90577", kind="hops", turn_index=0),
        Fact(fact_id="l0", entity="Ada", attribute="code", value="", kind="link", turn_index=0),
    )
    hop = dataclasses.replace(hop, facts=facts)
    chain = dataclasses.replace(_probe("48213", question="What is the code of Ada?"), needs=("f0", "l0"))
    after = _probe("48213", question="Which code came right after the one of Eve?")
    for text, probe, expected in (
        ("Cid's code is 48213.", chain, "ok"),
        ("Eve's code is 48213.", chain, "other"),
        ("Ada has the code of Cid, which is 48213; 90577 is Eve's.", chain, "ok"),
        ("Eve's was 90577, and then came Cid's, 48213.", after, "ok"),
        ("After Eve's code came 48213.", after, "ok"),
        ("The one after Eve's is 48213.", after, "ok"),
    ):
        assert grade(text, "stop", None, probe, hop).outcome == expected, text


@given(st.text(max_size=300), st.sampled_from(["stop", "length", None]))
def test_any_text_gets_exactly_one_class_and_never_raises(text, finish):
    for probe in PROBES.values():
        result = grade(text, finish, None, probe, _conversation_of(probe), FOREIGN)
        assert result.outcome not in ("error", "overflow")
        if finish != "length":
            assert result.outcome != "truncated"


@given(st.text(alphabet="abcdefghij .,\n", max_size=120))
def test_text_without_the_gold_digits_is_never_ok(text):
    assert grade(text, "stop", None, PROBES["open"], _conversation("48213"), FOREIGN).outcome != "ok"


@given(st.integers(0, 999_999))
def test_cardinals_in_words_and_figures_share_one_form(number):
    assert canonical(f"{number:,}", "digits") == str(number)
    if number >= 13:
        assert canonical(_cardinal_words(number), "digits") == str(number)


def _cardinal_words(n):
    units = (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen"
    ).split()
    tens = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
    if n < 20:
        return units[n]
    if n < 100:
        return tens[n // 10] + (f"-{units[n % 10]}" if n % 10 else "")
    if n < 1000:
        rest = f" and {_cardinal_words(n % 100)}" if n % 100 else ""
        return f"{units[n // 100]} hundred{rest}"
    rest = f" {_cardinal_words(n % 1000)}" if n % 1000 else ""
    return f"{_cardinal_words(n // 1000)} thousand{rest}"


@given(st.text(alphabet="abc", max_size=7), st.text(alphabet="abc", max_size=7))
def test_edit_distance_matches_a_recursive_definition(a, b):
    def osa(i, j):
        if min(i, j) == 0:
            return max(i, j)
        best = min(osa(i - 1, j) + 1, osa(i, j - 1) + 1, osa(i - 1, j - 1) + (a[i - 1] != b[j - 1]))
        if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
            best = min(best, osa(i - 2, j - 2) + 1)
        return best

    if len(a) + len(b) <= 9:
        assert edit_distance(a, b, limit=20) == osa(len(a), len(b))


def test_prose_with_repeated_words_is_not_a_loop():
    assert not is_loop("The code is 48213. The code of Ada is 48213, and the code of Bob is not known to me at all.")
    assert not is_loop("-" * 200)
