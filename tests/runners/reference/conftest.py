"""A tiny real language model and a small vocabulary, so that caching and batching are tested on true attention."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from longrecall.runners.reference import tokenizer as tokenizer_module
from longrecall.runners.reference.interface import Chunk
from longrecall.runners.reference.tokenizer import TextTokenizer


def _gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def small_vocabulary() -> list[tuple[str, float, int]]:
    """(piece, score, type) for ASCII with a few merged pieces, bytes, control tokens and newline runs."""
    pieces = [("<pad>", -1000.0, 3), ("<eos>", -1000.0, 3), ("<bos>", -1000.0, 3), ("<unk>", -1000.0, 3)]
    pieces += [("\n" * n, -1000.0, 4) for n in range(1, 4)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    merged = ["he", "th", "the", "in", "er", "an", "or", "\u2581t", "\u2581the", "\u2581a", "\u2581code", "co", "de"]
    single = ["\u2581", *(chr(c) for c in range(33, 127))]
    pieces += [(piece, -float(i), 1) for i, piece in enumerate([*merged, *single])]
    return pieces


def write_small_gguf(path: Path) -> None:
    """A GGUF file that holds a header and nothing else."""
    pieces = small_vocabulary()

    def strings(values: list[str]) -> bytes:
        return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(_gguf_string(v.encode()) for v in values)

    count = len(pieces)
    pairs = {
        "tokenizer.ggml.model": struct.pack("<I", 8) + _gguf_string(b"llama"),
        "tokenizer.ggml.tokens": strings([piece for piece, _, _ in pieces]),
        "tokenizer.ggml.scores": struct.pack(f"<IIQ{count}f", 9, 6, count, *(score for _, score, _ in pieces)),
        "tokenizer.ggml.token_type": struct.pack(f"<IIQ{count}i", 9, 5, count, *(kind for _, _, kind in pieces)),
        "tokenizer.ggml.padding_token_id": struct.pack("<II", 4, 0),
        "tokenizer.ggml.eos_token_id": struct.pack("<II", 4, 1),
        "tokenizer.ggml.bos_token_id": struct.pack("<II", 4, 2),
        "tokenizer.ggml.unknown_token_id": struct.pack("<II", 4, 3),
        "tokenizer.ggml.add_space_prefix": struct.pack("<I?", 7, False),
    }
    body = b"".join(_gguf_string(key.encode()) + value for key, value in pairs.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + body)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the small vocabulary's tokenizer, config.json and hashes.json; no weights."""
    folder = tmp_path_factory.mktemp("small")
    write_small_gguf(folder / "vocabulary.gguf")
    tokenizer_module.write_tokenizer(folder / "vocabulary.gguf", folder)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048, "index_topk": 16}))
    return folder


@pytest.fixture(scope="session")
def small_tokenizer(small_folder: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(small_folder)


class TinyCache:
    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.layers = layers

    @property
    def length(self) -> int:
        return len(self.layers[0][0])

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers)

    def fork(self, length: int) -> "TinyCache":
        assert 0 < length <= self.length
        return TinyCache([(k[:length].clone(), v[:length].clone()) for k, v in self.layers])


class TinyModel:
    """A causal transformer with random weights, fp32: 2 layers, 2 heads, width 32, sinusoidal positions."""

    LAYERS, HEADS, WIDTH = 2, 2, 32

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * scale * shape[-2] ** -0.5

        self.embedding = torch.randn((vocab_size, self.WIDTH), generator=generator)
        self.head = matrix(self.WIDTH, vocab_size, scale=3.0)
        self.layers = [
            (
                matrix(self.WIDTH, 3 * self.WIDTH, scale=1.5),
                matrix(self.WIDTH, self.WIDTH),
                matrix(self.WIDTH, self.WIDTH),
            )
            for _ in range(self.LAYERS)
        ]
        self.capture_indexer_topk = False
        self.last_indexer_topk: torch.Tensor | None = None
        self.calls: list[tuple[str, list[int]]] = []
        """("prefill" | "decode", tokens per sequence) of every call."""
        self.before_call: Callable[[], None] = lambda: None

    def new_cache(self) -> TinyCache:
        empty = torch.zeros((0, self.WIDTH))
        return TinyCache([(empty, empty) for _ in range(self.LAYERS)])

    def prefill(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        self.calls.append(("prefill", [len(chunk.tokens) for chunk in chunks]))
        hidden = self._forward([list(chunk.tokens) for chunk in chunks], [chunk.cache for chunk in chunks])
        rows = {"none": slice(0, 0), "last": slice(-1, None), "all": slice(None)}
        return [h[rows[chunk.logits]] @ self.head for h, chunk in zip(hidden, chunks, strict=True)]

    def decode(self, tokens: list[int], caches: list[TinyCache]) -> torch.Tensor:
        self.calls.append(("decode", [1] * len(tokens)))
        return torch.cat(self._forward([[token] for token in tokens], caches)) @ self.head

    def _forward(self, tokens: list[list[int]], caches: Sequence[TinyCache]) -> list[torch.Tensor]:
        self.before_call()
        sizes = [len(part) for part in tokens]
        positions = torch.cat(
            [torch.arange(cache.length, cache.length + size) for cache, size in zip(caches, sizes, strict=True)]
        )
        frequencies = 100.0 ** -(torch.arange(self.WIDTH // 2) / (self.WIDTH // 2))
        angles = positions[:, None] * frequencies
        x = self.embedding[torch.tensor([t for part in tokens for t in part])]
        x = x + torch.cat([angles.sin(), angles.cos()], dim=-1)
        for index, (qkv, out, ffn) in enumerate(self.layers):
            normed = torch.nn.functional.layer_norm(x, (self.WIDTH,))
            q, k, v = (normed @ qkv).chunk(3, dim=-1)
            mixed = []
            for cache, q_part, k_part, v_part in zip(
                caches, q.split(sizes), k.split(sizes), v.split(sizes), strict=True
            ):
                keys, values = (torch.cat(pair) for pair in zip(cache.layers[index], (k_part, v_part), strict=True))
                cache.layers[index] = keys, values
                mixed.append(self._attend(q_part, keys, values))
            x = x + torch.cat(mixed) @ out
            x = x + torch.relu(torch.nn.functional.layer_norm(x, (self.WIDTH,)) @ ffn)
        if self.capture_indexer_topk:
            self.last_indexer_topk = positions[:, None, None].expand(-1, 3, 4).to(torch.int32)
        return list(torch.nn.functional.layer_norm(x, (self.WIDTH,)).split(sizes))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(len(x), self.HEADS, -1).transpose(0, 1)

        visible = torch.arange(len(k)) <= torch.arange(len(k) - len(q), len(k))[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=visible)
        return attended.transpose(0, 1).reshape(len(q), self.WIDTH)


@pytest.fixture
def tiny_model(small_tokenizer: TextTokenizer) -> TinyModel:
    return TinyModel(small_tokenizer.vocab_size)


@pytest.fixture(scope="session")
def tiny_model_class() -> type[TinyModel]:
    return TinyModel
