"""The CPU path of `index_topk`: blocks of keys small enough for the caches, rows of scores short enough to forget."""

import torch
from torch import Tensor

from longrecall.kernels.indexer.topk import select_topk

DOTS = 1 << 18
"""Elements of one block of dot products [rows * H, keys]: 1 MB in fp32, so ReLU and the head sum find it in L2."""
SCORES = 1 << 22
"""Scores kept before a selection, 16 MB: one query of 4M keys, or 32 queries of 128K, are selected at once."""


def _scores(q: Tensor, keys: Tensor, weights: Tensor, out: Tensor) -> None:
    """q [R, H, D], keys [S, D], weights [R, H] fp32 into out [R, S] fp32."""
    rows, heads, _ = q.shape
    flat = q.reshape(rows * heads, -1)
    step = max(512, DOTS // (rows * heads))
    for start in range(0, keys.shape[0], step):
        block = keys[start : start + step]
        dots = (flat @ block.T).relu_().float().view(rows, heads, -1)
        torch.bmm(weights.unsqueeze(1), dots, out=out[:, start : start + step].unsqueeze(1))


def topk_blocked(q: Tensor, keys: Tensor, weights: Tensor, k: int, *, visible: Tensor) -> Tensor:
    """As `index_topk`; memory is SCORES + DOTS elements however many queries and keys there are."""
    if q.dtype != keys.dtype:
        q, keys = q.float(), keys.float()
    weights = weights.float()
    rows = max(1, min(32, DOTS // (512 * q.shape[1]))) if keys.ndim == 2 else 1
    out = torch.empty(q.shape[0], k, dtype=torch.int32)
    for start in range(0, q.shape[0], rows):
        part = slice(start, start + rows)
        limit = min(keys.shape[-2], int(visible[part].max()))
        if limit <= 0:
            out[part] = -1
            continue
        row_keys = keys[:limit] if keys.ndim == 2 else keys[start, :limit]
        scores = torch.empty(q[part].shape[0], limit)
        _scores(q[part], row_keys, weights[part], scores)
        out[part] = select_topk(scores, k, visible=visible[part])
    return out
