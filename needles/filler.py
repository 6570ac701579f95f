"""Seeded English prose and planted facts in many wordings: the haystack, and training text for whoever needs it.

    from longrecall.needles.filler import Prose, facts, training_conversations

    prose = Prose("train")                     # "train" | "heldout" | "all": disjoint templates and words
    prose.sentence(rng) -> str                 # "The old captain repaired the lantern slowly."
    prose.paragraph(rng, sentences=5) -> str
    prose.ask(rng) -> str                      # a user line that asks for more prose

    facts(rng, 8, split="train") -> list[WordedFact]
    # WordedFact: .entity .attribute .value .statement .echo .question .answer_prefix

    for conversation in training_conversations(seed=0, split="train", words=800):   # endless, deterministic
        conversation.messages      # [{"role", "content"}, …]: user and assistant in turn, facts planted among prose
        conversation.facts         # the facts in it; the last turns ask for some of them and answer correctly

The reference build's indexer is trained on `split="train"`; the recipe `reference` asks in `split="heldout"` (other
sentence templates, fact wordings, attributes, names and vocabulary), so its probes are new to the indexer. A held-out
evaluation takes `training_conversations(split="heldout")`. Everything is a function of the `random.Random` or seed
given. Sentences hold no digits, so no filler can contain a planted number.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import jinja2

from longrecall.needles.vocabulary import ASKS, ATTRIBUTES, NAMES, OPENERS, SENTENCES, WORDS, Split, split_words

T = TypeVar("T")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


@dataclass(frozen=True, kw_only=True)
class Wording:
    """One way to state a fact: jinja2 templates over `attribute`, `name`, `value`."""

    statement: str
    echo: str
    """The assistant's reply, which repeats the value."""


def _w(statement: str, echo: str) -> Wording:
    return Wording(statement=statement, echo=echo)


