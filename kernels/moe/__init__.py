"""Mixture of experts as DeepSeek-V2/V3/V3.2/V4 and GLM-5 define it and as serving engines compute it."""

from longrecall.kernels.moe.combine import moe_sum_reduce
from longrecall.kernels.moe.experts import moe_experts, swiglu
from longrecall.kernels.moe.exponent import Exponent, LayerExponent, combine_layers, fit_parts, scale_exponent
from longrecall.kernels.moe.formats import EXPERT_FORMATS, PackedExperts, pack_experts, unpack_experts
from longrecall.kernels.moe.layer import MoeLayer, MoeWeights, Parts, ScalingPlan
from longrecall.kernels.moe.presets import PRESETS, MoePreset, preset
from longrecall.kernels.moe.routing import TopK, gate_scores, hash_topk, topk

__all__ = [
    "EXPERT_FORMATS",
    "PRESETS",
    "Exponent",
    "LayerExponent",
    "MoeLayer",
    "MoePreset",
    "MoeWeights",
    "PackedExperts",
    "Parts",
    "ScalingPlan",
    "TopK",
    "combine_layers",
    "fit_parts",
    "gate_scores",
    "hash_topk",
    "moe_experts",
    "moe_sum_reduce",
    "pack_experts",
    "preset",
    "scale_exponent",
    "swiglu",
    "topk",
    "unpack_experts",
]
