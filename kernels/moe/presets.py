"""Shapes and rules of the mixture-of-experts layers of known models.

Sources: config_236B/config_671B of DeepSeek's repositories, DeepSeek-V4 Flash's inference config, transformers'
glm_moe_dsa. V4-Pro's factor rests on two independent secondary sources, its intermediate size on the parameter count
(1.6e12 ≈ 61 layers x 384 experts x 3 x 7168 x 3072); neither was read in its own config.
"""

from dataclasses import dataclass
from typing import Literal

from longrecall.kernels.moe.routing import GroupScore, Scoring


@dataclass(frozen=True, kw_only=True)
class MoePreset:
    """One model's MoE layer."""

    name: str
    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    """Of one routed expert."""
    scoring: Scoring
    routed_scaling_factor: float
    renormalize: bool = True
    """norm_topk_prob: the selected scores are divided by their sum."""
    correction_bias: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    group_score: GroupScore = "top2"
    num_shared_experts: int = 1
    """They run as one expert of num_shared_experts x intermediate_hidden."""
    swiglu_limit: float | None = None
    num_layers: int
    num_dense_layers: int = 0
    """Leading layers without experts."""
    num_hash_layers: int = 0
    """Leading MoE layers routed by token id."""
    expert_format: Literal["bf16", "fp8_block128", "fp8_block128_ue8m0", "mxfp4"] = "bf16"
    """How the published checkpoint stores the experts."""


PRESETS: dict[str, MoePreset] = {
    preset.name: preset
    for preset in (
        MoePreset(
            name="v2",
            num_experts=160,
            num_topk=6,
            hidden=5120,
            intermediate_hidden=1536,
            scoring="softmax",
            routed_scaling_factor=16.0,
            renormalize=False,
            correction_bias=False,
            num_groups=8,
            topk_groups=3,
            group_score="max",
            num_shared_experts=2,
            num_layers=60,
            num_dense_layers=1,
        ),
        MoePreset(
            name="v3",
            num_experts=256,
            num_topk=8,
            hidden=7168,
            intermediate_hidden=2048,
            scoring="sigmoid",
            routed_scaling_factor=2.5,
            num_groups=8,
            topk_groups=4,
            num_layers=61,
            num_dense_layers=3,
            expert_format="fp8_block128",
        ),
        MoePreset(
            name="v3.2",
            num_experts=256,
            num_topk=8,
            hidden=7168,
            intermediate_hidden=2048,
            scoring="sigmoid",
            routed_scaling_factor=2.5,
            num_groups=8,
            topk_groups=4,
            num_layers=61,
            num_dense_layers=3,
            expert_format="fp8_block128_ue8m0",
        ),
        MoePreset(
            name="v4-flash",
            num_experts=256,
            num_topk=6,
            hidden=4096,
            intermediate_hidden=2048,
            scoring="sqrtsoftplus",
            routed_scaling_factor=1.5,
            swiglu_limit=10.0,
            num_layers=43,
            num_hash_layers=3,
            expert_format="mxfp4",
        ),
        MoePreset(
            name="v4-pro",
            num_experts=384,
            num_topk=6,
            hidden=7168,
            intermediate_hidden=3072,
            scoring="sqrtsoftplus",
            routed_scaling_factor=2.5,
            swiglu_limit=10.0,
            num_layers=61,
            num_hash_layers=3,
            expert_format="mxfp4",
        ),
        MoePreset(
            name="glm-5",
            num_experts=256,
            num_topk=8,
            hidden=6144,
            intermediate_hidden=2048,
            scoring="sigmoid",
            routed_scaling_factor=2.5,
            num_layers=78,
            num_dense_layers=3,
        ),
    )
}


def preset(name: str) -> MoePreset:
    """The preset of that name; ValueError naming the known ones."""
    if name not in PRESETS:
        raise ValueError(f"no MoE preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
