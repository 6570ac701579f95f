"""Sparse decode attention over selected entries, its KV row formats and its faults."""

from longrecall.kernels.sparse_attention.decode import (
    Attended,
    attend_splits,
    merge_splits,
    sparse_decode,
    union_decode,
)
from longrecall.kernels.sparse_attention.faults import (
    DECODE_FAULTS,
    KlEstimate,
    decode_with_fault,
    logits_kl,
    prefill_decode_kl,
)
from longrecall.kernels.sparse_attention.rows import pack_pages, pack_rows, unpack_pages, unpack_rows

__all__ = [
    "DECODE_FAULTS",
    "Attended",
    "KlEstimate",
    "attend_splits",
    "decode_with_fault",
    "logits_kl",
    "merge_splits",
    "pack_pages",
    "pack_rows",
    "prefill_decode_kl",
    "sparse_decode",
    "union_decode",
    "unpack_pages",
    "unpack_rows",
]
