"""Hyper-connections with a doubly stochastic mixing matrix (MHC, DeepSeek-V4): `mhc_pre`, `mhc_post`, `mhc_head`.

n = 4 residual streams R [T, n, C]; around each sub-layer F:

    x = vec(R);  r = rsqrt(mean(x^2) + 1e-6);  m = (fn x) r                         fn [2n + n^2, nC]
    pre = sigmoid(m[0:n] s0 + b) + 1e-6;  post = 2 sigmoid(m[n:2n] s1 + b)
    comb = softmax_rows(m[2n:] s2 + b) + 1e-6, columns normalised, then 19 times rows and columns; every divisor + 1e-6
    u = sum_k pre_k R_k;  R'_k = post_k F(norm(u)) + sum_j comb[j, k] R_j            j first: comb is applied transposed

Source: DeepSeek-V4 inference/model.py (hc_pre, hc_post, hc_head); sglang srt/models/deepseek_v4.py.
`precision` names what a serving engine may do to it; "fp32" is the reference's own.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Precision = Literal["fp64", "fp32", "tf32-weights", "bf16-weights", "bf16-in-out", "bf16-after-sinkhorn"]
PRECISIONS: tuple[Precision, ...] = (
    "fp64",
    "fp32",
    "tf32-weights",
    "bf16-weights",
    "bf16-in-out",
    "bf16-after-sinkhorn",
)
"""fp64: for measuring the others. tf32-weights: fn rounded to 10 mantissa bits, fp32 sums (DeepGEMM's prenorm GEMM, the
CUDA default). bf16-weights: fn in bf16, fp32 out. bf16-in-out: x, fn and m rounded to bf16. bf16-after-sinkhorn: pre,
post and comb cast to bf16 at the end."""

EPS = 1e-6
SINKHORN_STEPS = 20


class MhcPre(NamedTuple):
    """What a sub-layer needs of its hyper-connection."""

    u: Tensor
    """[T, C], the sub-layer's input before its norm, in the dtype of the streams."""
    post: Tensor
    """fp32 [T, n]: how much of the sub-layer's output enters each stream."""
    comb: Tensor
    """fp32 [T, n, n], doubly stochastic to about 1e-6; comb[:, j, k] takes stream j into stream k."""


