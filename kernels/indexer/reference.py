"""The index score written plainly: the ground truth that kernels, tests and benchmarks import.

    score[t, s] = sum_h weights[t, h] * relu(q[t, h] . k[s])

Any scale (D^-0.5, H^-0.5, a per-head query scale) is folded into `weights`, and a key scale into k.
"""

import torch
from torch import Tensor


def indexer_logits_ref(q: Tensor, k: Tensor, weights: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """q [T, H, D], k [S, D] (or [T, S, D], keys of each query), weights [T, H] → scores [T, S] in fp32.

    Dot products, ReLU and the sum over heads run in `dtype`: fp32, or fp64 for the reference of a reference.
    """
    q, k, weights = q.to(dtype), k.to(dtype), weights.to(dtype)
    if k.ndim == 3:
        dots = q @ k.transpose(1, 2)  # [T, H, S]
        return (weights.unsqueeze(1) @ dots.relu_()).squeeze(1).float()
    scores = torch.empty(q.shape[0], k.shape[0], dtype=torch.float32, device=q.device)
    rows = max(1, (1 << 23) // max(1, q.shape[1] * k.shape[0]))  # [rows, H, S] stays near 32 MB
    for start in range(0, q.shape[0], rows):
        block = q[start : start + rows]
        dots = (block.flatten(0, 1) @ k.T).view(block.shape[0], -1, k.shape[0])
        scores[start : start + rows] = (weights[start : start + rows].unsqueeze(1) @ dots.relu_()).squeeze(1)
    return scores
