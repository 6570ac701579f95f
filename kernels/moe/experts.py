"""The experts: grouped matrix products over tokens sorted by expert, with the clamped SwiGLU between them.

    h = silu(min(g, L)) * clamp(u, -L, L),  [g; u] = W13_e x_t;   y[t, k] = w[t, k] W2_e h

L = swiglu_limit (V4: 10; None elsewhere): the gate is clamped above only, the up part on both sides, before the silu.
Source: DeepSeek-V4 inference/model.py (Expert); sglang's silu_and_mul_clamp.
"""

import torch
from torch import Tensor

from longrecall.kernels.moe.formats import PackedExperts, unpack_experts
from longrecall.kernels.moe.routing import TopK

Experts = Tensor | PackedExperts


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in the dtype given; no clamp when limit is None."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


def _shape(weights: Experts) -> tuple[int, int, int]:
    E, N, K = weights.shape
    return E, N, K


def one_expert(weights: Experts, expert: int, dtype: torch.dtype) -> Tensor:
    """The [N, K] values of one expert, unpacked when packed."""
    w = unpack_experts(weights, expert) if isinstance(weights, PackedExperts) else weights[expert]
    return w.to(dtype)


def moe_experts(
    x: Tensor,
    w13: Experts,
    w2: Experts,
    topk: TopK,
    *,
    swiglu_limit: float | None = None,
    weighted: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Run every token's experts: x [T, C], w13 [E, 2F, C] (gate rows first), w2 [E, C, F] -> [T, K, C], x's dtype.

    `weighted`: rows come multiplied by their top-k weight, as sglang's second GEMM leaves them (then `moe_sum_reduce`
    takes topk_weights=None). backend: "torch", "triton", or "auto" (Triton on a GPU with plain weights).
    """
    T, C = x.shape
    E, two_f, c13 = _shape(w13)
    e2, c2, F = _shape(w2)
    if (e2, c2, c13, two_f) != (E, C, C, 2 * F):
        raise ValueError(f"x [{T}, {C}] needs w13 [E, 2F, {C}] and w2 [E, {C}, F]; got {_shape(w13)} and {_shape(w2)}")
    if topk.idx.shape[0] != T or topk.idx.shape != topk.weights.shape:
        raise ValueError(f"top-k of {list(topk.idx.shape)} does not fit {T} tokens")
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend is {backend!r}; known: auto, torch, triton")
    if backend == "auto":
        backend = "triton" if x.is_cuda and x.dtype != torch.float64 else "torch"
    if backend == "triton":
        from longrecall.kernels.moe.kernel import moe_experts_triton

        plain13 = unpack_experts(w13).to(x.dtype) if isinstance(w13, PackedExperts) else w13
        plain2 = unpack_experts(w2).to(x.dtype) if isinstance(w2, PackedExperts) else w2
        return moe_experts_triton(x, plain13, plain2, topk, swiglu_limit=swiglu_limit, weighted=weighted)
    K = topk.idx.shape[1]
    flat = topk.idx.reshape(-1)
    order = flat.argsort(stable=True)  # positions (t K + k) grouped by expert
    counts = torch.bincount(flat, minlength=E).tolist()
    if len(counts) > E:
        raise ValueError(f"the top-k names expert {len(counts) - 1}; there are {E}")
    out = x.new_empty(T * K, C)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = order[start : start + count]
        start += count
        gate, up = (x[rows // K] @ one_expert(w13, expert, x.dtype).T).split(F, -1)
        out[rows] = swiglu(gate, up, swiglu_limit) @ one_expert(w2, expert, x.dtype).T
    out = out.view(T, K, C)
    return out * topk.weights[..., None].to(x.dtype) if weighted else out
