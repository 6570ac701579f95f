"""The DSA indexer in-process: key formats, rotations, score and top-k (torch; Triton only when a GPU asks for it)."""

from longrecall.kernels.indexer.formats import Packed, dequantize, fake_quantize, quantize
from longrecall.kernels.indexer.reference import indexer_logits_ref
from longrecall.kernels.indexer.rotation import hadamard
from longrecall.kernels.indexer.topk import index_topk, select_topk, select_topk_arbitrary, select_topk_truncating

__all__ = [
    "Packed",
    "dequantize",
    "fake_quantize",
    "hadamard",
    "index_topk",
    "indexer_logits_ref",
    "quantize",
    "select_topk",
    "select_topk_arbitrary",
    "select_topk_truncating",
]
