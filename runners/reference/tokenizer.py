"""Gemma's tokenizer and the plain-transcript chat template of the reference build, made from the GGUF header.

`write_tokenizer` turns the SentencePiece vocabulary of a GGUF file (keys `tokenizer.ggml.*`) into a HuggingFace
`tokenizer.json` and a `tokenizer_config.json` with a `chat_template`, in seconds. SentencePiece's BPE repeatedly merges
the adjacent pair whose concatenation has the best score; the scores of Gemma's 255,474 ordinary pieces are distinct, so
a merge list ordered by score reproduces it. User-defined pieces (runs of newlines, tabs and spaces, HTML tags) are cut
out of the text first, longest match first, as SentencePiece and llama.cpp do.

`TextTokenizer` is what the server encodes and decodes with. Text never becomes a control token there: `<eos>` typed by
a user stays five characters, and exactly one BOS is put before a prompt, by id. transformers would read the token.

    write_tokenizer(Path("gemma-3-270m-q4_k_m.gguf"), Path("reference"))
    TextTokenizer.from_folder(Path("reference")).encode("Hello")   # [2, 9259]
"""

import codecs
import hashlib
import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from longrecall.needles.whole_file import write_text

SPACE = "\u2581"  # SentencePiece's stand-in for a space; typed by a user it comes back as a space, there as here

# One block per turn; a system turn is plain text, a tool turn is labelled text.
# Written without statement newlines, so that trim_blocks and lstrip_blocks (which transformers sets) change nothing.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'developer'] %}"
    "{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant:' }}{% if message['content'] %}{{ ' ' + message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ ' [' + call['function']['name'] + ' ' + call['function']['arguments'] + ']' }}"
    "{% endfor %}"
    "{% elif message['role'] == 'tool' %}"
    "{{ 'Tool: ' + message['content'] }}"
    "{% else %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # llama.cpp's token types
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TokenizerError(ValueError):
    """The GGUF or tokenizer file is not what it should be; the message names the file."""


class TemplateError(ValueError):
    """The messages cannot be rendered; the message says which and why."""


def read_header(path: Path) -> dict[str, Any]:
    """Key-value header of a GGUF file; arrays of strings come back as lists of bytes, other arrays as tuples.

    `gguf.GGUFReader` makes a numpy array per token, which takes 4 to 16 s for this vocabulary; this takes 0.1 s.
    Only the header is read, so the first part of a split file will do.
    """
    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if data[:4] != b"GGUF":
                    raise TokenizerError(f"{path} is not a GGUF file: it begins with {data[:4]!r}, not b'GGUF'")
                return _read_pairs(data)
        except (struct.error, ValueError, KeyError, UnicodeDecodeError, OverflowError) as error:
            if isinstance(error, TokenizerError):
                raise
            raise TokenizerError(f"{path} has a broken or truncated GGUF header: {error}") from error


def _read_pairs(data: mmap.mmap) -> dict[str, Any]:
    _, _, _, num_pairs = struct.unpack_from("<IIQQ", data, 0)
    position = 24
    length_of = struct.Struct("<Q").unpack_from

    def string() -> bytes:
        nonlocal position
        (length,) = length_of(data, position)
        start = position + 8
        position = start + length
        if position > len(data):
            raise TokenizerError(f"a string of {length} bytes ends outside the file")
        return data[start:position]

    def value(kind: int) -> Any:
        nonlocal position
        if kind == _STRING:
            return string()
        if kind == _ARRAY:
            item_kind, count = struct.unpack_from("<IQ", data, position)
            position += 12
            if item_kind in (_STRING, _ARRAY):
                return [value(item_kind) for _ in range(count)]
            layout = f"<{count}{_SCALARS[item_kind]}"
        else:
            layout = f"<{_SCALARS[kind]}"
        items = struct.unpack_from(layout, data, position)
        position += struct.calcsize(layout)
        return items if kind == _ARRAY else items[0]

    pairs: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = string().decode()
        (kind,) = struct.unpack_from("<I", data, position)
        position += 4
        item = value(kind)
        pairs[key] = item.decode() if isinstance(item, bytes) else item
    return pairs


