"""A whole MoE layer, with every way a serving engine has placed the routed scaling factor.

    out = factor^n * routed(x) + shared(x),   n = 1 when it is right

The factor may be applied by the top-k, by the sum-reduce, by both (n = 2) or by neither (n = 0), separately in hash
layers and in the others: the published double scaling came from a HashTopK that learnt to scale while the runner
still did. A shared expert fused as one more slot has its own two faults (`SharedSlot`). After hyper-connections and
norms such a fault is no rescale: the ratio of routed to shared changes.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longrecall.kernels.moe.combine import moe_sum_reduce
from longrecall.kernels.moe.experts import Experts, moe_experts, one_expert, swiglu
from longrecall.kernels.moe.formats import ExpertFormat, pack_experts
from longrecall.kernels.moe.presets import MoePreset
from longrecall.kernels.moe.routing import TopK, hash_topk, topk

Placement = Literal["topk", "reduce", "both", "neither"]
PLACEMENTS: tuple[Placement, ...] = ("topk", "reduce", "both", "neither")
SharedSlot = Literal["matched", "inverse", "one"]
"""Weight of a fused shared slot. matched: 1 when the top-k scales, else 1/factor, so that a later multiply of the row
leaves it at 1. inverse: always 1/factor (too small by the factor when the top-k scales). one: always 1 (too large by
the factor when the sum-reduce scales)."""


@dataclass(frozen=True, kw_only=True)
class ScalingPlan:
    """Where one build applies the factor."""

    hash: Placement = "reduce"
    other: Placement = "reduce"
    shared_slot: SharedSlot = "matched"
    clamp: bool = True
    """False: the SwiGLU limit is dropped."""

    def __post_init__(self) -> None:
        for name in (self.hash, self.other):
            if name not in PLACEMENTS:
                raise ValueError(f"placement {name!r} is unknown; known: {', '.join(PLACEMENTS)}")
        if self.shared_slot not in ("matched", "inverse", "one"):
            raise ValueError(f"shared_slot {self.shared_slot!r} is unknown; known: matched, inverse, one")


@dataclass(frozen=True, kw_only=True)
class MoeWeights:
    """Weights of one layer; the experts packed or plain."""

    gate: Tensor
    """[E, C]."""
    bias: Tensor | None
    """fp32 [E], selection only."""
    w13: Experts
    """[E, 2F, C], gate rows first."""
    w2: Experts
    """[E, C, F]."""
    shared_w13: Tensor | None
    """[2Fs, C]."""
    shared_w2: Tensor | None
    """[C, Fs]."""
    tid2eid: Tensor | None
    """int64 [vocabulary, K]: the layer is routed by token id."""


class Parts(NamedTuple):
    """The two addends of a layer's output before any factor, fp64 [T, C]."""

    routed: Tensor
    shared: Tensor | None


