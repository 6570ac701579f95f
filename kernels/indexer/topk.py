"""Score and select: the k best keys of each query without storing the [queries, keys] scores.

Contract of every selection here: row t holds exactly min(k, visible[t]) distinct indices in [0, visible[t]), then -1.
The order inside a row has no meaning. Tie rule of the exact mode: higher score, then lower index. A key whose score is
NaN is never selected (it is what a NaN does to `>` in a real kernel), so such a row can hold fewer.
"""

import numpy as np
import torch
from torch import Tensor

from longrecall.kernels.indexer.formats import Packed


class ShapeError(ValueError):
    """Arguments whose shapes do not belong together."""


def check_shapes(q: Tensor, keys: Packed, weights: Tensor, k: int, visible: Tensor | None) -> None:
    """One message naming both sides; the kernels below trust their arguments."""
    if q.ndim != 3:
        raise ShapeError(f"q must be [T, H, D], not {list(q.shape)}")
    width = q.shape[-1] // 2 if "fp4" in keys.fmt else q.shape[-1]
    if keys.data.ndim not in (2, 3) or keys.data.shape[-1] != width:
        shape = list(keys.data.shape)
        raise ShapeError(f"{keys.fmt} keys must be [S, {width}] or [T, S, {width}] for q {list(q.shape)}, not {shape}")
    if keys.data.ndim == 3 and keys.data.shape[0] != q.shape[0]:
        raise ShapeError(f"keys {list(keys.data.shape)} must hold one set of keys per query of q {list(q.shape)}")
    if weights.shape != q.shape[:2]:
        raise ShapeError(f"weights must be {list(q.shape[:2])} for q {list(q.shape)}, not {list(weights.shape)}")
    if visible is not None and visible.shape != q.shape[:1]:
        raise ShapeError(f"visible must be [{q.shape[0]}] for q {list(q.shape)}, not {list(visible.shape)}")
    if k < 1:
        raise ShapeError(f"k must be at least 1, not {k}")


