"""Sparse decode attention over selected entries, its KV row formats and its faults."""

from longrecall.kernels.sparse_attention.decode import Attended, merge_splits, sparse_decode

__all__ = ["Attended", "merge_splits", "sparse_decode"]
