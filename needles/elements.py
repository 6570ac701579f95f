"""The builders: each turns a recipe's element into drafted facts, the turns that state them, and probes.

A builder decides words and values; where they land is `plant`'s business. Events of one group keep their order.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from longrecall.needles.filler import Prose, Wording, fill, pick, shuffled, wordings
from longrecall.needles.languages import LANDMARKS, LANGUAGES
from longrecall.needles.recipes import Element, Recipe
from longrecall.needles.schema import Role
from longrecall.needles.values import Values, aliases
from longrecall.needles.vocabulary import ATTRIBUTES, NAMES, SUBJECTS, THINGS, split_words


class PlantError(ValueError):
    """The conversation cannot be made as asked; the message says what would be possible."""


@dataclass
class Statement:
    """A piece of a draft turn; `key` names the fact it states, `lead` parts it from the piece before."""

    text: str
    key: str | None = None
    lead: str = " "


@dataclass
class DraftTurn:
    role: Role
    parts: list[Statement]


Where = Literal["first", "any", "later"]


@dataclass
class Event:
    """Turns that stay together: a fact stated and acknowledged."""

    turns: list[DraftTurn]
    where: Where = "first"
    """Before the first rung's branch, anywhere on the ladder, or after the first branch."""
    probed: bool = True
    """False: a distractor."""
    tokens: int = 0


@dataclass
class DraftFact:
    key: str
    entity: str
    attribute: str
    value: str
    kind: str
    aliases: tuple[str, ...] = ()
    supersedes: str | None = None


@dataclass
class DraftProbe:
    kind: str
    question: str
    gold: str
    live: str | None
    needs: tuple[str, ...] = ()
    """Facts that must stand before the branch for the question to be fair."""
    absent: tuple[str, ...] = ()
    """Facts that must not stand there yet."""
    aliases: tuple[str, ...] = ()
    distractors: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    prefix: str = ""


@dataclass
class Script:
    """What a recipe wants in one conversation."""

    facts: list[DraftFact] = field(default_factory=list)
    groups: list[list[Event]] = field(default_factory=list)
    probes: list[DraftProbe] = field(default_factory=list)
    system: list[Statement] = field(default_factory=list)


NOTED = ("Noted.", "Okay.", "Understood.", "Got it.", "All right, noted.", "Thanks, noted.")
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_BOX_COLOURS = ("crimson", "turquoise", "orange", "purple", "beige", "navy", "lime", "maroon")
_UPDATES = (
    ("Correction: the {{ attribute }} of {{ name }} is now {{ value }}.", "Corrected: it is now {{ value }}."),
    ("The {{ attribute }} of {{ name }} has been changed to {{ value }}.", "Changed to {{ value }}, thank you."),
    ("There was a mix-up, the {{ attribute }} of {{ name }} is {{ value }} now.", "I see, {{ value }} it is."),
    ("From now on the {{ attribute }} of {{ name }} is {{ value }}.", "From now on {{ value }}, understood."),
)
_RETRACTIONS = (
    "Please forget the {{ attribute }} of {{ name }}; it was cancelled and there is no new one.",
    "The {{ attribute }} of {{ name }} is void. There is none at the moment.",
    "{{ name }} no longer has any {{ attribute }}, so strike it from the notes.",
)
_LOOK_UPS = ("Please look that up.", "Check the records, please.", "What does the register say?", "Look in the file.")
_LISTS = {
    "json": "Here is a list as JSON:",
    "table": "Here is a table:",
    "code": "Here is a piece of the configuration:",
}
_ROWS_PER_LIST = 4


