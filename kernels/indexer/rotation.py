"""Rotations and norms of the indexer's queries and keys: Hadamard, the rope variant of each model, YaRN."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor


@lru_cache(maxsize=4)
def _hadamard_matrix(order: int, device: str) -> Tensor:
    """Sylvester's matrix times order^-0.5, fp32: orthogonal and symmetric, so it is its own inverse."""
    if order < 1 or order & (order - 1):
        raise ValueError(f"a Sylvester Hadamard matrix has an order that is a power of two, not {order}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return (matrix * order**-0.5).to(device)


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Sylvester Hadamard matrix of order D (a power of two; 128 in the indexer), times D^-0.5.

    Computed in fp32, returned in x's dtype. Scores do not change when both sides are rotated; one side alone sends
    the selection to chance.
    """
    return (x.float() @ _hadamard_matrix(x.shape[-1], str(x.device))).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's frequency interpolation (arXiv 2309.00071), as DeepSeek applies it; no mscale inside the indexer."""

    factor: float
    original_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of `dims` of the head's dimensions."""

    part: Literal["first", "last"] = "first"
    layout: Literal["half-split", "interleaved"] = "half-split"
    """half-split pairs channel i with i + dims/2 (NeoX); interleaved pairs 2i with 2i + 1 (GPT-J)."""
    dims: int = 64
    theta: float = 10_000.0
    yarn: Yarn | None = None

    def swapped(self) -> "Rope":
        """The same rotation with the other pairing: the layout fault."""
        layout: Literal["half-split", "interleaved"] = "interleaved" if self.layout == "half-split" else "half-split"
        return Rope(part=self.part, layout=layout, dims=self.dims, theta=self.theta, yarn=self.yarn)


def inverse_frequencies(rope: Rope) -> Tensor:
    """fp64 [dims / 2], radians per token."""
    half = rope.dims // 2
    frequencies = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if rope.yarn is None:
        return frequencies
    yarn = rope.yarn

    def channel(rotations: float) -> float:
        """The channel that turns `rotations` times within the original context."""
        turns = yarn.original_tokens / (rotations * 2 * math.pi)
        return rope.dims * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), rope.dims - 1)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def apply_rope(x: Tensor, positions: Tensor, rope: Rope, *, inverse: bool = False) -> Tensor:
    """Rotate x [T, ..., D] by positions [T] (tokens). Angles in fp64, the rotation in fp32; x's dtype is kept."""
    angle = positions.to(torch.float64).unsqueeze(1) * inverse_frequencies(rope).to(positions.device)
    shape = (x.shape[0], *(1 for _ in x.shape[1:-1]), rope.dims // 2)
    cos, sin = angle.cos().float().view(shape), angle.sin().float().view(shape)
    if inverse:
        sin = -sin
    start = 0 if rope.part == "first" else x.shape[-1] - rope.dims
    turned = x[..., start : start + rope.dims].float()
    if rope.layout == "half-split":
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((x[..., :start], turned.to(x.dtype), x[..., start + rope.dims :]), -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-6) -> Tensor:
    """V3.2's and GLM-5's key norm: LayerNorm with bias over the last dimension, in fp32."""
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """V4's key norm and the norm of the query latent, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
