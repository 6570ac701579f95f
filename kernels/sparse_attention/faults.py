"""What has broken sparse decode attention, each as a switch, and the measure that tells decode faults from the others.

Every fault acts in decode only: prefill uses another kernel on the same cache. So a fault of this kind shows as a
distance between the log-probabilities of the same tokens under prefill and under decode (`prefill_decode_kl`), with
the same selected indices, and no fault of keys, routing or hyper-connections does.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longrecall.kernels.faults import Fault, Signature
from longrecall.kernels.sparse_attention.decode import Attended, attend_splits, merge_splits

DecodeFault = Literal[
    "none",
    "sink_per_split",
    "lse_base2",
    "stale_lengths",
    "garbage_padding",
    "window_wrap",
    "block_table_as_ids",
    "nan_in_masked_slot",
]
DECODE_FAULTS: dict[DecodeFault, str] = {
    "none": "the definition",
    "sink_per_split": "every split adds the sink to its own denominator, so it counts once per split",
    "lse_base2": "the splits' lse are in base 2 and merged as natural logarithms",
    "stale_lengths": "the scheduler's metadata is a step old: entries past the planned length are not read",
    "garbage_padding": "the index list is padded to a multiple of 64 with ids of other entries instead of -1",
    "window_wrap": "the sliding-window ring is read one slot off once it has wrapped: the newest token is the oldest",
    "block_table_as_ids": "logical positions are used where physical slots are expected",
    "nan_in_masked_slot": "a masked slot's value is multiplied by its zero probability instead of being dropped",
}


def decode_with_fault(
    fault: DecodeFault,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    scale: float,
    sink: Tensor | None = None,
    split_size: int | None = None,
    planned_length: int | None = None,
    physical: Tensor | None = None,
    window: int = 128,
) -> Attended:
    """`sparse_decode` with one fault. k, v [S, D] or [B, S, D]; indices [B, K] with -1 for none.

    `planned_length` (stale_lengths): entries that the old plan knew; default: all but the last 64. `physical` [S]
    (block_table_as_ids): the slot that holds each logical position; k and v are laid out by it. `window`
    (window_wrap): the last `window` columns of `indices` are the sliding window, oldest first.
    """
    if fault not in DECODE_FAULTS:
        raise ValueError(f"decode fault {fault!r} is unknown; known: {', '.join(DECODE_FAULTS)}")
    K = indices.shape[1]
    if physical is not None and fault != "block_table_as_ids":
        indices = torch.where(indices >= 0, physical[indices.clamp_min(0).long()].to(indices.dtype), -1)
    if fault == "block_table_as_ids" and physical is None:
        raise ValueError("block_table_as_ids needs `physical`, the slot of each logical position")
    if fault == "stale_lengths":
        keep = max(1, K - 64) if planned_length is None else planned_length
        indices = torch.where(torch.arange(K, device=indices.device) < keep, indices, -1)
    elif fault == "garbage_padding":
        padding = torch.arange(-K % 64, device=indices.device, dtype=indices.dtype) % k.shape[-2]
        indices = torch.cat([torch.where(indices < 0, 0, indices), padding.expand(indices.shape[0], -1)], 1)
    elif fault == "window_wrap":
        head, tail = indices[:, : max(K - window, 0)], indices[:, max(K - window, 0) :]
        # the slot of the newest token still holds the one `window` tokens ago
        stale = torch.where(tail[:, :1] > 0, tail[:, :1] - 1, tail[:, :1])
        indices = torch.cat([head, tail[:, :-1], stale], 1)
    partial = attend_splits(q, k, v, indices, scale=scale, split_size=split_size)
    outs, lses = partial
    if fault == "nan_in_masked_slot":
        masked = (indices < 0).any(-1)  # [B]
        slot = v[..., 0, :].float() * 0.0  # what a masked slot's clamped address holds, times probability 0
        outs = outs + torch.where(masked[:, None, None], slot if slot.dim() == 1 else slot[:, None], 0.0)
    if fault == "sink_per_split" and sink is not None:
        with_sink = torch.logaddexp(lses, sink.float().expand_as(lses))
        outs = outs * (lses - with_sink).exp()[..., None]
        merged = merge_splits(outs, with_sink)
        return Attended(merged.out.to(q.dtype), merged.lse)
    if fault == "lse_base2":
        lses = lses / math.log(2.0)
    merged = merge_splits(outs, lses, sink)
    return Attended(merged.out.to(q.dtype), merged.lse)


@dataclass(frozen=True, kw_only=True)
class KlEstimate:
    """KL divergence estimated from the log-probabilities of tokens that were really drawn."""

    value: float
    """nats per token, k3 = mean(exp(d) - 1 - d)."""
    stderr: float | None
    """None with fewer than two tokens."""
    n_tokens: int


def prefill_decode_kl(logprob_prefill: Tensor, logprob_decode: Tensor) -> KlEstimate:
    """k3 estimate of KL(decode ‖ prefill) from natural log-probabilities [N] of tokens drawn by decode.

    d = prefill - decode; every term is non-negative, so noise does not cancel a fault. ValueError on unequal sizes or
    values that are not finite. Source: J. Schulman, "Approximating KL divergence"; sglang's kl_test_utils.
    """
    if logprob_prefill.shape != logprob_decode.shape or logprob_prefill.dim() != 1 or not logprob_prefill.numel():
        raise ValueError(
            f"log-probabilities of the same tokens are needed; got {list(logprob_prefill.shape)} and "
            f"{list(logprob_decode.shape)}"
        )
    d = logprob_prefill.double() - logprob_decode.double()
    if not bool(d.isfinite().all()):
        raise ValueError("a log-probability is not finite")
    terms = d.expm1() - d
    n = terms.numel()
    return KlEstimate(
        value=float(terms.mean()), stderr=float(terms.std(unbiased=True)) / math.sqrt(n) if n > 1 else None, n_tokens=n
    )


def logits_kl(base: Tensor, other: Tensor) -> Tensor:
    """KL(base ‖ other) of each row of logits [..., V], fp64 nats."""
    p, q = base.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


_DECODE_ONLY = Signature(below_onset=True, selection="untouched", grows_with_length=True, phases=("decode",))
_DECODE_FLAT = Signature(below_onset=True, selection="untouched", grows_with_length=False, phases=("decode",))

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="sink-per-split",
        part="sparse_attention",
        title="the attention sink enters the denominator once per split of the keys instead of once",
        sources=("deepseek-ai/FlashMLA tests/ref.py",),
        signature=_DECODE_ONLY,
        switch={"fault": "sink_per_split"},
    ),
    Fault(
        name="split-merge-base2",
        part="sparse_attention",
        title="splits are merged with base-2 lse read as natural logarithms",
        sources=("deepseek-ai/FlashMLA README",),
        signature=_DECODE_ONLY,
        switch={"fault": "lse_base2"},
    ),
    Fault(
        name="stale-split-lengths",
        part="sparse_attention",
        title="scheduler metadata of an earlier step: the newest entries are never read",
        sources=("deepseek-ai/FlashMLA README",),
        signature=_DECODE_FLAT,
        switch={"fault": "stale_lengths"},
    ),
    Fault(
        name="garbage-index-padding",
        part="sparse_attention",
        title="the index list is padded to a multiple of 64 with ids of other entries instead of -1",
        sources=("sgl-project/sglang 0.5.23 dsv4 backend",),
        signature=Signature(
            below_onset=True, selection="untouched", grows_with_length=False, phases=("decode",), in_indexer_topk=False
        ),
        switch={"fault": "garbage_padding"},
    ),
    Fault(
        name="window-ring-wrap",
        part="sparse_attention",
        title="the sliding-window ring is read one slot off once it has wrapped",
        sources=("ROCm/ATOM#1417", "sgl-project/sglang#30339"),
        signature=_DECODE_FLAT,
        switch={"fault": "window_wrap"},
    ),
    Fault(
        name="block-table-as-ids",
        part="sparse_attention",
        title="logical positions are used where physical slots are expected",
        sources=("sgl-project/sglang 0.5.23 SGLANG_DSA_FUSE_TOPK",),
        signature=_DECODE_ONLY,
        switch={"fault": "block_table_as_ids"},
    ),
    Fault(
        name="nan-in-masked-slot",
        part="sparse_attention",
        title="a masked slot's NaN is multiplied by probability zero instead of being dropped",
        sources=("deepseek-ai/FlashMLA tests/ref.py",),
        signature=_DECODE_FLAT,
        switch={"fault": "nan_in_masked_slot"},
    ),
    Fault(
        name="zero-tile-nan",
        part="sparse_attention",
        title="an all-zero 128-tile of a 656-byte KV row is stored with scale 0 and reads back as NaN",
        sources=("sgl-project/sglang 0.5.23 kernels/ops/quantization/dsa_quant_k_cache.py",),
        signature=Signature(
            below_onset=True, selection="untouched", grows_with_length=True, phases=("prefill", "decode")
        ),
        switch={"scale": "plain"},
    ),
)