def round_to_tf32(x: Tensor) -> Tensor:
    """fp32 values rounded to TF32's 10 mantissa bits, to nearest even."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


_BATCHED_UP_TO = 48
"""Up to this many tokens small matrix products beat elementwise passes with the token axis last (measured)."""


def sinkhorn(logits: Tensor, steps: int = SINKHORN_STEPS, eps: float = EPS) -> Tensor:
    """[T, n, n] logits -> doubly stochastic [T, n, n], same dtype.

    Row softmax + eps, a division by the column sums, then `steps` - 1 times by row and column sums, each + eps.
    """
    if steps < 1:
        raise ValueError(f"sinkhorn steps is {steps}; at least 1")
    T, n, _ = logits.shape
    if T > _BATCHED_UP_TO:
        c = logits.permute(1, 2, 0).contiguous().softmax(1).add_(eps)  # [row, column, T]
        for step in range(steps):
            if step:
                c.div_(c.sum(1, keepdim=True).add_(eps))
            c.div_(c.sum(0, keepdim=True).add_(eps))
        return c.permute(2, 0, 1).contiguous()
    # for few tokens the cost is the number of torch calls: a sum plus eps is one small matrix product
    c = logits.softmax(-1).add_(eps)
    bias = c.new_full((1, 1, 1), eps)
    ones_row, ones_column = c.new_ones(1, 1, n).expand(T, 1, n), c.new_ones(1, n, 1).expand(T, n, 1)
    for step in range(steps):
        if step:
            c.div_(torch.baddbmm(bias, c, ones_column))
        c.div_(torch.baddbmm(bias, ones_row, c))
    return c


def _mixes(x: Tensor, fn: Tensor, precision: Precision, eps: float) -> Tensor:
    """m [T, rows of fn] = (fn x) rsqrt(mean(x^2) + eps) in the named precision; fp32 (fp64) result."""
    if precision == "fp64":
        x, fn = x.double(), fn.double()
    elif precision == "bf16-in-out":
        # a bf16 GEMM: exact products, fp32 sums, the result rounded
        x, fn = x.bfloat16().float(), fn.bfloat16().float()
    else:
        x = x.float()
        if precision == "tf32-weights":
            fn = round_to_tf32(fn)
        elif precision == "bf16-weights":
            fn = fn.bfloat16()
        elif precision not in ("fp32", "bf16-after-sinkhorn"):
            raise ValueError(f"precision is {precision!r}; known: {', '.join(PRECISIONS)}")
        fn = fn.float()
    r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    m = F.linear(x, fn)
    if precision == "bf16-in-out":
        m = m.bfloat16().float()
    m = m * r
    return m.bfloat16().float() if precision == "bf16-in-out" else m


@lru_cache(maxsize=8)
def _scale_of_row(n: int, device: torch.device) -> Tensor:
    """Which of the three scales multiplies each row of m."""
    return torch.tensor([0] * n + [1] * n + [2] * n * n, device=device)


def mhc_mix(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, eps: float = EPS, precision: Precision = "fp32"
) -> tuple[Tensor, Tensor]:
    """The part of `mhc_pre` that reads the streams: (u [T, C], the logits of post and comb [T, n + n^2]).

    A caller with many tokens takes blocks of them through this while they are in the cache, and all through
    `mhc_coefficients` at once.
    """
    T, n, C = streams.shape
    rows = 2 * n + n * n
    if fn.shape != (rows, n * C) or scale.shape != (3,) or base.shape != (rows,):
        raise ValueError(
            f"{n} streams of {C} channels need fn [{rows}, {n * C}], scale [3], base [{rows}]; "
            f"got {list(fn.shape)}, {list(scale.shape)}, {list(base.shape)}"
        )
    m = _mixes(streams.reshape(T, n * C), fn, precision, eps)
    scale, base = scale.to(m.dtype), base.to(m.dtype)
    m = torch.addcmul(base, m, scale[_scale_of_row(n, m.device)])
    pre = m[:, :n].sigmoid() + eps
    if precision == "bf16-after-sinkhorn":
        pre = pre.bfloat16().float()
    u = torch.bmm(pre[:, None], streams.to(m.dtype)).squeeze(1)
    return u if precision == "fp64" else u.to(streams.dtype), m[:, n:]


def mhc_coefficients(
    logits: Tensor,
    n: int,
    *,
    sinkhorn_steps: int = SINKHORN_STEPS,
    eps: float = EPS,
    precision: Precision = "fp32",
) -> tuple[Tensor, Tensor]:
    """(post [T, n], comb [T, n, n]) from `mhc_mix`'s logits [T, n + n^2]."""
    post = logits[:, :n].sigmoid() * 2
    comb = sinkhorn(logits[:, n:].reshape(-1, n, n), sinkhorn_steps, eps)
    if precision == "bf16-after-sinkhorn":
        post, comb = post.bfloat16().float(), comb.bfloat16().float()
    return post, comb


def mhc_pre(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    sinkhorn_steps: int = SINKHORN_STEPS,
    eps: float = EPS,
    precision: Precision = "fp32",
) -> MhcPre:
    """streams [T, n, C], fn fp32 [2n + n^2, n C], scale fp32 [3], base fp32 [2n + n^2] -> (u, post, comb)."""
    u, logits = mhc_mix(streams, fn, scale, base, eps=eps, precision=precision)
    post, comb = mhc_coefficients(logits, streams.shape[1], sinkhorn_steps=sinkhorn_steps, eps=eps, precision=precision)
    return MhcPre(u, post, comb)


def mhc_post(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The next streams [T, n, C] from the sub-layer's output [T, C]; sums in `comb`'s dtype, result in `streams`'."""
    T, n, C = streams.shape
    if out.shape != (T, C) or post.shape != (T, n) or comb.shape != (T, n, n):
        raise ValueError(
            f"streams {list(streams.shape)} need out {[T, C]}, post {[T, n]}, comb {[T, n, n]}; "
            f"got {list(out.shape)}, {list(post.shape)}, {list(comb.shape)}"
        )
    mixed = torch.bmm(comb.transpose(1, 2), streams.to(comb.dtype))
    mixed.addcmul_(post[..., None], out[:, None].to(comb.dtype))
    return mixed if comb.dtype == torch.float64 else mixed.to(streams.dtype)


def mhc_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, eps: float = EPS) -> Tensor:
    """The exit: streams [T, n, C] -> [T, C] by pre alone; fn fp32 [n, n C], scale fp32 [1], base fp32 [n]."""
    T, n, C = streams.shape
    if fn.shape != (n, n * C) or scale.shape != (1,) or base.shape != (n,):
        raise ValueError(f"{n} streams of {C} channels need fn [{n}, {n * C}], scale [1], base [{n}]")
    m = _mixes(streams.reshape(T, n * C), fn, "fp32", eps)
    pre = torch.addcmul(base.float(), m, scale.float()).sigmoid_().add_(eps)
    return torch.bmm(pre[:, None], streams.float()).squeeze(1).to(streams.dtype)
