"""Reading a tokenizer.json fast: the part of its vocabulary that plain text can reach, kept on disk from the first use.

    file = TokenizerFile.read(folder / "tokenizer.json")
    file.for_text("The old captain")     # a tokenizer that encodes this text as the whole one does
    file.whole                           # the library's own reading of the file, made when it is asked for

Byte-pair merges only ever join symbols that stand in the text, so an entry that holds a character which neither stands
in the text nor comes out of the normaliser can never be produced. Text of ASCII characters needs the entries made of
ASCII, of the stand-ins of byte-level tokenizers for control characters and the space, and of SentencePiece's space:
with Gemma 151,465 of 262,144. Reading those from a file made for it costs a quarter of parsing the whole JSON. All
added tokens are kept, so template markers in other scripts are no reason for the whole. Tokenizers of other kinds, or
with a normaliser or pre-tokenizer not named here, are read whole.

The file lies in the cache (`LONGRECALL_CACHE`), named by the sha256 of tokenizer.json and checked by one of its own; a
cache that cannot be written costs time, nothing else.
"""

import hashlib
import json
import os
import re
from array import array
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from longrecall.needles.collection import no_collection

FORMAT = 1
"""Raised whenever files of the cache must be made anew."""
_PLAIN = re.compile("[\x00-\x7f\u0100-\u0121\u2581]*")
"""ASCII, its byte-level stand-ins where they are not ASCII, and SentencePiece's space."""
_SEPARATOR = "\ufdd0"
"""A code point that is no character, so not in `_PLAIN` either."""
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"}
_PRE_TOKENIZERS = {"Split", "ByteLevel", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "UnicodeScripts"}
_BPE_OPTIONS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")


def cache_folder() -> Path:
    """Where files that can be made again are kept."""
    return Path(os.environ.get("LONGRECALL_CACHE") or Path.home() / ".cache" / "longrecall").expanduser()


class Part(NamedTuple):
    """The plain part of a vocabulary, and what was learned from the whole of it."""

    tokenizer: tokenizers.Tokenizer
    bridging: frozenset[str]


class TokenizerFile:
    """One tokenizer.json, read as far as the texts need."""

    def __init__(self, content: bytes, sha256: str) -> None:
        self._content = content
        self.sha256 = sha256
        self._part = _cached_part(content, sha256)
        self._odd: re.Pattern[str] | None = None
        if self._part is not None:
            added = self._part.tokenizer.get_added_tokens_decoder().values()
            odd = [t.content for t in added if not (t.content.isascii() or t.normalized or t.single_word)]
            if odd:
                self._odd = re.compile("|".join(map(re.escape, sorted(odd, key=len, reverse=True))))

    @classmethod
    def read(cls, path: Path) -> "TokenizerFile":
        """Raises OSError, or the library's error for a file that is no tokenizer.json."""
        content = path.read_bytes()
        return cls(content, hashlib.sha256(content).hexdigest())

    @cached_property
    def whole(self) -> tokenizers.Tokenizer:
        """As the library reads the file."""
        return tokenizers.Tokenizer.from_buffer(self._content)

    @property
    def any(self) -> tokenizers.Tokenizer:
        """One that knows every added token."""
        return self._part.tokenizer if self._part is not None else self.whole

    def for_text(self, text: str) -> tokenizers.Tokenizer:
        """A tokenizer that encodes `text` as the whole one does."""
        if self._part is not None and (text.isascii() or (self._odd and self._odd.sub("", text).isascii())):
            return self._part.tokenizer
        return self.whole

    @cached_property
    def bridging(self) -> frozenset[str]:
        """Characters c for which some vocabulary entry holds "c" directly followed by a space."""
        return self._part.bridging if self._part is not None else bridging(self.whole.get_vocab(with_added_tokens=True))


