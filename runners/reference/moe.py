"""The mixture of experts of one layer: gate, top-k (by token id in the hash layers), experts, combine, post-FFN norm.

    out = shared(x) + routed_scaling_factor * sum_k w_k expert_k(x)

Who applies the factor follows SGLang: `moe_sum_reduce` does, so no top-k may (`apply_routed_scaling_factor_on_output`
stays False). Gemma normalises the FFN's output, which would cancel a wrong factor; the statistic of that norm is
therefore the one of the nominal output, the factor applied once, whatever this build really applied.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from longrecall.kernels.moe import TopK as TopKOutput
from longrecall.kernels.moe import hash_topk, moe_sum_reduce, topk
from longrecall.runners.reference.config import ReferenceConfig

BLOCK_ROWS = 512
"""Rows of element-wise work at a time. GEMMs run over all rows of a batch; what stands between them reads them several
times, and more rows than this leave a core's caches between two passes."""


def blocks_of(rows: int) -> list[slice]:
    """Slices of at most BLOCK_ROWS rows."""
    return [slice(start, min(rows, start + BLOCK_ROWS)) for start in range(0, rows, BLOCK_ROWS)]


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """rsqrt(mean(x^2) + eps) over the last dimension of fp32 x, kept as a dimension of 1."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class HashTopK:
    """Experts by token id from a table; weights still from the gate."""

    def __init__(
        self, tid2eid: Tensor, *, routed_scaling_factor: float, apply_routed_scaling_factor_on_output: bool
    ) -> None:
        self.tid2eid = tid2eid
        self.routed_scaling_factor = routed_scaling_factor
        self.apply_routed_scaling_factor_on_output = apply_routed_scaling_factor_on_output

    def __call__(self, router_logits: Tensor, token_ids: Tensor) -> TopKOutput:
        return hash_topk(
            router_logits,
            token_ids,
            self.tid2eid,
            routed_scaling_factor=self.routed_scaling_factor,
            apply_routed_scaling_factor_on_output=self.apply_routed_scaling_factor_on_output,
        )


class TopK:
    """Experts by gate score; the correction bias selects and does not weigh."""

    def __init__(
        self,
        correction_bias: Tensor,
        num_topk: int,
        scoring_func: str,
        *,
        routed_scaling_factor: float,
        apply_routed_scaling_factor_on_output: bool,
    ) -> None:
        self.correction_bias = correction_bias
        self.num_topk = num_topk
        self.scoring_func = scoring_func
        self.routed_scaling_factor = routed_scaling_factor
        self.apply_routed_scaling_factor_on_output = apply_routed_scaling_factor_on_output

    def __call__(self, router_logits: Tensor, token_ids: Tensor) -> TopKOutput:
        del token_ids
        return topk(
            router_logits,
            self.correction_bias,
            self.num_topk,
            self.scoring_func,  # type: ignore[arg-type]
            routed_scaling_factor=self.routed_scaling_factor,
            apply_routed_scaling_factor_on_output=self.apply_routed_scaling_factor_on_output,
        )


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """W_d (gelu_tanh(W_g x) * W_u x) with gate_up [2F, C] (gate first), down [C, F]."""
    gate, up = gate_up.chunk(2)
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and len(x):
        # oneDNN applies the activation and the product to a GEMM's result in cache: gelu alone costs as much as a GEMM
        h = torch.ops.mkldnn._linear_pointwise(x, gate, None, "gelu", [], "tanh")
        h = torch.ops.mkldnn._linear_pointwise.binary(x, h, up, None, "mul")
    else:
        h = F.gelu(F.linear(x, gate), approximate="tanh") * F.linear(x, up)
    return F.linear(h, down)


class ReferenceMoE:
    """The FFN of one layer; call it with the normed input [T, C] and the token ids [T]."""

    def __init__(self, config: ReferenceConfig, layer_id: int, weights: dict[str, Tensor], norm_weight: Tensor) -> None:
        self.config = config
        self.routed_scaling_factor = config.routed_scaling_factor
        self.gate_weight = weights["gate.weight"]
        self.w13, self.w2 = weights["experts.w13_weight"], weights["experts.w2_weight"]
        self.shared_gate_up = weights["shared_experts.gate_up_proj.weight"]
        self.shared_down = weights["shared_experts.down_proj.weight"]
        self.norm_weight = norm_weight
        self.topk: HashTopK | TopK
        if layer_id < config.num_hash_layers:
            self.topk = HashTopK(
                weights["topk.tid2eid"],
                routed_scaling_factor=config.routed_scaling_factor,
                apply_routed_scaling_factor_on_output=False,
            )
        else:
            self.topk = TopK(
                weights["gate.e_score_correction_bias"],
                config.num_experts_per_tok,
                config.scoring_func,
                routed_scaling_factor=config.routed_scaling_factor,
                apply_routed_scaling_factor_on_output=False,
            )

    def experts(self, x: Tensor, topk_idx: Tensor) -> Tensor:
        """Outputs [T, K, C] of each token's experts: tokens sorted by expert, one GEMM pair per expert.

        An expert's rows are filled up to a multiple of 64 (16 when few): oneDNN compiles a kernel for each new number
        of rows, 3 to 7 ms where the product itself takes 1.
        """
        T, K = topk_idx.shape
        flat = topk_idx.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.config.n_routed_experts)
        step = torch.where(counts > 128, 64, 16)
        sizes = (counts + step - 1) // step * step
        shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
        slot = torch.arange(T * K, device=order.device) + shift.repeat_interleave(counts)
        rows = torch.zeros(int(sizes.sum()), dtype=order.dtype, device=order.device)
        rows[slot] = order // K
        parts = [
            gated_mlp(part, self.w13[expert], self.w2[expert])
            for expert, part in enumerate(x.index_select(0, rows).split(sizes.tolist()))
            if len(part)
        ]
        place = torch.empty_like(order)
        place[order] = slot
        return torch.cat(parts).index_select(0, place).view(T, K, -1)

    def __call__(self, x: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        """The layer's FFN output after Gemma's post-FFN norm, fp32, block by block (`blocks_of`)."""
        router_logits = F.linear(x.float(), self.gate_weight)
        topk_weights, topk_idx = self.topk(router_logits, token_ids)
        expert_out = self.experts(x, topk_idx)
        shared_out = gated_mlp(x, self.shared_gate_up, self.shared_down)
        # the gate weights sum to 1 before the factor: what this build applied, and what the experts were made for
        applied = topk_weights.sum(-1, keepdim=True) * self.routed_scaling_factor
        to_nominal = self.config.trained_routed_scaling_factor / applied
        for rows in blocks_of(len(x)):
            routed = moe_sum_reduce(expert_out[rows], topk_weights[rows], self.routed_scaling_factor).float()
            shared = shared_out[rows].float()
            scale = inverse_rms(torch.addcmul(shared, routed, to_nominal[rows]), self.config.rms_norm_eps)
            yield routed.add_(shared).mul_(scale).mul_(self.norm_weight)