class Draft:
    """One conversation's facts, events and probes while they are drafted."""

    def __init__(self, recipe: Recipe, values: Values, rng: random.Random, prose: Prose) -> None:
        self.script = Script()
        self.recipe, self.values, self.rng, self.prose = recipe, values, rng, prose
        self.wordings = wordings(recipe.split)
        self._taken: set[str] = set()
        self._names = shuffled(rng, split_words(NAMES, recipe.split))
        self._attributes = shuffled(rng, split_words(ATTRIBUTES, recipe.split))

    def name(self) -> str:
        """A person nobody was called in this conversation yet."""
        if not self._names:
            raise PlantError(
                f'recipe {self.recipe.name!r} needs more names than there are: plant less, or split = "all"'
            )
        return self._names.pop()

    def attribute(self) -> str:
        """An attribute not used in this conversation yet."""
        if not self._attributes:
            raise PlantError(
                f'recipe {self.recipe.name!r} needs more attributes than there are: plant less or split = "all"'
            )
        return self._attributes.pop()

    def others(self, choices: Sequence[str]) -> list[str]:
        """The places, boxes or subjects that no element of this conversation has taken, in their order."""
        return [choice for choice in choices if choice not in self._taken]

    def take(self, choices: Iterable[str]) -> None:
        """Keep these from the elements that follow: two of them about one thing would have two true answers."""
        self._taken.update(choices)

    def value(self, element: Element) -> str:
        """A new value of the element's kind."""
        return self.values.draw(self.rng, element.value, digits=element.digits)

    def fact(
        self, entity: str, attribute: str, value: str, kind: str, element: Element, *, supersedes: str | None = None
    ) -> DraftFact:
        """Register a fact."""
        made = DraftFact(
            key=f"f{len(self.script.facts)}",
            entity=entity,
            attribute=attribute,
            value=value,
            kind=kind,
            aliases=aliases(value, element.value) if value and element.kind != "verbatim" else (),
            supersedes=supersedes,
        )
        self.script.facts.append(made)
        return made

    def told(
        self,
        element: Element,
        parts: list[Statement],
        echo: Statement | None,
        *,
        probed: bool = True,
        where: Where | None = None,
    ) -> Event | None:
        """The turns that state something, by the element's role; None when it went into the system turn."""
        # Drawn even when the fact is echoed, so that echo modes share every other draw.
        noted = Statement(pick(self.rng, NOTED))
        look_up = pick(self.rng, _LOOK_UPS)
        reply = echo if echo is not None and element.echo == "value" and probed else noted
        if element.role == "system":
            self.script.system += parts
            return None
        if element.role == "assistant":
            turns = [DraftTurn("user", [Statement(look_up)]), DraftTurn("assistant", parts)]
        elif element.role == "tool":
            turns = [
                DraftTurn("user", [Statement(look_up)]),
                DraftTurn("assistant", [Statement("One moment.")]),
                DraftTurn("tool", parts),
                DraftTurn("assistant", [reply]),
            ]
        else:
            turns = [DraftTurn("user", parts), DraftTurn("assistant", [reply])]
        anywhere: Where = "any" if self.recipe.scope == "all" or not probed else "first"
        return Event(turns, where or anywhere, probed)

    def state(self, fact: DraftFact, element: Element, wording: Wording, *, probed: bool = True) -> Event | None:
        """A fact stated in one of the wordings."""
        slots = {"name": fact.entity, "attribute": fact.attribute, "value": fact.value}
        statement = fill(wording.statement, **slots)
        if statement.startswith(fact.attribute):
            statement = statement[0].upper() + statement[1:]
        return self.told(
            element, [Statement(statement, fact.key)], Statement(fill(wording.echo, **slots), fact.key), probed=probed
        )

    def group(self, *events: Event | None) -> None:
        """Keep events in this order."""
        kept = [event for event in events if event is not None]
        if kept:
            self.script.groups.append(kept)

    def distract(self, element: Element, own: list[DraftFact], attributes: list[str]) -> list[DraftFact]:
        """Distractors: every other one about the same people under another attribute, else of other people."""
        out = []
        other = self.attribute() if element.distractors and own else ""
        for place in range(element.distractors):
            about_same = place % 2 == 0 and place // 2 < len(own)
            value = (
                self.values.look_alike(
                    self.rng, own[place % len(own)].value, distance=element.look_alike, kind=element.value
                )
                if element.look_alike and own
                else self.value(element)
            )
            entity = own[place // 2].entity if about_same else self.name()
            attribute = other if about_same else attributes[place % len(attributes)]
            fact = self.fact(entity, attribute, value, "distractor", element)
            self.group(self.state(fact, element, pick(self.rng, self.wordings), probed=False))
            out.append(fact)
        return out

    def ask(
        self,
        fact: DraftFact,
        kind: str,
        *,
        question: str | None = None,
        prefix: str | None = None,
        others: list[DraftFact] | None = None,
        needs: tuple[str, ...] = (),
        absent: tuple[str, ...] = (),
        stale: tuple[str, ...] = (),
    ) -> None:
        """A probe whose answer is the fact's value."""
        wrong = tuple(f.value for f in others or [] if f.value and f.key != fact.key and f.value not in stale)
        self.script.probes.append(
            DraftProbe(
                kind=kind,
                question=question or f"What is the {fact.attribute} of {fact.entity}?",
                gold=fact.value,
                live=fact.key,
                needs=(fact.key, *needs),
                absent=absent,
                aliases=fact.aliases,
                distractors=wrong,
                stale=stale,
                prefix=(prefix or f"The {fact.attribute} of {fact.entity} is") if self.recipe.answer_prefix else "",
            )
        )


def _keys(draft: Draft, element: Element) -> None:
    if element.form == "script":
        _scripts(draft, element)
        return
    attributes = [draft.attribute() for _ in range(element.attributes)]
    own = [
        draft.fact(draft.name(), attributes[place % len(attributes)], draft.value(element), "keys", element)
        for place in range(element.count)
    ]
    if element.form == "sentence":
        for fact in own:
            draft.group(draft.state(fact, element, pick(draft.rng, draft.wordings)))
    else:
        for first in range(0, len(own), _ROWS_PER_LIST):
            _listed(draft, element, own[first : first + _ROWS_PER_LIST])
    extra = draft.distract(element, own, attributes)
    for fact in own[: element.probes]:
        draft.ask(fact, "keys", others=[*own, *extra])


def _listed(draft: Draft, element: Element, own: list[DraftFact]) -> None:
    """Several facts as rows of one JSON, Markdown or code block."""
    lines: list[Statement] = []
    if element.form == "json":
        lines.append(Statement("```json\n[", None, "\n"))
        for place, fact in enumerate(own):
            comma = "," if place < len(own) - 1 else ""
            row = f'{{"name": "{fact.entity}", "{fact.attribute}": "{fact.value}"}}{comma}'
            lines.append(Statement(row, fact.key, "\n"))
        lines.append(Statement("]\n```", None, "\n"))
    elif element.form == "table":
        several = len({fact.attribute for fact in own}) > 1  # then each row says which
        head = "| name | item | value |\n|---|---|---|" if several else f"| name | {own[0].attribute} |\n|---|---|"
        lines.append(Statement(head, None, "\n\n"))
        for fact in own:
            item = f"{fact.attribute} | " if several else ""
            lines.append(Statement(f"| {fact.entity} | {item}{fact.value} |", fact.key, "\n"))
    else:
        lines.append(Statement("```python", None, "\n"))
        for fact in own:
            table = fact.attribute.replace(" ", "_")
            lines.append(Statement(f'{table}["{fact.entity}"] = "{fact.value}"', fact.key, "\n"))
        lines.append(Statement("```", None, "\n"))
    draft.group(draft.told(element, [Statement(_LISTS[element.form]), *lines], None))


def _scripts(draft: Draft, element: Element) -> None:
    own: list[DraftFact] = []
    made = []
    pairs = [(language, name) for language in LANGUAGES for name in language.names]
    if element.count > len(pairs):
        raise PlantError(f"at most {len(pairs)} facts can be stated in other scripts, not {element.count}")
    for language, name in shuffled(draft.rng, pairs)[: element.count]:
        fact = draft.fact(name, language.attribute, draft.value(element), "keys", element)
        own.append(fact)
        made.append((fact, language))
        draft.group(
            draft.told(
                element,
                [Statement(language.statement.format(name=name, value=fact.value), fact.key)],
                Statement(language.echo.format(name=name, value=fact.value), fact.key),
            )
        )
    extra = draft.distract(element, own, [draft.attribute()])
    for fact, language in made[: element.probes]:
        draft.ask(
            fact,
            "keys",
            question=language.question.format(name=fact.entity),
            prefix=language.prefix.format(name=fact.entity),
            others=[*own, *extra],
        )


def _values(draft: Draft, element: Element) -> None:
    attribute, name = draft.attribute(), draft.name()
    days = shuffled(draft.rng, _WEEKDAYS)
    own = []
    for place in range(element.count):
        day = days[place]
        fact = draft.fact(f"{name} for {day}", attribute, draft.value(element), "values", element)
        own.append(fact)
        # "Ada for Monday's code" is no English: only wordings that say "of {name} is".
        plain = [wording for wording in draft.wordings if "of {{ name }} is {{ value }}" in wording.statement]
        draft.group(draft.state(fact, element, pick(draft.rng, plain)))
    extra = draft.distract(element, own, [attribute])
    for fact in own[: element.probes]:
        draft.ask(fact, "values", others=[*own, *extra])


def _hops(draft: Draft, element: Element) -> None:
    attribute = draft.attribute()
    chains = []
    for _ in range(element.count):
        people = [draft.name() for _ in range(element.length + 1)]
        end = draft.fact(people[-1], attribute, draft.value(element), "hops", element)
        links = []
        for left, right in pairwise(people):
            # A link states no value of its own.
            link = draft.fact(left, attribute, "", "link", element)
            links.append(link)
            sentence = f"The {attribute} of {left} is the same as that of {right}."
            draft.group(draft.told(element, [Statement(sentence, link.key)], None))
        draft.group(draft.state(end, element, pick(draft.rng, draft.wordings)))
        chains.append((people[0], end, links))
    ends = [end for _, end, _ in chains]
    extra = draft.distract(element, ends, [attribute])
    for start, end, links in chains[: element.probes]:
        draft.ask(
            end,
            "hops",
            question=f"What is the {attribute} of {start}?",
            prefix=f"The {attribute} of {start} is",
            others=[*ends, *extra],
            needs=tuple(link.key for link in links),
        )


def _update(draft: Draft, element: Element) -> None:
    attribute = draft.attribute()
    chains: list[list[DraftFact]] = []
    for _ in range(element.count):
        name = draft.name()
        versions = [draft.fact(name, attribute, draft.value(element), "update", element)]
        events = [draft.state(versions[0], element, pick(draft.rng, draft.wordings))]
        for _ in range(element.length):
            fact = draft.fact(name, attribute, draft.value(element), "update", element, supersedes=versions[-1].key)
            statement, echo = pick(draft.rng, _UPDATES)
            slots = {"name": name, "attribute": attribute, "value": fact.value}
            events.append(
                draft.told(
                    element, [Statement(fill(statement, **slots), fact.key)], Statement(fill(echo, **slots), fact.key)
                )
            )
            versions.append(fact)
        draft.group(*events)
        chains.append(versions)
    newest = [versions[-1] for versions in chains]
    extra = draft.distract(element, newest, [attribute])
    everything = [fact for versions in chains for fact in versions] + extra
    for versions in chains[: element.probes]:
        # One probe per version: it is fair from the turn that states it until the next one replaces it.
        for place, fact in enumerate(versions):
            if place < len(versions) - 1 and draft.recipe.scope == "first":
                continue
            draft.ask(
                fact,
                "update",
                others=everything,
                absent=tuple(later.key for later in versions[place + 1 : place + 2]),
                stale=tuple(older.value for older in versions[:place]),
            )


def _retraction(draft: Draft, element: Element) -> None:
    attribute = draft.attribute()
    own = []
    for _ in range(element.count):
        fact = draft.fact(draft.name(), attribute, draft.value(element), "retraction", element)
        # The withdrawal supersedes the value and states none of its own.
        void = draft.fact(fact.entity, attribute, "", "void", element, supersedes=fact.key)
        sentence = fill(pick(draft.rng, _RETRACTIONS), name=fact.entity, attribute=attribute)
        draft.group(
            draft.state(fact, element, pick(draft.rng, draft.wordings)),
            draft.told(element, [Statement(sentence, void.key)], None),
        )
        own.append((fact, void))
    draft.distract(element, [fact for fact, _ in own], [attribute])
    for fact, void in own[: element.probes]:
        draft.script.probes.append(
            DraftProbe(
                kind="abstain-retracted",
                question=f"What is the {attribute} of {fact.entity}?",
                gold="",
                live=None,
                needs=(fact.key, void.key),
                stale=(fact.value,),
                distractors=tuple(other.value for other, _ in own if other is not fact),
                prefix="",
            )
        )


def _latent(draft: Draft, element: Element) -> None:
    cities = dict(shuffled(draft.rng, LANDMARKS))
    places = draft.others(list(cities))
    wanted = element.count + element.distractors
    if wanted > len(places):
        raise PlantError(
            f"kind latent has {len(LANDMARKS)} places a conversation; {wanted} were asked of {len(places)}"
        )
    draft.take(places[:wanted])
    own = []
    for place in range(wanted):
        landmark = places[place]
        city = cities[landmark]
        probed = place < element.count
        fact = draft.fact(
            draft.name(), f"home near {landmark}", draft.value(element), "latent" if probed else "distractor", element
        )
        statement = f"{fact.entity} wakes up to a view of {landmark}, and the keypad downstairs takes {fact.value}."
        echo = f"A view of {landmark}, how nice. Keypad {fact.value}, noted for {fact.entity}."
        draft.group(draft.told(element, [Statement(statement, fact.key)], Statement(echo, fact.key), probed=probed))
        own.append((fact, city))
    for fact, city in own[: element.count][: element.probes]:
        draft.ask(
            fact,
            "latent",
            question=f"Which code opens the front door for somebody living in {city}?",
            prefix=f"Somebody living in {city} opens the front door with the code",
            others=[other for other, _ in own],
        )


def _ordinal(draft: Draft, element: Element) -> None:
    subjects = draft.others(shuffled(draft.rng, split_words(SUBJECTS, draft.recipe.split)))
    if len(subjects) < 2:
        raise PlantError("kind ordinal has no subjects left: fewer such elements in a conversation")
    draft.take(subjects[:2])
    if element.count > len(_ORDINALS):
        raise PlantError(f"kind ordinal counts to {len(_ORDINALS)}; {element.count} alike notes were asked for")

    def note(subject: str, place: int, probed: bool) -> tuple[DraftFact, Event | None]:
        fact = draft.fact(
            f"{_ORDINALS[place]} note about {subject}",
            "reference",
            draft.value(element),
            "ordinal" if probed else "distractor",
            element,
        )
        request = f"Write a short note about {subject} and give it a reference."
        text = draft.prose.paragraph(draft.rng, 2)
        turns = [
            DraftTurn("user", [Statement(request)]),
            DraftTurn(
                "assistant", [Statement(text), Statement(f"The reference of this note is {fact.value}.", fact.key)]
            ),
        ]
        return fact, Event(turns, "any" if draft.recipe.scope == "all" or not probed else "first", probed)

    asked, other = subjects[0], subjects[1]
    notes = [note(asked, place, True) for place in range(element.count)]
    draft.group(*(event for _, event in notes))
    extra = [note(other, place, False) for place in range(min(element.distractors, len(_ORDINALS)))]
    draft.group(*(event for _, event in extra))
    everything = [fact for fact, _ in (*notes, *extra)]
    for place, (fact, _) in enumerate(notes[: element.probes]):
        draft.ask(
            fact,
            "ordinal",
            question=f"What is the reference of the {_ORDINALS[place]} note about {asked}?",
            prefix=f"The reference of the {_ORDINALS[place]} note about {asked} is",
            others=everything,
            needs=tuple(before.key for before, _ in notes[:place]),
        )


def _order(draft: Draft, element: Element) -> None:
    attribute = draft.attribute()
    own = [draft.fact(draft.name(), attribute, draft.value(element), "order", element) for _ in range(element.count)]
    draft.group(*(draft.state(fact, element, pick(draft.rng, draft.wordings)) for fact in own))
    # Distractors must not come between: they are about another attribute.
    other = draft.attribute()
    extra = []
    for place in range(element.distractors):
        fact = draft.fact(
            own[place % len(own)].entity,
            other if place < len(own) else draft.attribute(),
            draft.value(element),
            "distractor",
            element,
        )
        draft.group(draft.state(fact, element, pick(draft.rng, draft.wordings), probed=False))
        extra.append(fact)
    for before, fact in list(pairwise(own))[: element.probes]:
        draft.ask(
            fact,
            "order",
            question=f"I gave you several of them. Which {attribute} came right after the one of {before.entity}?",
            prefix=f"Right after the one of {before.entity} came the {attribute}",
            others=[*own, *extra],
            needs=(before.key,),
        )


def _count(draft: Draft, element: Element) -> None:
    things = shuffled(draft.rng, split_words(THINGS, draft.recipe.split))
    boxes = draft.others(shuffled(draft.rng, _BOX_COLOURS))
    if len(boxes) < 2:
        raise PlantError(f"kind count has {len(_BOX_COLOURS)} boxes, two for each such element: fewer of them, please")
    draft.take(boxes[:2])
    number = max(2, element.count - 3 + int(draft.rng.random() * 7))
    if number + element.distractors > min(len(things), len(_NUMBER_WORDS) - 1):
        raise PlantError(f"kind count can count to {len(_NUMBER_WORDS) - 5}; about {element.count} were asked for")

    def put(thing: str, box: str, probed: bool) -> DraftFact:
        # An item has no value of its own.
        fact = draft.fact(thing, f"put in the {box} box", "", "item", element)
        sentence = f"I have put a {thing} in the {box} box.".replace(" a u", " an u").replace(" a o", " an o")
        where: Where | None = None if probed else "any"
        draft.group(draft.told(element, [Statement(sentence, fact.key)], None, where=where))
        return fact

    own = [put(thing, boxes[0], True) for thing in things[:number]]
    for thing in things[number : number + element.distractors]:
        put(thing, boxes[1], False)
    keys = tuple(fact.key for fact in own)
    draft.script.probes.append(
        DraftProbe(
            kind="count",
            question=f"How many things have I put in the {boxes[0]} box? Answer with the number alone.",
            gold=str(number),
            live=None,
            needs=keys,
            aliases=(_NUMBER_WORDS[number],),
            prefix="The number of things in that box is" if draft.recipe.answer_prefix else "",
        )
    )


def _abstain(draft: Draft, element: Element) -> None:
    """Questions about people whose attribute was never given, while it was given for others."""
    attribute = draft.attribute()
    told = draft.distract(element, [], [attribute]) if element.distractors else []
    for _ in range(element.count):
        draft.script.probes.append(
            DraftProbe(
                kind="abstain",
                question=f"What is the {attribute} of {draft.name()}?",
                gold="",
                live=None,
                distractors=tuple(fact.value for fact in told),
            )
        )


def _late(draft: Draft, element: Element) -> None:
    attribute = draft.attribute()
    own = []
    for _ in range(element.count):
        fact = draft.fact(draft.name(), attribute, draft.value(element), "late", element)
        event = draft.state(fact, element, pick(draft.rng, draft.wordings))
        if event is not None:
            event.where = "later"
        draft.group(event)
        own.append(fact)
    extra = draft.distract(element, own, [attribute])
    for fact in own[: element.probes]:
        draft.ask(fact, "keys", others=[*own, *extra])
        draft.script.probes.append(
            DraftProbe(
                kind="abstain-early",
                question=f"What is the {attribute} of {fact.entity}?",
                gold="",
                live=None,
                absent=(fact.key,),
                distractors=tuple(other.value for other in (*own, *extra) if other is not fact),
            )
        )


def _verbatim(draft: Draft, element: Element) -> None:
    own = []
    for place in range(element.count + element.distractors):
        title = draft.values.draw(draft.rng, "word")
        words = 0
        sentences = []
        while words < element.tokens / 1.3:
            sentences.append(draft.prose.sentence(draft.rng))
            words += len(sentences[-1].split())
        passage = " ".join(sentences)
        draft.values.claim(passage)
        probed = place < element.count
        fact = draft.fact(title, "text", passage, "verbatim" if probed else "distractor", element)
        parts = [Statement(f"Here is the text called {title}:"), Statement(passage, fact.key)]
        draft.group(draft.told(element, parts, None, probed=probed))
        own.append(fact)
    for fact in own[: element.count][: element.probes]:
        draft.ask(
            fact,
            "verbatim",
            question=f"Repeat the text called {fact.entity} word for word.",
            prefix=f"The text called {fact.entity} reads:",
            others=own,
        )


BUILDERS: dict[str, Callable[[Draft, Element], None]] = {
    "keys": _keys,
    "values": _values,
    "hops": _hops,
    "update": _update,
    "retraction": _retraction,
    "latent": _latent,
    "ordinal": _ordinal,
    "order": _order,
    "count": _count,
    "abstain": _abstain,
    "late": _late,
    "verbatim": _verbatim,
}


def draft_script(recipe: Recipe, values: Values, rng: random.Random, prose: Prose) -> Script:
    """Facts, events and probes of one conversation."""
    values.next_conversation()
    draft = Draft(recipe, values, rng, prose)
    for element in recipe.elements:
        BUILDERS[element.kind](draft, element)
    return draft.script
