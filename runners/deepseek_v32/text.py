"""Text of a closed world: its tokenizer, its chat template, and conversations with planted facts to train on.

    write_tokenizer(folder)                              # tokenizer.json, tokenizer_config.json, chat_template.jinja
    batch = Texts().batch(Shape(length=1024, probes=14, facts=(6, 20)), 128, random.Random(0))

Every word of needles/'s built-in prose, names, attributes and wordings is one token with its leading space; a number
is read three digits at a time, so that a planted value of five digits is two tokens (" 482", "13"). Conversations
follow the shape of the recipe `keys`: facts stated and echoed, requests answered with prose, questions answered with
the value. They differ from a campaign's in names, values, order and sentences, not in words: the world is closed.
"""

import json
import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longrecall.needles.elements import NOTED
from longrecall.needles.filler import QUESTIONS, WORDINGS, Prose, fill, pick
from longrecall.needles.haystack import CLOSERS, PADS, SHORT_ASKS
from longrecall.needles.vocabulary import ASKS, ATTRIBUTES, NAMES, OPENERS, SENTENCES, WORDS

PAD, BOS, END, UNKNOWN = range(4)
SPECIALS = ("<pad>", "<bos>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
USER, ASSISTANT = SPECIALS.index("<|user|>"), SPECIALS.index("<|assistant|>")
PIECE = r"'s| ?[A-Za-z]+| ?[0-9]{1,3}| ?[^A-Za-z0-9\s]|\s"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|> {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SLOT = re.compile(r"\{\{\s*\w+\s*\}\}")
_PIECE = re.compile(PIECE)
ANSWER_WEIGHT, VALUE_WEIGHT, OTHER_WEIGHT = 60, 4, 1
"""Of the loss: tokens of a value that was said before, and all others."""


def pieces(text: str) -> list[str]:
    """The tokens of a text, as the tokenizer cuts it."""
    return _PIECE.findall(text)


def vocabulary() -> list[str]:
    """All tokens, in a fixed order: control tokens, digits, punctuation, words."""
    numbers = [str(digit) for digit in range(10)] + [f"{number:02d}" for number in range(100)]
    numbers += [f" {number}" for number in range(1000)]
    texts = [*SENTENCES, *ASKS, *OPENERS, *PADS, *CLOSERS, *SHORT_ASKS, *NOTED, *ATTRIBUTES, *NAMES]
    texts += [text for wording in WORDINGS for text in (wording.statement, wording.echo)]
    texts += [text for pair in QUESTIONS for text in pair]
    for words in WORDS.values():
        texts += words
    found = {" an", " An", ".", ",", "?", "!", ":", ";", "-", "'", "'s", '"', " (", ")", "\n", " "}
    for text in texts:
        for part in _SLOT.split(text):
            found.update(" " + word for word in re.findall(r"[A-Za-z]+", part))
            found.update(re.findall(r"[^A-Za-z0-9\s]", part))
    # A sentence may begin with a word that the list has in lower case.
    found |= {word[0] + word[1].upper() + word[2:] for word in found if len(word) > 1 and word[0] == " "}
    return [*SPECIALS, *numbers, *sorted(found)]


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer as `tokenizers` and transformers load it."""
    import tokenizers
    from tokenizers import Regex, decoders, models, pre_tokenizers

    vocab = {token: number for number, token in enumerate(vocabulary())}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<|end|>",
        "pad_token": "<pad>", "unk_token": "<unk>", "add_bos_token": False, "model_max_length": 65536,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Token rows and the weight of each as a target; a question's answer is marked in `answers`."""

    ids: npt.NDArray[np.uint16]
    """[B, S]."""
    weights: npt.NDArray[np.uint8]
    """[B, S]: loss weight of predicting ids[b, s] from what is before it; 0 for the beginning."""
    answers: npt.NDArray[np.uint8]
    """[B, S]: 1 at the tokens of the values that answer questions, of the first such token 2."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What training conversations of one phase hold."""

    length: int
    probes: int
    """Questions at the end."""
    facts: tuple[int, int]
    """Least and most facts."""
    interleaved: float = 0.5
    """Share of conversations whose questions lie among the facts; in the others they follow everything."""


class Texts:
    """Pre-tokenised pieces, put together at random."""

    def __init__(self, sentences: int = 20_000, seed: int = 0) -> None:
        self.index = {token: number for number, token in enumerate(vocabulary())}
        rng, prose = random.Random(f"pool:{seed}"), Prose("all")
        self.sentences = [self.encode(prose.sentence(rng)) for _ in range(sentences)]
        self.requests = [self.encode(prose.ask(rng)) for _ in range(2_000)] + [self.encode(t) for t in SHORT_ASKS]
        self.openers = [self.encode(text) for text in prose.openers]
        self.pads = [self.encode(text) for text in PADS]
        self.closers = [self.encode(text) for text in CLOSERS]
        self.noted = [self.encode(text) for text in NOTED]
        self.names = [self.encode(name) for name in NAMES]
        self.attributes = [self.encode(text) for text in ATTRIBUTES]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that follows a space; a word that is not of this world is an error."""
        found = []
        for piece in pieces(" " + text):
            if piece not in self.index:
                raise ValueError(f"{text!r}: {piece!r} is no token of the closed vocabulary")
            found.append(self.index[piece])
        return found

    @cached_property
    def wordings(self) -> list[tuple[list[int | str], list[int | str]]]:
        """Statement and echo of each wording, with the slots "name", "attribute", "Attribute" and "value"."""
        return [(self._slotted(w.statement), self._slotted(w.echo)) for w in WORDINGS]

    @cached_property
    def questions(self) -> list[tuple[list[int | str], list[int | str]]]:
        """Question and begun answer; the first is a campaign's own and stands three times."""
        pairs = [QUESTIONS[0]] * 3 + list(QUESTIONS[1:])
        return [(self._slotted(question), self._slotted(prefix)) for question, prefix in pairs]

    def _slotted(self, template: str) -> list[int | str]:
        out: list[int | str] = []
        marks = {"name": "Qname", "attribute": "Qattribute", "value": "Qvalue"}
        text = " " + fill(template, **marks)
        for piece in pieces(text):
            if piece.strip() in marks.values():
                slot = piece.strip()[1:]
                out.append("Attribute" if slot == "attribute" and not out else slot)
            else:
                out.append(self.index[piece])
        return out

    @cached_property
    def _tokens(self) -> list[str]:
        return list(self.index)

    def capital(self, attribute: list[int]) -> list[int]:
        """An attribute as it begins a sentence."""
        first = self._tokens[attribute[0]]
        return [self.index[" " + first[1].upper() + first[2:]], *attribute[1:]]

    def value(self, rng: random.Random) -> list[int]:
        number = 10_000 + int(rng.random() * 90_000)
        return [self.index[f" {number // 100}"], self.index[f"{number % 100:02d}"]]

    def batch(self, shape: Shape, rows: int, rng: random.Random) -> Batch:
        """`rows` conversations of exactly `shape.length` tokens."""
        ids = np.zeros((rows, shape.length), dtype=np.uint16)
        weights = np.zeros((rows, shape.length), dtype=np.uint8)
        answers = np.zeros((rows, shape.length), dtype=np.uint8)
        for row in range(rows):
            draft = _Draft(self, shape, rng)
            draft.write()
            ids[row], weights[row], answers[row] = draft.ids, draft.weights, draft.answers
        return Batch(ids=ids, weights=weights, answers=answers)


class _Draft:
    """One conversation being written."""

    def __init__(self, texts: Texts, shape: Shape, rng: random.Random) -> None:
        self.texts, self.shape, self.rng = texts, shape, rng
        self.ids: list[int] = [BOS]
        self.weights: list[int] = [0]
        self.answers: list[int] = [0]

    def put(self, ids: list[int], weight: int = OTHER_WEIGHT) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.answers += [0] * len(ids)

    def fill_in(self, slotted: list[int | str], fact: "_Fact", *, known: bool) -> None:
        for part in slotted:
            if isinstance(part, int):
                self.put([part])
            elif part == "value":
                self.put(fact.value, VALUE_WEIGHT if known else 0)
            elif part == "name":
                self.put(fact.name)
            else:
                self.put(fact.attribute if part == "attribute" else fact.capital)

    def turn(self, role: int, ids: list[int]) -> None:
        self.put([role, *ids, END])

    def state(self, fact: "_Fact") -> None:
        texts, rng = self.texts, self.rng
        statement, echo = pick(rng, texts.wordings)
        self.put([USER])
        self.fill_in(statement, fact, known=False)
        self.put([END, ASSISTANT])
        if rng.random() < 0.6:
            self.fill_in(echo, fact, known=True)
            self.put([END])
        else:
            self.put([*pick(rng, texts.noted), END])

    def ask(self, fact: "_Fact") -> None:
        texts, rng = self.texts, self.rng
        question, prefix = pick(rng, texts.questions)
        self.put([USER])
        while rng.random() < 0.4:
            self.put(pick(rng, texts.pads))
        self.fill_in(question, fact, known=True)
        self.put([END, ASSISTANT])
        self.fill_in(prefix, fact, known=True)
        at = len(self.ids)
        self.put(fact.value, ANSWER_WEIGHT)
        self.answers[at], self.answers[at + 1] = 2, 1
        self.put([texts.index["."], END])

    def prose(self, room: int) -> None:
        """One request and a reply of at most `room` tokens."""
        texts, rng = self.texts, self.rng
        self.turn(USER, pick(rng, texts.requests))
        reply = list(pick(rng, texts.openers))
        wanted = min(40 + int(rng.random() * 120), room)
        while len(reply) < wanted:
            reply += pick(rng, texts.sentences)
        if rng.random() < 0.2:
            reply += pick(rng, texts.closers)
        self.turn(ASSISTANT, reply)

    def write(self) -> None:
        shape, rng = self.shape, self.rng
        low, high = shape.facts
        facts = self._facts(low + int(rng.random() * (high - low + 1)))
        tail = shape.probes * 24
        # Facts lie over a share of the room before the questions, so that some are far from every question.
        room = max(shape.length - tail, 0)
        spread = room * (0.15 + 0.85 * rng.random())
        mixed = rng.random() < shape.interleaved
        places = sorted(rng.random() * spread for _ in facts)
        said: list[_Fact] = []
        for fact, place in zip(facts, places, strict=True):
            while len(self.ids) < place:
                if mixed and said and rng.random() < 0.5:
                    self.ask(pick(rng, said))
                else:
                    self.prose(int(place - len(self.ids)) + 20)
            self.state(fact)
            said.append(fact)
        while len(self.ids) < room:
            if mixed and rng.random() < 0.3:
                self.ask(pick(rng, said))
            else:
                self.prose(room - len(self.ids))
        while len(self.ids) < shape.length:
            self.ask(pick(rng, said))
        for part in (self.ids, self.weights, self.answers):
            del part[shape.length :]
        if self.answers[-1] == 2:  # its second token was cut off
            self.answers[-1] = 0

    def _facts(self, count: int) -> list["_Fact"]:
        texts, rng = self.texts, self.rng
        kinds = [pick(rng, texts.attributes) for _ in range(1 if rng.random() < 0.7 else 2)]
        names = rng.sample(texts.names, count)
        return [_Fact(self, name, pick(rng, kinds), texts.value(rng)) for name in names]


class _Fact:
    def __init__(self, draft: _Draft, name: list[int], attribute: list[int], value: list[int]) -> None:
        self.name, self.attribute, self.value = name, attribute, value
        self.capital = draft.texts.capital(attribute)