@dataclass(frozen=True, kw_only=True)
class MoeLayer:
    """One layer of a preset. Calling it gives [T, C] as the build with this plan would."""

    preset: MoePreset
    weights: MoeWeights
    plan: ScalingPlan = field(default_factory=ScalingPlan)
    fuse_shared: bool = False
    """The shared expert is one more slot of the routed experts (its F must equal theirs)."""
    backend: str = "auto"

    @property
    def is_hash(self) -> bool:
        return self.weights.tid2eid is not None

    @property
    def factor(self) -> float:
        return self.preset.routed_scaling_factor

    @property
    def placement(self) -> Placement:
        return self.plan.hash if self.is_hash else self.plan.other

    def route(self, x: Tensor, token_ids: Tensor | None, *, scaled: bool, fused: bool = False) -> TopK:
        """The top-k of this layer; `scaled`: with the factor applied on its output."""
        p, w = self.preset, self.weights
        logits = torch.nn.functional.linear(x.float(), w.gate.float())
        slots = 1 if fused else 0
        slot_weight = {"matched": None, "inverse": 1.0 / self.factor, "one": 1.0}[self.plan.shared_slot]
        if w.tid2eid is not None:
            if token_ids is None:
                raise ValueError("a hash-routed layer needs token_ids")
            return hash_topk(
                logits,
                token_ids,
                w.tid2eid,
                scoring=p.scoring,
                renormalize=p.renormalize,
                routed_scaling_factor=self.factor,
                apply_routed_scaling_factor_on_output=scaled,
                num_fused_shared_experts=slots,
                shared_slot_weight=slot_weight,
            )
        return topk(
            logits,
            w.bias,
            p.num_topk,
            p.scoring,
            num_groups=p.num_groups,
            topk_groups=p.topk_groups,
            group_score=p.group_score,
            renormalize=p.renormalize,
            routed_scaling_factor=self.factor,
            apply_routed_scaling_factor_on_output=scaled,
            num_fused_shared_experts=slots,
            shared_slot_weight=slot_weight,
        )

    def __call__(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """x [T, C] -> [T, C] in x's dtype."""
        w = self.weights
        limit = self.preset.swiglu_limit if self.plan.clamp else None
        reduce_factor = self.factor if self.placement in ("reduce", "both") else 1.0
        chosen = self.route(x, token_ids, scaled=self.placement in ("topk", "both"), fused=self.fuse_shared)
        w13, w2 = w.w13, w.w2
        if self.fuse_shared:
            if not (isinstance(w13, Tensor) and isinstance(w2, Tensor)):
                raise ValueError("a fused shared slot needs plain expert weights")
            if w.shared_w13 is None or w.shared_w2 is None or w.shared_w13.shape != w13.shape[1:]:
                raise ValueError("a fused shared slot needs a shared expert of the routed experts' size")
            w13, w2 = torch.cat([w13, w.shared_w13[None]]), torch.cat([w2, w.shared_w2[None]])
        rows = moe_experts(x, w13, w2, chosen, swiglu_limit=limit, weighted=False, backend=self.backend)
        out = moe_sum_reduce(rows, chosen.weights, reduce_factor)
        if self.fuse_shared or w.shared_w13 is None or w.shared_w2 is None:
            return out
        gate, up = (x @ w.shared_w13.to(x.dtype).T).chunk(2, -1)
        return out + swiglu(gate, up, limit) @ w.shared_w2.to(x.dtype).T

    def parts(self, x: Tensor, token_ids: Tensor | None = None) -> Parts:
        """Routed sum without the factor and shared output, in fp64, from these weights and the right definition."""
        w, limit = self.weights, self.preset.swiglu_limit
        chosen = self.route(x, token_ids, scaled=False)
        routed = x.new_zeros(x.shape, dtype=torch.float64)
        for expert in chosen.idx.unique().tolist():
            token, slot = (chosen.idx == expert).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ one_expert(w.w13, expert, torch.float64).T).chunk(2, -1)
            y = swiglu(gate, up, limit) @ one_expert(w.w2, expert, torch.float64).T
            routed.index_add_(0, token, y * chosen.weights[token, slot].double()[:, None])
        if w.shared_w13 is None or w.shared_w2 is None:
            return Parts(routed, None)
        gate, up = (x.double() @ w.shared_w13.double().T).chunk(2, -1)
        return Parts(routed, swiglu(gate, up, limit) @ w.shared_w2.double().T)


def random_layer(
    preset: MoePreset,
    generator: torch.Generator,
    *,
    hash_routed: bool = False,
    vocabulary: int = 512,
    fmt: ExpertFormat = "fp32",
    plan: ScalingPlan | None = None,
    fuse_shared: bool = False,
    dtype: torch.dtype = torch.float32,
) -> MoeLayer:
    """A layer with Gaussian weights of the usual 1/sqrt(fan-in) size, for tests, probes and measures."""

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    E, C, F = preset.num_experts, preset.hidden, preset.intermediate_hidden
    Fs = F * preset.num_shared_experts
    w13, w2 = normal(E, 2 * F, C), normal(E, C, F)
    table = torch.stack([torch.randperm(E, generator=generator)[: preset.num_topk] for _ in range(vocabulary)])
    return MoeLayer(
        preset=preset,
        weights=MoeWeights(
            gate=normal(E, C),
            bias=torch.randn(E, generator=generator) * 0.05 if preset.correction_bias else None,
            w13=w13 if fmt == "fp32" else pack_experts(w13, fmt),
            w2=w2 if fmt == "fp32" else pack_experts(w2, fmt),
            shared_w13=normal(2 * Fs, C) if Fs else None,
            shared_w2=normal(C, Fs) if Fs else None,
            tid2eid=table if hash_routed else None,
        ),
        plan=plan or ScalingPlan(),
        fuse_shared=fuse_shared,
    )