def _masked(scores: Tensor, visible: Tensor | None) -> Tensor:
    """`scores` with unseen columns and NaN at -inf, in place."""
    columns = scores.shape[1]
    if visible is not None and int(visible.min()) < columns:
        position = torch.arange(columns, device=scores.device)
        scores = scores.masked_fill_(position >= visible.to(scores.device).unsqueeze(1), -torch.inf)
    # torch.topk ranks NaN first; a kernel's comparison never takes one.
    return torch.nan_to_num_(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _ascending(index: Tensor, values: Tensor, k: int, columns: int) -> Tensor:
    """Picks [T, W] with their scores → int32 [T, k]: ascending indices of the picks above -inf, then -1.

    Ascending so that neighbouring keys are gathered together and equal sets are equal rows.
    """
    index = index.masked_fill(values == -torch.inf, columns).sort(dim=1).values
    out = torch.full((index.shape[0], k), -1, dtype=torch.int32, device=index.device)
    out[:, : index.shape[1]] = index.masked_fill_(index == columns, -1)
    return out


def select_topk(scores: Tensor, k: int, *, visible: Tensor | None = None) -> Tensor:
    """scores [T, S] fp32 → int32 [T, k], exact with the fixed tie rule. `scores` is overwritten where masked."""
    columns = scores.shape[1]
    scores = _masked(scores, visible)
    if scores.device.type == "cpu" and k < columns:
        return _partitioned(scores, k)
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
    return _ascending(index, values, k, columns)


def _partitioned(scores: Tensor, k: int) -> Tensor:
    """`select_topk` of masked CPU scores with k < S: numpy's vectorised partition is 6 times torch's top-k here."""
    values = scores.detach().float().numpy()
    rows, columns = values.shape
    kth = np.partition(values, columns - k, axis=1)[:, columns - k : columns - k + 1]
    kept = (values >= kth) & (values > -np.inf)
    counts = kept.sum(1)
    for row in np.flatnonzero(counts > k):  # ties at the k-th score: the lower indices stay
        equal = values[row] == kth[row]
        kept[row] &= ~equal | (np.cumsum(equal) <= k - (counts[row] - equal.sum()))
    row_of, index = np.nonzero(kept)  # ascending within each row
    out = np.full((rows, k), -1, dtype=np.int32)
    first = np.concatenate(([0], np.cumsum(np.minimum(counts, k))[:-1]))
    out[row_of, np.arange(len(index)) - first[row_of]] = index
    return torch.from_numpy(out)


def select_topk_arbitrary(
    scores: Tensor, k: int, *, generator: torch.Generator, visible: Tensor | None = None
) -> Tensor:
    """Exact top-k whose ties at the k-th score go to a random member: what atomic order does to real kernels."""
    scores = _masked(scores, visible)
    shuffle = torch.randperm(scores.shape[1], generator=generator).to(scores.device)
    picks = select_topk(scores[:, shuffle], k).long()
    index = torch.where(picks >= 0, shuffle[picks.clamp(min=0)], 0)
    values = torch.where(picks >= 0, torch.zeros((), device=scores.device), -torch.inf)
    return _ascending(index, values, k, scores.shape[1])


def coarse_bin(scores: Tensor, bits: int) -> Tensor:
    """Bin of each score: the first `bits` of its order-preserving fp16 key (SGLang's `extract_coarse_bin`)."""
    key = scores.half().view(torch.int16).int()
    key = torch.where(key < 0, ~key & 0xFFFF, key | 0x8000)
    return key >> (16 - bits)


def select_topk_truncating(
    scores: Tensor,
    k: int,
    *,
    visible: Tensor | None = None,
    buffer: int = 2048,
    bits: int = 12,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The top-k that real kernels have shipped: members of the threshold bin beyond `buffer` are dropped.

    A histogram of `coarse_bin` finds the bin of the k-th score; everything above it is taken, and at most `buffer` of
    its members, in order of arrival, compete for the rest. SGLang's topk_v2: 12 bits, 2048 members (1024 before
    0.5.15); its older fast_topk: 8 bits, 4096 members. Arrival is by index, or random with a generator.
    """
    scores = _masked(scores, visible)
    columns = scores.shape[1]
    bins = coarse_bin(scores, bits)
    alive = scores > -torch.inf
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    for row in range(scores.shape[0]):
        seen = alive[row].nonzero().squeeze(1)
        if seen.numel() > k:
            kth_bin = bins[row, seen].topk(k, sorted=False).values.amin()
            arrival = seen
            if generator is not None:
                arrival = seen[torch.randperm(seen.numel(), generator=generator).to(seen.device)]
            above = arrival[bins[row, arrival] > kth_bin]
            members = arrival[bins[row, arrival] == kth_bin][:buffer]
            best = scores[row, members].topk(min(k - above.numel(), members.numel()), sorted=False).indices
            seen = torch.cat((above, members[best])).sort().values
        out[row, : seen.numel()] = seen.to(torch.int32)
    assert int(out.max()) < columns
    return out


def identity_topk(k: int, visible: Tensor) -> Tensor:
    """The selection of rows that see at most k keys: 0 .. visible - 1, then -1; int32 [T, k]."""
    position = torch.arange(k, dtype=torch.int32, device=visible.device)
    return torch.where(position < visible.unsqueeze(1), position, -1).to(torch.int32)


def index_topk(
    q: Tensor | Packed,
    keys: Tensor | Packed,
    weights: Tensor,
    k: int = 512,
    *,
    visible: Tensor | None = None,
) -> Tensor:
    """The k best keys of each query by score[t, s] = sum_h weights[t, h] relu(q[t, h] . keys[s]).

    q [T, H, D], keys [S, D] (or [T, S, D]: each query its own), weights [T, H], visible [T] (query t sees keys
    s < visible[t]; None: all). Either may be `Packed`, the bytes of a cache: an fp8 query's scale is folded into the
    weights (scale None: the caller did), and keys are never expanded as a whole. Returns int32 [T, k], -1 last:
    ascending on a CPU, on a GPU in an order without meaning that is the same for the same inputs.

    When no query sees more than k keys, no score is read. The scores are never stored as [T, S]. Runs on the device of
    q: blocked torch on a CPU, Triton on a GPU.
    """
    if isinstance(q, Packed):
        if not q.fmt.startswith("fp8"):
            raise ShapeError(f"a packed q must be fp8, not {q.fmt}; give the others dequantised")
        if q.scale is not None:
            weights = weights * q.scale.squeeze(-1)
            q = Packed(fmt=q.fmt, data=q.data, scale=None)
    q_data = q.data if isinstance(q, Packed) else q
    packed = keys if isinstance(keys, Packed) else _as_packed(keys)
    check_shapes(q_data, packed, weights, k, visible)
    columns = packed.data.shape[-2]
    if visible is None:
        visible = torch.full((q_data.shape[0],), columns, dtype=torch.int32, device=q_data.device)
    if columns <= k or (visible.device.type == "cpu" and (not visible.numel() or int(visible.max()) <= k)):
        return identity_topk(k, visible.clamp(0, columns).to(q_data.device))
    if q_data.device.type == "cuda":
        from longrecall.kernels.indexer.kernel import topk_device

        return topk_device(q, packed, weights, k, visible=visible)
    from longrecall.kernels.indexer.blocked import decode_block, topk_blocked

    if isinstance(q, Packed):
        q = decode_block(q, 0, q.data.shape[0])
    if packed.fmt == "fp32" or (packed.fmt == "bf16" and q.dtype != torch.bfloat16):
        # a wider query keeps its digits; fp8 and fp4 keys meet it in bf16, their values' own width
        q, packed = q.float(), Packed(fmt="fp32", data=packed.data.float(), scale=None)
    else:
        q = q.bfloat16()
    return topk_blocked(q, packed, weights, k, visible=visible)


def _as_packed(keys: Tensor) -> Packed:
    return Packed(fmt="bf16" if keys.dtype == torch.bfloat16 else "fp32", data=keys, scale=None)
