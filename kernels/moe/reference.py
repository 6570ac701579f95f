"""The MoE layer in fp64, one token and one expert at a time: the ground truth that the other paths are held to."""

import torch
from torch import Tensor

from longrecall.kernels.moe.experts import Experts, one_expert, swiglu
from longrecall.kernels.moe.routing import TopK


def moe_experts_ref(x: Tensor, w13: Experts, w2: Experts, topk: TopK, *, swiglu_limit: float | None = None) -> Tensor:
    """fp64 [T, K, C], each expert's output times its weight."""
    T, C = x.shape
    K = topk.idx.shape[1]
    out = torch.zeros(T, K, C, dtype=torch.float64, device=x.device)
    for expert in topk.idx.unique().tolist():
        up_gate, down = one_expert(w13, expert, torch.float64), one_expert(w2, expert, torch.float64)
        for t, k in (topk.idx == expert).nonzero().tolist():
            gate, up = (up_gate @ x[t].double()).chunk(2)
            out[t, k] = topk.weights[t, k].double() * (down @ swiglu(gate, up, swiglu_limit))
    return out


def moe_sum_reduce_ref(expert_out: Tensor, topk_weights: Tensor | None, routed_scaling_factor: float = 1.0) -> Tensor:
    """fp64 [T, C]: the factor times the (weighted) sum over the experts."""
    rows = expert_out.double()
    if topk_weights is not None:
        rows = rows * topk_weights.double()[..., None]
    return rows.sum(1) * routed_scaling_factor
