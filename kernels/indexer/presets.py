"""What each model's indexer is: shapes, rope, norms, k, ratio, and the key formats of training and serving.

Sources: DeepSeek-V3.2-Exp and DeepSeek-V4 `inference/model.py`, transformers `glm_moe_dsa`, SGLang 0.5.23.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longrecall.kernels.indexer.rotation import Rope, Yarn


class PresetError(ValueError):
    """A preset that does not exist."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    layers: int
    """Layers that run an indexer."""
    heads: int
    index_topk: int
    ratio: int
    """Tokens per index key: 1, or 4 where keys are compressed windows."""
    rope: Rope
    key_norm: Literal["layernorm", "rmsnorm"]
    query_rank: int
    """Width of the latent that the index query is projected from."""
    hadamard: bool
    """The reference rotates both sides before quantising."""
    trained_format: str
    """What the reference implementation rounds queries and keys to."""
    served_format: str
    """What SGLang 0.5.23 stores by default."""
    head_dim: int = 128

    @property
    def weight_scale(self) -> float:
        """Folded into the head weights: D^-0.5 of the dot product, H^-0.5 of the sum over heads."""
        return (self.head_dim * self.heads) ** -0.5

    @property
    def identity_tokens(self) -> int:
        """Longest context at which every candidate is selected, so that no score is read."""
        return self.ratio * (self.index_topk + 1) - 1

    def candidates(self, tokens: int) -> int:
        """Keys visible to the last of `tokens` tokens."""
        return tokens // self.ratio

    def visible(self, positions: Tensor) -> Tensor:
        """Keys visible to queries at these 0-based positions: (t + 1) // ratio."""
        return torch.div(positions + 1, self.ratio, rounding_mode="floor")

    def key_positions(self, keys: int) -> Tensor:
        """Rope position of each key: the first token of its window."""
        return torch.arange(keys) * self.ratio


_V4_ROPE = Rope(
    part="last", layout="interleaved", theta=160_000.0, yarn=Yarn(factor=16, original_tokens=65_536)
)  # fmt: skip

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="v3.2",
            layers=61,
            heads=64,
            index_topk=2048,
            ratio=1,
            # The first public demo rotated pairs; upstream corrected it to half-split.
            rope=Rope(theta=10_000.0, yarn=Yarn(factor=40, original_tokens=4096)),
            key_norm="layernorm",
            query_rank=1536,
            hadamard=True,
            trained_format="fp8_ue8m0",
            served_format="fp8",
        ),
        Preset(
            name="glm-5",
            layers=78,
            heads=32,
            index_topk=2048,
            ratio=1,
            rope=Rope(layout="interleaved", theta=1_000_000.0),
            key_norm="layernorm",
            query_rank=2048,
            # SGLang's fused path for interleaved rope has no rotation at all; without quantisation it changes nothing.
            hadamard=False,
            trained_format="bf16",
            served_format="fp8",
        ),
        Preset(
            name="v4-flash",
            layers=21,
            heads=64,
            index_topk=512,
            ratio=4,
            rope=_V4_ROPE,
            key_norm="rmsnorm",
            query_rank=1024,
            hadamard=True,
            trained_format="fp4",
            served_format="fp8",
        ),
        Preset(
            name="v4-pro",
            layers=30,
            heads=64,
            index_topk=1024,
            ratio=4,
            rope=_V4_ROPE,
            key_norm="rmsnorm",
            query_rank=1536,
            hadamard=True,
            trained_format="fp4",
            served_format="fp8",
        ),
        Preset(
            name="reference",
            layers=3,
            heads=8,
            index_topk=512,
            ratio=1,
            rope=Rope(theta=1_000_000.0),
            key_norm="layernorm",
            query_rank=640,
            hadamard=True,
            trained_format="bf16",
            served_format="bf16",
        ),
    )
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise PresetError(f"preset {name!r} is unknown; known: {', '.join(PRESETS)}")
    return PRESETS[name]
