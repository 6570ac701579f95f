"""Sparse decode attention: one query token per sequence over selected entries, split over keys and merged by LSE.

    l_j = scale q·k_j over the entries j of the index list (-1: none)
    split s: lse_s = logsumexp_j l_j,  out_s = sum_j exp(l_j - lse_s) v_j
    LSE = logsumexp_s lse_s;  out = sum_s exp(lse_s - LSE) out_s;  a sink multiplies out by 1 / (1 + exp(sink - LSE))

The sink enters the denominator once, never per split. Source: FlashMLA tests/ref.py, DeepSeek-V4 inference/model.py,
sglang srt/layers/attention/deepseek_v4_backend.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Attended(NamedTuple):
    """Attention over a set of entries, mergeable with others of the same queries."""

    out: Tensor
    """[..., H, Dv]; 0 where no entry is valid."""
    lse: Tensor
    """fp32 [..., H], natural log, without the sink; +inf where no entry is valid (FlashMLA's convention)."""


def merge_splits(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> Attended:
    """Merge partial attentions: outs [S, ..., H, Dv], lses [S, ..., H] -> out [..., H, Dv], lse [..., H], in fp32.

    A split with lse of +inf or -inf holds no entry and adds nothing, whatever its out (NaN included).
    `sink` [H] enters the denominator once; the returned lse is without it.
    """
    if outs.shape[:-1] != lses.shape:
        raise ValueError(f"outs {list(outs.shape)} and lses {list(lses.shape)} are not of the same splits and heads")
    empty = lses.isinf()
    lse_s = lses.float().masked_fill(empty, float("-inf"))
    total = lse_s.logsumexp(0)  # [..., H], -inf: no entry at all
    nothing = total.isneginf()
    share = (lse_s - total.masked_fill(nothing, 0.0)).exp_()  # 0 for an empty split
    if sink is not None:
        share = share * torch.sigmoid(total - sink.float())  # 1 / (1 + exp(sink - LSE))
    out = (outs.float().masked_fill(empty[..., None], 0.0) * share[..., None]).sum(0)
    return Attended(out, total.masked_fill(nothing, float("inf")))


def attend_splits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    scale: float,
    split_size: int | None = None,
) -> Attended:
    """One partial attention per split of the index list: out fp32 [S, B, H, Dv], lse fp32 [S, B, H] (-inf: no entry).

    Arguments as `sparse_decode`; what FlashMLA's split kernel hands to its merge.
    """
    B, H, D = q.shape
    shared = k.dim() == 2
    if k.shape[-1] != D or k.shape[:-1] != v.shape[:-1] or (not shared and k.shape[0] != B):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    if indices.dim() != 2 or indices.shape[0] != B:
        raise ValueError(f"indices has shape {list(indices.shape)}; q has {B} rows")
    K = indices.shape[1]
    step = K if split_size is None else split_size
    if split_size is not None and split_size < 1:
        raise ValueError(f"split_size is {split_size}; at least 1")
    if K == 0 or k.shape[-2] == 0:
        return Attended(q.new_zeros(1, B, H, v.shape[-1], dtype=torch.float32), q.new_full((1, B, H), float("-inf")))
    dropped = indices < 0
    any_dropped = bool(dropped.any())
    safe = indices.clamp_min(0).long()
    scaled = q.float() * scale
    # Branches of one history name much the same entries: read each entry once for all of them, not once per branch.
    once = shared and q.device.type == "cpu" and B * K > 2 * k.shape[0]
    if once:
        all_v = v.float()
        once = bool(all_v.isfinite().all())  # 0 * NaN is NaN: an entry that a branch does not name must not reach it
    if once:
        every = torch.mm(scaled.view(B * H, D), k.float().t()).view(B, H, -1)
        logits = every.gather(2, safe[:, None].expand(B, H, K))
    else:
        if shared:
            flat = safe.reshape(-1)
            chosen_k = k.index_select(0, flat).view(B, K, D).float()
            chosen_v = v.index_select(0, flat).view(B, K, -1).float()
        else:
            rows = torch.arange(B, device=q.device)[:, None]
            chosen_k, chosen_v = k[rows, safe].float(), v[rows, safe].float()
        if any_dropped:
            # a padded slot's value must go too, not only its probability
            chosen_v = chosen_v.masked_fill(dropped[..., None], 0.0)
        logits = torch.bmm(scaled, chosen_k.transpose(1, 2))  # [B, H, K]
    if any_dropped:
        logits.masked_fill_(dropped[:, None], float("-inf"))
    outs, lses = [], []
    for start in range(0, K, step):
        part = logits[..., start : start + step]
        lse = part.logsumexp(-1)
        p = (part - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp_()
        if once:
            spread = p.new_zeros(B, H, k.shape[0]).scatter_add_(2, safe[:, None, start : start + step].expand_as(p), p)
            outs.append(torch.mm(spread.view(B * H, -1), all_v).view(B, H, -1))
        else:
            outs.append(torch.bmm(p, chosen_v[:, start : start + step]))
        lses.append(lse)
    return Attended(torch.stack(outs), torch.stack(lses))


def sparse_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    scale: float,
    sink: Tensor | None = None,
    split_size: int | None = None,
    backend: str = "auto",
) -> Attended:
    """Attention of q [B, H, D] over the entries `indices` [B, K] (-1: none) of k [S, D] or [B, S, D], v likewise.

    One key head shared by all query heads (MQA). fp32 arithmetic on the values given; out in the dtype of q, lse fp32.
    `split_size`: keys per split (None: one split). Entries not named are never read: NaN there is harmless.
    backend: "torch", "triton", or "auto" (Triton on a GPU).
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend is {backend!r}; known: auto, torch, triton")
    if backend == "triton" or (backend == "auto" and q.is_cuda):
        from longrecall.kernels.sparse_attention.kernel import attend_splits_triton

        partial = attend_splits_triton(q, k, v, indices, scale=scale, split_size=split_size)
    else:
        partial = attend_splits(q, k, v, indices, scale=scale, split_size=split_size)
    merged = merge_splits(partial.out, partial.lse, sink)
    return Attended(merged.out.to(q.dtype), merged.lse)


def union_decode(
    q: Tensor,
    window: Tensor,
    window_tokens: Tensor,
    entries: Tensor,
    indices: Tensor,
    *,
    scale: float,
    sink: Tensor | None = None,
    split_size: int | None = None,
) -> Attended:
    """DeepSeek-V4's decode: the last raw tokens together with the selected compressed entries, one softmax, one sink.

    K = V. window [B, W, D]: the sliding window as a ring, of which the first min(window_tokens[b], W) slots are written
    (softmax does not care for their order); entries [B, N, D] with indices [B, K] (-1: none). A recent token may count
    twice, raw and inside a compressed entry: that is the model's definition.
    """
    B, W, _ = window.shape
    slots = torch.arange(W, device=q.device).expand(B, W)
    slots = torch.where(slots < window_tokens[:, None], slots, -1)
    near = attend_splits(q, window, window, slots, scale=scale, split_size=split_size)
    far = attend_splits(q, entries, entries, indices, scale=scale, split_size=split_size)
    merged = merge_splits(torch.cat([near.out, far.out]), torch.cat([near.lse, far.lse]), sink)
    return Attended(merged.out.to(q.dtype), merged.lse)
