"""Faults of the routed scaling factor and of the SwiGLU clamp, with what each must do to the exponents of a layer.

`switch` holds arguments of `ScalingPlan` (and `fuse_shared` of `MoeLayer`); 2x and 0x name how often the factor acts
on the routed experts, letters follow the published cases. A factor acts at every length: its recall loss must already
be there below the onset of the sparse selection, which no key fault can do.
"""

from typing import NamedTuple

from longrecall.kernels.faults import Fault, Signature


class PredictedExponents(NamedTuple):
    """n in factor^n that `scale_exponent` must read off a layer with the fault; healthy: 1, 1, 0."""

    routed_hash: float
    routed_other: float
    shared: float = 0.0


_EVERYWHERE = Signature(below_onset=True, selection="untouched", grows_with_length=False, in_routed_experts=True)
_HASH_LAYERS = Signature(
    below_onset=True, selection="untouched", grows_with_length=False, layers="some", in_routed_experts=True
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="routed-scaling-2x-marlin",
        part="moe",
        title="2x A: the top-k folds the factor in and the NVFP4 marlin kernel multiplies again (sglang 0.5.13-0.5.16)",
        sources=("sgl-project/sglang#31762", "sgl-project/sglang#31353", "sgl-project/sglang#29931"),
        signature=_EVERYWHERE,
        switch={"hash": "both", "other": "both"},
    ),
    Fault(
        name="routed-scaling-2x-hash",
        part="moe",
        title="2x B: HashTopK learns to scale its output while the runner still does: hash layers only",
        sources=("sgl-project/sglang 0.5.14 srt/layers/moe/hash_topk.py",),
        signature=_HASH_LAYERS,
        switch={"hash": "both", "other": "reduce"},
    ),
    Fault(
        name="routed-scaling-2x-ktransformers",
        part="moe",
        title="2x C: the KTransformers MXFP4 wrapper and the model both multiply (1.5^2 = 2.25)",
        sources=("kvcache-ai/sglang#86",),
        signature=_EVERYWHERE,
        switch={"hash": "both", "other": "both"},
    ),
    Fault(
        name="routed-scaling-2x-rocm",
        part="moe",
        title="2x D: on ROCm without AITER the triton runner's sum-reduce and forward_normal both multiply",
        sources=("sgl-project/sglang#40584",),
        signature=_EVERYWHERE,
        switch={"hash": "both", "other": "both"},
    ),
    Fault(
        name="shared-slot-inverse",
        part="moe",
        title="2x E: the fused shared slot weighs 1/factor though the top-k already folded the factor in",
        sources=("sgl-project/sglang 0.5.23 srt/layers/moe/topk.py",),
        signature=_EVERYWHERE,
        switch={"hash": "topk", "other": "topk", "shared_slot": "inverse", "fuse_shared": True},
    ),
    Fault(
        name="shared-slot-one",
        part="moe",
        title="2x E, dual: the fused shared slot weighs 1 and the sum-reduce then multiplies the whole row",
        sources=("sgl-project/sglang 0.5.23 srt/layers/moe/topk.py",),
        signature=_EVERYWHERE,
        switch={"hash": "reduce", "other": "reduce", "shared_slot": "one", "fuse_shared": True},
    ),
    Fault(
        name="routed-scaling-0x-cutlass",
        part="moe",
        title="0x A: the FP8 cutlass runner never multiplies (GSM8K 0.832 -> 0.965 when fixed)",
        sources=("sgl-project/sglang#8364", "sgl-project/sglang#8770", "sgl-project/sglang#9088"),
        signature=_EVERYWHERE,
        switch={"hash": "neither", "other": "neither"},
    ),
    Fault(
        name="routed-scaling-0x-npu",
        part="moe",
        title="0x B: the NPU path of V4 never multiplies",
        sources=("sgl-project/sglang#31449", "sgl-project/sglang#29909"),
        signature=_EVERYWHERE,
        switch={"hash": "neither", "other": "neither"},
    ),
    Fault(
        name="routed-scaling-0x-aiter",
        part="moe",
        title="0x C: AITER is on, so nobody multiplies behind the triton runner on gfx942",
        sources=("sgl-project/sglang#40584",),
        signature=_EVERYWHERE,
        switch={"hash": "neither", "other": "neither"},
    ),
    Fault(
        name="routed-scaling-0x-hash",
        part="moe",
        title="0x D: AITER hash layers of sglang 0.5.12-0.5.17: neither the top-k nor the runner multiplies there",
        sources=("sgl-project/sglang#40584",),
        signature=_HASH_LAYERS,
        switch={"hash": "neither", "other": "reduce"},
    ),
    Fault(
        name="swiglu-clamp-dropped",
        part="moe",
        title="the experts run without V4's swiglu_limit",
        sources=("HYGON/sglang-das#118",),
        signature=_EVERYWHERE,
        switch={"clamp": False},
    ),
)

EXPONENTS: dict[str, PredictedExponents] = {
    "routed-scaling-2x-marlin": PredictedExponents(2, 2),
    "routed-scaling-2x-hash": PredictedExponents(2, 1),
    "routed-scaling-2x-ktransformers": PredictedExponents(2, 2),
    "routed-scaling-2x-rocm": PredictedExponents(2, 2),
    "shared-slot-inverse": PredictedExponents(1, 1, -1),
    "shared-slot-one": PredictedExponents(1, 1, 1),
    "routed-scaling-0x-cutlass": PredictedExponents(0, 0),
    "routed-scaling-0x-npu": PredictedExponents(0, 0),
    "routed-scaling-0x-aiter": PredictedExponents(0, 0),
    "routed-scaling-0x-hash": PredictedExponents(0, 1),
    "swiglu-clamp-dropped": PredictedExponents(1, 1),
}
"""What the exponents of each fault must read; the clamp leaves them alone and shows as a residual instead."""
