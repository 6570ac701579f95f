"""Filler whose tokens are counted once: a pool of sentences, and text of exactly n tokens made by adding counts.

The pool is the built-in prose or the user's own text (`own_sentences`), cleaned so that no sentence can contain,
contradict or overwrite a planted value: none holds a digit, a person's name, an attribute, a value word or a control
token's text. A conversation walks through the pool in an order of its own and repeats no sentence before all were used.
"""

import math
import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longrecall.needles.filler import Prose, pick
from longrecall.needles.languages import LANDMARKS
from longrecall.needles.recipes import Filler
from longrecall.needles.render import Meter, Ruler
from longrecall.needles.values import value_words
from longrecall.needles.vocabulary import ATTRIBUTES, NAMES


class FillerError(ValueError):
    """The filler is too short or unusable; the message says how much is needed."""


class Piece(NamedTuple):
    """A sentence with the space that leads to it."""

    text: str
    tokens: int
    body_tokens: int
    """Tokens of all but the last chunk."""
    last: str
    """The last chunk, whose tokens depend on what follows."""


PADS = (
    "Thanks.|Right.|Good.|Fine.|Okay.|Well then.|Very good.|Thank you.|That helps.|Good to know.|All clear so far.|"
    "Now to something else.|One more thing.|Let me check something.|I have one question.|Let us go back a little.|"
    "I would like to ask you something.|Now I need one of the earlier details.|"
    "There is something from before that I need again.|Before we go on, I would like to look something up."
).split("|")
"""What a person says before a question; combinations of these bring a prompt to the exact length."""
CLOSERS = (
    "Gladly.|Indeed.|Always.|There you go.|That is all.|Ask away.|Shall I go on?|I hope this helps.|So much for that.|"
    "Tell me when to stop.|There is more where that came from.|Let me know what you would like next.|"
    "I could say more about it at another time.|Just tell me if you would rather hear about something else."
).split("|")
"""What an assistant ends a reply with; combinations of these bring a reply to the exact length."""
SHORT_ASKS = ("Thanks.", "All right.", "Good.", "Understood.", "Very well.")

_FINE_MAX = 64
"""Phrases alone make up to this many tokens; longer pads begin with filler sentences."""
_BLOCK = 8
"""Sentences that stay neighbours in every conversation: the user's own text keeps some coherence."""
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+")


class Phrases:
    """Short phrases of which any number of tokens from 2 on can be made."""

    def __init__(self, ruler: Ruler, texts: Sequence[str]) -> None:
        self.pieces = sorted((piece_of(ruler, text) for text in texts), key=lambda piece: -piece.tokens)
        self._sums = [True] + [False] * _FINE_MAX
        for total in range(1, _FINE_MAX + 1):
            self._sums[total] = any(total >= piece.tokens and self._sums[total - piece.tokens] for piece in self.pieces)

    def reachable(self, tokens: int) -> bool:
        """Whether some phrases add up to exactly so many tokens."""
        return 0 <= tokens <= _FINE_MAX and self._sums[tokens]

    def make(self, rng: random.Random, tokens: int) -> list[Piece]:
        """Phrases that add up to exactly `tokens`, which must be reachable."""
        out: list[Piece] = []
        while tokens > 0:
            fitting = [piece for piece in self.pieces if self.reachable(tokens - piece.tokens)]
            fresh = [piece for piece in fitting if piece not in out]
            piece = pick(rng, (fresh or fitting)[:4])  # the longest few: not a string of single words
            out.append(piece)
            tokens -= piece.tokens
        return out


def piece_of(ruler: Ruler, text: str) -> Piece:
    """A sentence counted as it stands within a text."""
    chunks = ruler.chunks(" " + text)
    body = sum(map(ruler.count_chunk, chunks[:-1]))
    return Piece(" " + text, body + ruler.count_chunk(chunks[-1]), body, chunks[-1])