def bridging(vocabulary: "dict[str, int] | list[str]") -> frozenset[str]:
    """Characters c for which some entry holds "c" directly followed by a space, then anything or nothing."""
    return frozenset(pair[0] for pair in re.findall("[^\n][\u2581\u0120 ]", "\n".join(vocabulary)))


def _cached_part(content: bytes, sha256: str) -> Part | None:
    path = cache_folder() / "tokenizers" / f"{sha256[:32]}-{FORMAT}-{tokenizers.__version__}.part"
    try:
        kept = path.read_bytes()
    except OSError:
        kept = b""
    if len(kept) > 32 and hashlib.sha256(kept[32:]).digest() == kept[:32]:
        return _unpacked(kept[32:])
    packed = _packed(content)
    if packed is None:
        return None
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(packed).digest() + packed)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
    return _unpacked(packed)


def _packed(content: bytes) -> bytes | None:
    """The plain part as bytes: sizes, everything but vocabulary and merges as JSON, entries, ids, merges."""
    try:
        file = json.loads(content)
        model, added = file["model"], file["added_tokens"]
        vocabulary, merges = model["vocab"], model["merges"]
    except (ValueError, KeyError, TypeError):
        return None  # not a tokenizer.json, or of another kind: the library says so
    if not (_is_plain_bpe(model) and _stays_plain(file.get("normalizer")) and _stays_plain(file.get("pre_tokenizer"))):
        return None
    entries = [entry for entry in vocabulary if _PLAIN.fullmatch(entry)]
    place = {entry: number for number, entry in enumerate(entries)}
    if model.get("unk_token") is not None and model["unk_token"] not in place:
        return None
    left, right = array("i"), array("i")
    for merge in merges:
        one, other = merge.split(" ", 1) if isinstance(merge, str) else merge
        if one in place and other in place and one + other in place:
            left.append(place[one])
            right.append(place[other])
    shell = {**file, "model": {**model, "vocab": {token["content"]: token["id"] for token in added}, "merges": []}}
    head = json.dumps({"shell": shell, "bridging": sorted(bridging([*vocabulary, *(t["content"] for t in added)]))})
    ids = array("i", [vocabulary[entry] for entry in entries])
    parts = [head.encode(), _SEPARATOR.join(entries).encode(), ids.tobytes(), left.tobytes(), right.tobytes()]
    return b"".join([array("q", map(len, parts)).tobytes(), *parts])


def _unpacked(packed: bytes) -> Part:
    sizes = array("q", packed[:40])
    at, parts = 40, []
    for size in sizes:
        parts.append(packed[at : at + size])
        at += size
    head = json.loads(parts[0])
    entries = parts[1].decode().split(_SEPARATOR)
    ids, left, right = (array("i", part) for part in parts[2:])
    shell = head["shell"]
    options = {name: shell["model"][name] for name in _BPE_OPTIONS if shell["model"].get(name) is not None}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(shell))  # with the added tokens' ids, which stay
    with no_collection():
        merges = list(zip(map(entries.__getitem__, left), map(entries.__getitem__, right), strict=True))
        tokenizer.model = tokenizers.models.BPE(dict(zip(entries, ids, strict=True)), merges, **options)
    return Part(tokenizer, frozenset(head["bridging"]))


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return model.get("type") == "BPE" and not any(model.get(name) for name in odd)


def _stays_plain(step: dict[str, Any] | None) -> bool:
    """Whether a normaliser or pre-tokenizer keeps plain text within `_PLAIN`."""
    if step is None:
        return True
    kind = step.get("type")
    if kind == "Sequence":
        return all(map(_stays_plain, step.get("normalizers") or step.get("pretokenizers") or []))
    if kind == "Replace":
        return bool(_PLAIN.fullmatch(step.get("content", "\uffff")))
    if kind == "Prepend":
        return bool(_PLAIN.fullmatch(step.get("prepend", "\uffff")))
    if kind == "Metaspace":
        return step.get("replacement") == "\u2581"
    return kind in _NORMALIZERS | _PRE_TOKENIZERS