WORDINGS: tuple[Wording, ...] = (
    _w(
        "{{ name }}'s {{ attribute }} is {{ value }}.",
        "I will remember that {{ name }}'s {{ attribute }} is {{ value }}.",
    ),
    _w(
        "Please note that the {{ attribute }} of {{ name }} is {{ value }}.",
        "Noted. The {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "The {{ attribute }} of {{ name }} is {{ value }}.", "Thanks, the {{ attribute }} of {{ name }} is {{ value }}."
    ),
    _w(
        "{{ name }} told me that the {{ attribute }} is {{ value }}.",
        "So {{ value }} is the {{ attribute }} of {{ name }}.",
    ),
    _w("For {{ name }}, use {{ attribute }} {{ value }}.", "Understood, {{ attribute }} {{ value }} for {{ name }}."),
    _w(
        "Remember this: the {{ attribute }} of {{ name }} is {{ value }}.",
        "I will remember that the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w("{{ value }} is the {{ attribute }} of {{ name }}.", "Right, {{ name }} has the {{ attribute }} {{ value }}."),
    _w(
        "{{ name }} has a new {{ attribute }}, which is {{ value }}.",
        "The new {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "Before I forget, the {{ attribute }} of {{ name }} is {{ value }}.",
        "Good to know, the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "Write down {{ value }} as the {{ attribute }} of {{ name }}.",
        "Written down: the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "We gave {{ name }} the {{ attribute }} {{ value }}.",
        "Okay, {{ name }} was given the {{ attribute }} {{ value }}.",
    ),
    _w(
        "As of today the {{ attribute }} of {{ name }} is {{ value }}.",
        "Okay, the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "On the list, {{ name }} stands with {{ attribute }} {{ value }}.",
        "{{ name }}: {{ attribute }} {{ value }}. Got it.",
    ),
    _w(
        "By the way, {{ name }}'s {{ attribute }} is {{ value }}.",
        "{{ name }}'s {{ attribute }} is {{ value }}, all right.",
    ),
    _w(
        "I checked, and the {{ attribute }} of {{ name }} is {{ value }}.",
        "Confirmed: the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "Let me tell you that the {{ attribute }} of {{ name }} is {{ value }}.",
        "All right, the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w("{{ name }} uses {{ value }} as {{ attribute }}.", "I have {{ value }} as the {{ attribute }} of {{ name }}."),
    _w(
        "For your records, the {{ attribute }} of {{ name }} is {{ value }}.",
        "Recorded: the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "Keep in mind that {{ name }} has {{ attribute }} {{ value }}.",
        "Yes, {{ attribute }} {{ value }} belongs to {{ name }}.",
    ),
    _w(
        "Somebody set {{ name }}'s {{ attribute }} to {{ value }}.",
        "So {{ name }}'s {{ attribute }} is now {{ value }}.",
    ),
    _w(
        "Here is a detail: the {{ attribute }} of {{ name }} is {{ value }}.",
        "I see, the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w("{{ attribute }} of {{ name }}: {{ value }}.", "{{ value }}, {{ attribute }} of {{ name }}. Noted."),
    _w(
        "The letter says that {{ name }}'s {{ attribute }} is {{ value }}.",
        "Then {{ value }} is {{ name }}'s {{ attribute }}.",
    ),
    _w(
        "I just learned that the {{ attribute }} of {{ name }} is {{ value }}.",
        "Thanks for telling me that the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
    _w(
        "{{ name }} wrote that {{ value }} is the right {{ attribute }}.",
        "Good, {{ value }} for {{ name }}, the {{ attribute }}.",
    ),
    _w(
        "They assigned {{ attribute }} {{ value }} to {{ name }}.",
        "{{ name }} was assigned {{ attribute }} {{ value }}.",
    ),
    _w(
        "It turns out that the {{ attribute }} of {{ name }} is {{ value }}.",
        "Fine, so the {{ attribute }} of {{ name }} is {{ value }}.",
    ),
)
QUESTIONS = (
    ("What is the {{ attribute }} of {{ name }}?", "The {{ attribute }} of {{ name }} is"),
    ("Which {{ attribute }} does {{ name }} have?", "{{ name }} has the {{ attribute }}"),
    ("What is {{ name }}'s {{ attribute }}?", "{{ name }}'s {{ attribute }} is"),
    ("Do you remember the {{ attribute }} of {{ name }}?", "Yes, the {{ attribute }} of {{ name }} is"),
    ("Please tell me the {{ attribute }} of {{ name }}.", "The {{ attribute }} of {{ name }} is"),
    ("Remind me, what was {{ name }}'s {{ attribute }}?", "{{ name }}'s {{ attribute }} was"),
)
"""Question and the beginning of its answer."""


def wordings(split: Split) -> list[Wording]:
    """Fact wordings of one split."""
    return [w for i, w in enumerate(WORDINGS) if split == "all" or (i % 3 == 2) == (split == "heldout")]


def pick(rng: random.Random, items: Sequence[T]) -> T:
    """One item; only `Random.random`, whose sequence Python guarantees across versions, is used."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """The items in a seeded order (Fisher-Yates over `Random.random`)."""
    out = list(items)
    for last in range(len(out) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        out[last], out[other] = out[other], out[last]
    return out


ENVIRONMENT = jinja2.Environment(autoescape=False)


@lru_cache(maxsize=4096)
def _template(source: str) -> jinja2.Template:
    return ENVIRONMENT.from_string(source)


def fill(source: str, **values: str) -> str:
    """Render one of this module's own templates."""
    return _template(source).render(**values)


class _Slot:
    """A jinja2 value that draws a new word each time it is printed."""

    def __init__(self, draw: Callable[[], str]) -> None:
        self._draw = draw

    def __str__(self) -> str:
        return self._draw()


class Prose:
    """English sentences from templates over a vocabulary; the two splits share no template and no word of the lists."""

    def __init__(self, split: Split = "all") -> None:
        self.split: Split = split
        self._rng = random.Random(0)
        self._slots: dict[str, _Slot] = {}
        for slot, all_words in WORDS.items():
            chosen = split_words(all_words, split)
            self._slots[slot] = _Slot(lambda chosen=chosen: pick(self._rng, chosen))  # type: ignore[misc]
        times = [time[0].upper() + time[1:] for time in split_words(WORDS["time"], split)]
        self._slots["Time"] = _Slot(lambda: pick(self._rng, times))
        self._sentences = [self._drawing(source) for source in split_words(SENTENCES, split)]
        self._asks = [self._drawing(source) for source in split_words(ASKS, split)]
        self.openers = [opener.rstrip(".") + "." for opener in split_words(OPENERS, split)]

    def _drawing(self, source: str) -> Callable[[], str]:
        """A template as a function; its context is made once, which takes longer than filling it."""
        template = _template(source)
        context = template.new_context(self._slots)
        return lambda: "".join(template.root_render_func(context))

    def _render(self, rng: random.Random, templates: list[Callable[[], str]]) -> str:
        self._rng = rng
        return _ARTICLE.sub(r"\1n ", pick(rng, templates)())

    def sentence(self, rng: random.Random) -> str:
        """One sentence."""
        return self._render(rng, self._sentences)

    def ask(self, rng: random.Random) -> str:
        """A user line that asks for more prose."""
        return self._render(rng, self._asks)

    def paragraph(self, rng: random.Random, sentences: int) -> str:
        """Sentences joined by single spaces."""
        return " ".join(self.sentence(rng) for _ in range(sentences))


@dataclass(frozen=True, kw_only=True)
class WordedFact:
    """A fact with every sentence that states or asks for it."""

    entity: str
    attribute: str
    value: str
    statement: str
    echo: str
    question: str
    answer_prefix: str


def word_fact(
    rng: random.Random, *, entity: str, attribute: str, value: str, split: Split, echo: bool = True
) -> WordedFact:
    """State one fact in a wording of the split."""
    wording = pick(rng, wordings(split))
    question, prefix = pick(rng, QUESTIONS)
    slots = {"name": entity, "attribute": attribute, "value": value}
    return WordedFact(
        entity=entity,
        attribute=attribute,
        value=value,
        statement=fill(wording.statement, **slots),
        echo=fill(wording.echo, **slots) if echo else "Noted.",
        question=fill(question, **slots),
        answer_prefix=fill(prefix, **slots),
    )


def facts(rng: random.Random, count: int, *, split: Split, digits: int = 5) -> list[WordedFact]:
    """`count` facts of one or two attributes about distinct names, with distinct values of `digits` digits."""
    names = shuffled(rng, split_words(NAMES, split))[:count]
    if len(names) < count:
        raise ValueError(f"{count} facts asked, but the split {split!r} has {len(names)} names")
    attributes = shuffled(rng, split_words(ATTRIBUTES, split))[: 1 + int(rng.random() * 2)]
    values: dict[str, None] = {}
    low = 10 ** (digits - 1)
    while len(values) < count:
        values[str(low + int(rng.random() * 9 * low))] = None
    return [
        word_fact(rng, entity=name, attribute=pick(rng, attributes), value=value, split=split, echo=rng.random() < 0.7)
        for name, value in zip(names, values, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class TrainingConversation:
    """A multi-turn conversation with facts among prose; its last turns ask for some of them and answer correctly."""

    messages: list[dict[str, str]]
    facts: list[WordedFact]


def training_conversations(
    seed: int, *, split: Split, words: int, facts_per_1000_words: float = 12.0, questions: int = 4
) -> Iterator[TrainingConversation]:
    """Endless conversations of about `words` words each (roughly 1.3 tokens a word)."""
    prose = Prose(split)
    index = 0
    while True:
        rng = random.Random(f"training:{split}:{seed}:{index}")
        index += 1
        count = min(max(2, round(words * facts_per_1000_words / 1000)), len(split_words(NAMES, split)))
        planted = facts(rng, count, split=split, digits=3 + int(rng.random() * 4))
        asked = shuffled(rng, planted)[:questions]
        exchanges: list[tuple[str, str]] = [(fact.statement, fact.echo) for fact in planted]
        length = sum(len(user.split()) + len(reply.split()) for user, reply in exchanges)
        length += sum(len(fact.question.split()) + len(fact.answer_prefix.split()) + 1 for fact in asked)
        while length < words:
            user = prose.ask(rng)
            reply = " ".join([pick(rng, prose.openers), prose.paragraph(rng, 2 + int(rng.random() * 7))])
            exchanges.append((user, reply))
            length += len(user.split()) + len(reply.split())
        exchanges = shuffled(rng, exchanges)
        exchanges += [(fact.question, f"{fact.answer_prefix} {fact.value}.") for fact in asked]
        messages = []
        for user, reply in exchanges:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        yield TrainingConversation(messages=messages, facts=planted)
