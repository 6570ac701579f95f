"""Combine: the weighted sum over a token's experts, with the routed scaling factor.

    out[t] = routed_scaling_factor * sum_k w[t, k] expert_out[t, k]

fp32 sum, one rounding to the dtype of `expert_out`. Source: sglang's `moe_sum_reduce`
(srt/layers/moe/moe_runner/triton_utils), which gets expert outputs already weighted: `topk_weights=None`.
"""

import torch
from torch import Tensor


def moe_sum_reduce(expert_out: Tensor, topk_weights: Tensor | None, routed_scaling_factor: float = 1.0) -> Tensor:
    """Sum expert_out [T, K, C] over K with weights [T, K] (None: already weighted) -> [T, C], same dtype.

    The factor multiplies every slot of the row, a fused shared expert included.
    """
    T, K, _ = expert_out.shape
    if topk_weights is not None and topk_weights.shape != (T, K):
        raise ValueError(
            f"topk_weights has shape {tuple(topk_weights.shape)}; expert_out has {T} tokens of {K} experts"
        )
    if expert_out.is_cuda and expert_out.dtype != torch.float64:
        from longrecall.kernels.moe.kernel import moe_sum_reduce_triton

        return moe_sum_reduce_triton(expert_out, topk_weights, routed_scaling_factor)
    # scaling the [T, K] weights costs nothing next to a pass over [T, C]
    if topk_weights is None:
        rows = torch.full((T, K), routed_scaling_factor, dtype=torch.float32, device=expert_out.device)
    else:
        rows = topk_weights.float() * routed_scaling_factor
    return torch.bmm(rows[:, None], expert_out.float()).squeeze(1).to(expert_out.dtype)
