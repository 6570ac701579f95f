"""Score and select: the k best keys of each query without storing the [queries, keys] scores.

Contract of every selection here: row t holds exactly min(k, visible[t]) distinct indices in [0, visible[t]), then -1.
The order inside a row has no meaning. Tie rule of the exact mode: higher score, then lower index. A key whose score is
NaN is never selected (it is what a NaN does to `>` in a real kernel), so such a row can hold fewer.
"""

import torch
from torch import Tensor


class ShapeError(ValueError):
    """Arguments whose shapes do not belong together."""


def check_shapes(q: Tensor, keys: Tensor, weights: Tensor, k: int, visible: Tensor | None) -> None:
    """One message naming both sides; the kernels below trust their arguments."""
    if q.ndim != 3:
        raise ShapeError(f"q must be [T, H, D], not {list(q.shape)}")
    if keys.ndim not in (2, 3) or keys.shape[-1] != q.shape[-1]:
        raise ShapeError(f"keys must be [S, {q.shape[-1]}] or [T, S, {q.shape[-1]}] for q {list(q.shape)}, "
                         f"not {list(keys.shape)}")  # fmt: skip
    if keys.ndim == 3 and keys.shape[0] != q.shape[0]:
        raise ShapeError(f"keys {list(keys.shape)} must hold one set of keys per query of q {list(q.shape)}")
    if weights.shape != q.shape[:2]:
        raise ShapeError(f"weights must be {list(q.shape[:2])} for q {list(q.shape)}, not {list(weights.shape)}")
    if visible is not None and visible.shape != q.shape[:1]:
        raise ShapeError(f"visible must be [{q.shape[0]}] for q {list(q.shape)}, not {list(visible.shape)}")
    if k < 1:
        raise ShapeError(f"k must be at least 1, not {k}")


def select_topk(scores: Tensor, k: int, *, visible: Tensor | None = None) -> Tensor:
    """scores [T, S] → int32 [T, k], exact with the fixed tie rule. `scores` is overwritten where it must be masked."""
    columns = scores.shape[1]
    if visible is not None and int(visible.min()) < columns:
        position = torch.arange(columns, device=scores.device)
        scores = scores.masked_fill_(position >= visible.to(scores.device).unsqueeze(1), -torch.inf)
    # (x != x) is NaN: torch.topk would rank it first, a kernel's comparison never takes it.
    scores = scores.masked_fill_(scores.isnan(), -torch.inf)
    width = min(k, columns)
    values, index = scores.topk(width, dim=1, sorted=False)
    kth = values.amin(1, keepdim=True)
    taken = (values == kth).sum(1)
    tied = (scores == kth).sum(1)
    rows = ((tied > taken) & (kth.squeeze(1) > -torch.inf)).nonzero().squeeze(1)
    if rows.numel():
        order = scores[rows].sort(dim=1, descending=True, stable=True).indices
        index[rows] = order[:, :width]
        values[rows] = scores[rows].gather(1, index[rows])
    index = index.masked_fill(values == -torch.inf, -1)
    # -1 last, the indices ascending: neighbouring keys are gathered together, and two equal sets are equal rows.
    index = index.masked_fill_(index < 0, columns).sort(dim=1).values
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    out[:, :width] = index.masked_fill_(index == columns, -1)
    return out


def _identity(rows: int, k: int, visible: Tensor, device: torch.device) -> Tensor:
    position = torch.arange(k, dtype=torch.int32, device=device).expand(rows, k)
    return torch.where(position < visible.to(device).unsqueeze(1), position, -1).to(torch.int32)


def index_topk(q: Tensor, keys: Tensor, weights: Tensor, k: int = 512, *, visible: Tensor | None = None) -> Tensor:
    """The k best keys of each query by score[t, s] = sum_h weights[t, h] relu(q[t, h] . keys[s]).

    q [T, H, D], keys [S, D] (or [T, S, D]), weights [T, H], visible [T] (query t sees keys s < visible[t]; None: all).
    Returns int32 [T, k]: ascending indices, then -1. When no query sees more than k keys, no score is read.
    """
    check_shapes(q, keys, weights, k, visible)
    columns = keys.shape[-2]
    if visible is None:
        visible = torch.full((q.shape[0],), columns, dtype=torch.int64)
    limit = min(columns, int(visible.max())) if visible.numel() else 0
    if limit <= k:
        return _identity(q.shape[0], k, visible.clamp(0, columns), q.device)
    from longrecall.kernels.indexer.blocked import topk_blocked

    return topk_blocked(q, keys[..., :limit, :], weights, k, visible=visible)