class Walk:
    """One conversation's way through the pool."""

    def __init__(self, pieces: Sequence[Piece], rng: random.Random) -> None:
        self._pieces = pieces
        self._blocks = max(1, len(pieces) // _BLOCK)
        self._stride = 1 + int(rng.random() * self._blocks)
        while math.gcd(self._stride, self._blocks) != 1:
            self._stride += 1
        self._start = int(rng.random() * self._blocks)
        self._at = self._first = 0

    def next(self) -> Piece:
        """The next sentence."""
        inside = self._at & (_BLOCK - 1)
        if inside == 0:
            self._first = ((self._start + self._at // _BLOCK * self._stride) % self._blocks) * _BLOCK
        self._at += 1
        return self._pieces[self._first + inside]

    def take(self, tokens: int) -> list[Piece]:
        """The next sentences, as many as fit; the one that did not fit is passed over."""
        out: list[Piece] = []
        pieces, at, first = self._pieces, self._at, self._first
        while True:  # `next` inlined: most of a long conversation's time is spent here
            inside = at & (_BLOCK - 1)
            if inside == 0:
                first = ((self._start + at // _BLOCK * self._stride) % self._blocks) * _BLOCK
            at += 1
            piece = pieces[first + inside]
            tokens -= piece[1]
            if tokens < 0:
                self._at, self._first = at, first
                return out
            out.append(piece)


class Haystack:
    """Counted sentences, requests and openers of one split, or of the user's own text."""

    def __init__(
        self,
        ruler: Ruler,
        prose: Prose,
        seed: str,
        *,
        sentences: int = 10_240,
        own: Iterable[str] | None = None,
    ) -> None:
        self.ruler = ruler
        self.prose = prose
        rng = random.Random(f"haystack:{seed}")
        texts = list(own) if own is not None else [prose.sentence(rng) for _ in range(sentences)]
        self.pieces = [piece_of(ruler, text) for text in texts if ruler.joins(text)]
        if len(self.pieces) < _BLOCK:
            raise FillerError(f"the filler holds {len(self.pieces)} usable sentences; at least {_BLOCK} are needed")
        self.tokens = sum(piece.tokens for piece in self.pieces)
        self.asks = [prose.ask(rng) for _ in range(512)]
        self.by_tokens: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            self.by_tokens.setdefault(piece.tokens, []).append(piece)
        self.shortest, self.longest = min(self.by_tokens), max(self.by_tokens)
        self.pads = Phrases(ruler, PADS)
        self.closers = Phrases(ruler, CLOSERS)

    def exactly(self, rng: random.Random, walk: Walk, tokens: int) -> list[Piece] | None:
        """Sentences, then closing phrases if need be, of exactly `tokens` tokens; None when nothing adds up."""
        out: list[Piece] = []
        misses = 0
        while tokens > _FINE_MAX or (tokens >= self.shortest and tokens not in self.by_tokens and misses < 4):
            piece = walk.next()
            rest = tokens - piece.tokens
            if rest == 0 or rest > _FINE_MAX or rest in self.by_tokens or self.closers.reachable(rest):
                out.append(piece)
                tokens = rest
            else:
                misses += 1
                if misses > 256:
                    return None
        if tokens in self.by_tokens:
            out.append(pick(rng, self.by_tokens[tokens]))
        elif self.closers.reachable(tokens):
            out += self.closers.make(rng, tokens)
        else:
            return None
        return out

    def pad(self, rng: random.Random, tokens: int) -> str | None:
        """What a person says before a question, in exactly `tokens` tokens; None when nothing adds up."""
        out: list[Piece] = []
        while tokens > _FINE_MAX:
            piece = pick(rng, self.pieces)
            if piece.tokens > tokens - 2:
                return None
            out.append(piece)
            tokens -= piece.tokens
        if not self.pads.reachable(tokens):
            return None
        return "".join(piece.text for piece in [*out, *self.pads.make(rng, tokens)]).strip()


def say(meter: Meter, pieces: Sequence[Piece]) -> str:
    """Append sentences to an open turn that already has content; returns their text."""
    if not pieces:
        return ""
    _, tokens, body_tokens, last = pieces[-1]
    meter.counted(sum([piece[1] for piece in pieces]) - tokens + body_tokens, last)
    return "".join([piece[0] for piece in pieces])


def own_sentences(filler: Filler, ruler: Ruler) -> list[str]:
    """Cleaned sentences of the user's text, in order."""
    import datasets

    try:
        rows = datasets.load_dataset(
            filler.path, filler.name, data_files=filler.data_files, split=filler.split, streaming=True
        )
        forbidden = _forbidden(ruler)
        out: list[str] = []
        seen = 0
        for row in rows:
            if filler.column not in row:
                raise FillerError(
                    f"the filler {filler.path!r} has no column {filler.column!r}; its columns are {', '.join(row)}"
                )
            for sentence in sentences_of(str(row[filler.column] or "")):
                seen += 1
                if usable(sentence, forbidden):
                    out.append(sentence)
            if len(out) >= filler.max_sentences:
                break
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, FillerError):
            raise
        where = f"{filler.path!r}" + (f" ({filler.data_files})" if filler.data_files else "")
        raise FillerError(f"cannot read the filler {where}: {error}") from error
    if len(out) < 64:
        raise FillerError(
            f"the filler {filler.path!r} has {len(out)} usable sentences of {seen}; at least 64 are needed (sentences "
            "with digits, with names or attributes of facts, or outside 12 to 400 characters are left out)"
        )
    return out[: filler.max_sentences]


def sentences_of(text: str) -> list[str]:
    """Sentences with their white space reduced to single spaces."""
    return [" ".join(part.split()) for part in _SENTENCE.split(text) if part.strip()]


def usable(sentence: str, forbidden: re.Pattern[str]) -> bool:
    """Whether a sentence of the user's text can stand in the haystack without touching any fact."""
    return (
        12 <= len(sentence) <= 400
        and not any(character.isdigit() for character in sentence)
        and sentence[-1] in ".!?"
        and forbidden.search(sentence) is None
    )


def _forbidden(ruler: Ruler) -> re.Pattern[str]:
    words = {*NAMES, *value_words(), *ATTRIBUTES, *(city for _, city in LANDMARKS)}
    exact = [re.escape(text) for text in sorted(ruler.special_strings, key=len, reverse=True) if text]
    alone = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    # Anything that looks like a control token of some other model is left out too: servers differ in what they parse.
    odd = r"<\|[^>]*\|?>|</?[a-z_]+>|\[/?[A-Z_]{2,}\]|[\u2581\u0120\ue000\ue001]"
    return re.compile("|".join([*exact, rf"(?i:\b(?:{alone})\b)", odd]))
