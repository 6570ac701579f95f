"""Filler whose tokens are counted once: a pool of sentences, and text of exactly n tokens made by adding counts."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from longrecall.needles.filler import Prose, pick
from longrecall.needles.render import Meter, Ruler


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
    "There is something from before that I need again.|"
    "Before we go on, I would like to look something up."
).split("|")
"""What a person says before a question; combinations of these bring a prompt to the exact length."""

_FINE_MAX = 60
"""Pads up to this many tokens are made of `PADS` alone, longer ones begin with filler sentences."""


class Haystack:
    """Counted sentences, requests and openers of one split (or of the user's own text)."""

    def __init__(
        self,
        ruler: Ruler,
        prose: Prose,
        seed: str,
        *,
        sentences: int = 16_384,
        own: Sequence[str] | None = None,
    ) -> None:
        self.ruler = ruler
        self.prose = prose
        rng = random.Random(f"haystack:{seed}")
        texts = own if own is not None else [prose.sentence(rng) for _ in range(sentences)]
        self.pieces = [self._piece(text) for text in texts]
        if not self.pieces:
            raise FillerError("the filler holds no usable sentence")
        self.asks = [prose.ask(rng) for _ in range(512)]
        self.by_tokens: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            self.by_tokens.setdefault(piece.tokens, []).append(piece)
        self.shortest, self.longest = min(self.by_tokens), max(self.by_tokens)
        self.mean_tokens = sum(piece.tokens for piece in self.pieces) / len(self.pieces)
        self._sums = self._reachable(4 * self.longest)
        self.pads = sorted((self._piece(text) for text in PADS), key=lambda piece: piece.tokens)
        self._pad_sums = self._pad_table()

    def _piece(self, text: str) -> Piece:
        chunks = self.ruler.chunks(" " + text)
        body = sum(map(self.ruler.count_chunk, chunks[:-1]))
        return Piece(" " + text, body + self.ruler.count_chunk(chunks[-1]), body, chunks[-1])

    def _reachable(self, limit: int) -> list[bool]:
        """Whether some sentences add up to n tokens."""
        sums = [True] + [False] * limit
        for total in range(1, limit + 1):
            sums[total] = any(total >= tokens and sums[total - tokens] for tokens in self.by_tokens)
        return sums

    def _pad_table(self) -> list[bool]:
        sums = [True] + [False] * _FINE_MAX
        for total in range(1, _FINE_MAX + 1):
            sums[total] = any(total >= pad.tokens and sums[total - pad.tokens] for pad in self.pads)
        return sums

    def reachable(self, tokens: int) -> bool:
        """Whether sentences of the pool add up to exactly so many tokens."""
        return tokens >= len(self._sums) or (tokens >= 0 and self._sums[tokens])

    def pieces_of(self, rng: random.Random, tokens: int) -> list[Piece]:
        """Sentences that add up to exactly `tokens` (which must be reachable)."""
        out: list[Piece] = []
        while tokens > 0:
            for _ in range(64):
                piece = pick(rng, self.pieces)
                if piece.tokens <= tokens and self.reachable(tokens - piece.tokens):
                    break
            else:
                sizes = [size for size in sorted(self.by_tokens) if size <= tokens and self.reachable(tokens - size)]
                piece = pick(rng, self.by_tokens[pick(rng, sizes)])
            out.append(piece)
            tokens -= piece.tokens
        return out

    def pad(self, rng: random.Random, tokens: int) -> str | None:
        """Phrases (after filler sentences, when long) of exactly `tokens` tokens; None when there is no combination."""
        if tokens < 0 or (tokens <= _FINE_MAX and not self._pad_sums[tokens]):
            return None
        out: list[str] = []
        while tokens > _FINE_MAX:
            piece = pick(rng, self.pieces)
            if piece.tokens + 10 > tokens:
                break
            out.append(piece.text)
            tokens -= piece.tokens
        used: set[str] = set()
        while tokens > 0:
            fitting = [
                pad for pad in self.pads if pad.tokens <= tokens and self._pad_sums[min(tokens - pad.tokens, _FINE_MAX)]
            ]
            fresh = [pad for pad in fitting if pad.text not in used] or fitting
            piece = pick(rng, fresh)
            used.add(piece.text)
            out.append(piece.text)
            tokens -= piece.tokens
        return "".join(out).strip()

    def sentence(self, rng: random.Random) -> Piece:
        """Any sentence."""
        return pick(rng, self.pieces)


def say(meter: Meter, pieces: Sequence[Piece]) -> str:
    """Append sentences to an open turn that already has content; returns their text."""
    for piece in pieces:
        meter.counted(piece.body_tokens, piece.last)
    return "".join(piece.text for piece in pieces)