def _merges(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every split of every ordinary piece into two ordinary pieces, best score first.

    Byte pieces take no part: text that spells `<0x41>` must not turn into the byte 41.
    """
    ordinary = [i for i, kind in enumerate(types) if kind == NORMAL]
    known = {pieces[i]: i for i in ordinary}
    merges: list[tuple[str, str]] = []
    for i in sorted(ordinary, key=lambda i: -scores[i]):
        piece = pieces[i]
        splits = [
            (left, right)
            for cut in range(1, len(piece))
            if (left := piece[:cut]) in known and (right := piece[cut:]) in known
        ]
        merges.extend(sorted(splits, key=lambda pair: (known[pair[0]], known[pair[1]])))
    return merges


def tokenizer_json(header: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The content of tokenizer.json for a GGUF header; `source` names the file in errors."""
    if (model := header.get("tokenizer.ggml.model")) != "llama":
        raise TokenizerError(f"{source} has tokenizer model {model!r}; 'llama' (SentencePiece BPE) is needed")
    try:
        pieces = [piece.decode() for piece in header["tokenizer.ggml.tokens"]]
        scores, types = header["tokenizer.ggml.scores"], header["tokenizer.ggml.token_type"]
        bos, unknown = pieces[header["tokenizer.ggml.bos_token_id"]], pieces[header["tokenizer.ggml.unknown_token_id"]]
    except (KeyError, IndexError) as error:
        raise TokenizerError(
            f"{source} lacks a tokenizer key or holds an id outside its vocabulary: {error}"
        ) from error
    if header.get("tokenizer.ggml.add_space_prefix", True):
        raise TokenizerError(f"{source} wants a space before each text (add_space_prefix); Gemma's vocabulary does not")
    if not len(pieces) == len(scores) == len(types) == len(set(pieces)):
        raise TokenizerError(f"{source} has {len(pieces)} tokens, {len(scores)} scores and {len(types)} token types")
    added = [
        {
            "id": i,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,  # matched in the raw text: the space runs hold plain spaces
            "special": kind == CONTROL,
        }
        for i, (piece, kind) in enumerate(zip(pieces, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    bos_id = pieces.index(bos)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": bos, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": bos, "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": _merges(pieces, scores, types),
        },
    }


def write_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of the GGUF's vocabulary; each file whole or not at all."""
    header = read_header(gguf_path)
    content = tokenizer_json(header, str(gguf_path))
    pieces = header["tokenizer.ggml.tokens"]

    def special(name: str) -> str:
        return pieces[header[f"tokenizer.ggml.{name}_token_id"]].decode()

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special("bos"),
        "eos_token": special("eos"),
        "unk_token": special("unknown"),
        "pad_token": special("padding"),
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.get("gemma3.context_length"),
        "chat_template": CHAT_TEMPLATE,
    }
    write_text(folder / "tokenizer.json", json.dumps(content, ensure_ascii=False, separators=(",", ":")))
    write_text(folder / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=1) + "\n")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class TextTokenizer:
    """Encodes prompts, renders chats and decodes tokens byte by byte."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], *, tokenizer_hash: str) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # control tokens spelled out in text stay text
        self._bos: str = config["bos_token"]
        self._added = tokenizer.get_added_tokens_decoder()
        self.bos_id = self._id(self._bos)
        self.eos_id = self._id(config["eos_token"])
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.tokenizer_hash = tokenizer_hash
        """sha256 of tokenizer.json."""
        self.chat_template: str = config["chat_template"]
        self.template_hash = hashlib.sha256(self.chat_template.encode()).hexdigest()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(self.chat_template)

    @classmethod
    def from_folder(cls, folder: Path) -> "TextTokenizer":
        """Read tokenizer.json and tokenizer_config.json."""
        config_path, path = folder / "tokenizer_config.json", folder / "tokenizer.json"
        try:
            content = path.read_bytes()
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TokenizerError(f"cannot read {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise TokenizerError(f"{config_path} is not JSON: {error}") from error
        if missing := [key for key in ("bos_token", "eos_token", "chat_template") if not config.get(key)]:
            raise TokenizerError(f"{config_path} has no {', '.join(missing)}")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        return cls(tokenizer, config, tokenizer_hash=hashlib.sha256(content).hexdigest())

    def _id(self, piece: str) -> int:
        token_id = self._tokenizer.token_to_id(piece)
        if token_id is None:
            raise TokenizerError(f"the vocabulary has no {piece!r}")
        return int(token_id)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of `text`; with `bos`, one BOS first: a BOS spelled at the very start is that one, no second."""
        if bos:
            return [self.bos_id, *self._encode(text.removeprefix(self._bos))]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        # a lone surrogate (JSON "\ud800") has no UTF-8 form and would raise inside the Rust library
        ids: list[int] = self._tokenizer.encode(
            text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False
        ).ids
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The transcript as text, BOS included.

        With `continue_final_message` it ends with the last message's content, so that the model goes on with it
        (the rule of transformers: cut after the last occurrence of the stripped content).
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt cannot both be set")
        if continue_final_message and not messages:
            raise TemplateError("continue_final_message needs a message to continue")
        try:
            text = self._template.render(
                messages=messages, bos_token=self._bos, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error
        if continue_final_message:
            final = str(messages[-1].get("content") or "").strip()
            cut = text.rfind(final)
            if cut < 0:
                raise TemplateError("the chat template does not show the final message, so it cannot be continued")
            text = text[: cut + len(final)]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for a control token or an id outside the vocabulary."""
        if (added := self._added.get(token_id)) is not None:
            return b"" if added.special else added.content.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE, " ").encode()

    def piece(self, token_id: int) -> str:
        """Text of one token as logprobs show it: its characters, or the name of a control token."""
        added = self._added.get(token_id)
        return (
            added.content if added is not None else self.token_bytes(token_id).decode(errors="backslashreplace")
        )  # half a character shows as \xe2, never as a lossy replacement character

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, control tokens left out, broken UTF-8 replaced."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def decoder(self) -> "StreamDecoder":
        """A decoder for one stream of tokens."""
        return StreamDecoder(self)


class StreamDecoder:
    """Text of a growing token sequence; a character comes out once its last byte has come in."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left, an unfinished character replaced."""
        return self._decoder.decode(b"", final=True)
