"""Mixture of experts as DeepSeek-V3/V3.2/V4 and GLM-5 define it and as serving engines compute it."""

from longrecall.kernels.moe.combine import moe_sum_reduce
from longrecall.kernels.moe.routing import TopK, gate_scores, hash_topk, topk

__all__ = ["TopK", "gate_scores", "hash_topk", "moe_sum_reduce", "topk"]
