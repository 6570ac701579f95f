"""Expert selection: gate scores, `topk` (StandardTopK) and `hash_topk` (HashTopK of DeepSeek-V4).

    z = x W_g^T;  s = sigmoid(z) | softmax(z) | sqrt(softplus(z))
    selected = the K experts with the largest s + bias (bias selects, it never weighs); V3 first keeps the groups whose
               two best s + bias sum highest; a hash layer takes tid2eid[token] instead
    w = s[selected] / (sum of them + eps), times routed_scaling_factor when it is applied on the output of the top-k

The factor belongs on the routed experts exactly once: here (`apply_routed_scaling_factor_on_output=True`) or in
`moe_sum_reduce`, never in both. Sources: deepseek-ai/DeepSeek-V3.2-Exp inference/model.py (Gate), DeepSeek-V4
inference/model.py, sglang 0.5.23 srt/layers/moe/topk.py and hash_topk.py.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scoring = Literal["sigmoid", "softmax", "sqrtsoftplus"]
GroupScore = Literal["top2", "max"]
"""What ranks the groups: the sum of a group's two best choices (V3 with a correction bias) or its best one (V2)."""

RENORM_EPS_SGLANG = 1e-20
"""sglang and transformers add this to the sum of the selected scores; DeepSeek's own demo adds nothing (0.0)."""

_SORT_UP_TO = 64
"""Below this many experts one stable sort is faster than torch.topk with a check for ties."""


class TopK(NamedTuple):
    """What a gate hands to the experts."""

    weights: Tensor
    """fp32 [T, K], plus one column per fused shared expert."""
    idx: Tensor
    """int64 [T, K]: experts in falling order of s + bias (a hash layer: table order)."""


def gate_scores(logits: Tensor, scoring: Scoring) -> Tensor:
    """fp32 scores of every expert, same shape as `logits` [T, E]."""
    z = logits.float()
    if scoring == "sqrtsoftplus":
        # softplus = max(z, 0) + log1p(exp(-|z|)), the form of sglang's kernel: no threshold, exact for large |z|
        return z.abs().neg_().exp_().log1p_().add_(z.clamp_min(0)).sqrt_()
    if scoring == "sigmoid":
        return z.sigmoid()
    if scoring == "softmax":
        return z.softmax(-1)
    raise ValueError(f"scoring is {scoring!r}; known: sigmoid, softmax, sqrtsoftplus")


def _largest(choice: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the largest entries; equal scores go to the lower index (torch.topk leaves that open)."""
    if choice.shape[-1] <= _SORT_UP_TO:
        return choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    values, idx = choice.topk(k, dim=-1, sorted=True)
    tied = (values[:, 1:] == values[:, :-1]).any(-1) | ((choice >= values[:, -1:]).sum(-1) != k)
    if bool(tied.any()):
        idx[tied] = choice[tied].sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return idx


def _keep_groups(choice: Tensor, num_groups: int, topk_groups: int, group_score: GroupScore) -> Tensor:
    """`choice` with the experts outside the kept groups at -inf."""
    T, E = choice.shape
    grouped = choice.view(T, num_groups, E // num_groups)
    best = 1 if group_score == "max" else min(2, E // num_groups)
    group_scores = grouped.topk(best, dim=-1).values.sum(-1)  # [T, G]
    kept = _largest(group_scores, topk_groups)
    mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)  # True: dropped
    return grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).view(T, E)


def _weigh(
    scores: Tensor,
    idx: Tensor,
    num_experts: int,
    *,
    renormalize: bool,
    eps: float,
    routed_scaling_factor: float,
    apply_routed_scaling_factor_on_output: bool,
    num_fused_shared_experts: int,
    shared_slot_weight: float | None,
) -> TopK:
    weights = scores
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    if apply_routed_scaling_factor_on_output and routed_scaling_factor != 1.0:
        weights = weights * routed_scaling_factor
    if num_fused_shared_experts:
        if shared_slot_weight is None:
            # a later multiply of the whole row must leave the shared expert at 1
            shared_slot_weight = 1.0 if apply_routed_scaling_factor_on_output else 1.0 / routed_scaling_factor
        T = idx.shape[0]
        shared_idx = num_experts + torch.arange(num_fused_shared_experts, device=idx.device, dtype=idx.dtype)
        weights = torch.cat([weights, weights.new_full((T, num_fused_shared_experts), shared_slot_weight)], -1)
        idx = torch.cat([idx, shared_idx.expand(T, -1)], -1)
    return TopK(weights, idx)


def topk(
    gate_logits: Tensor,
    bias: Tensor | None,
    num_topk: int,
    scoring: Scoring = "sqrtsoftplus",
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: GroupScore = "top2",
    renormalize: bool = True,
    eps: float = RENORM_EPS_SGLANG,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    num_fused_shared_experts: int = 0,
    shared_slot_weight: float | None = None,
) -> TopK:
    """Select `num_topk` experts per token and weigh them: gate_logits [T, E] -> (weights, idx), each [T, K].

    `bias` [E] is added for the selection only. Equal scores go to the lower index. With fused shared experts,
    columns K.. hold experts E, E+1, … at `shared_slot_weight` (None: the right one, 1 or 1/factor).
    ValueError when the sizes do not fit.
    """
    E = gate_logits.shape[1]
    if not 1 <= num_topk <= E:
        raise ValueError(f"num_topk is {num_topk}; it must be between 1 and the {E} experts of gate_logits")
    if num_groups < 1 or E % num_groups or not 1 <= topk_groups <= num_groups:
        raise ValueError(f"{topk_groups} of {num_groups} groups do not fit {E} experts")
    if topk_groups * (E // num_groups) < num_topk:
        raise ValueError(f"{topk_groups} groups of {E // num_groups} experts hold fewer than num_topk = {num_topk}")
    scores = gate_scores(gate_logits, scoring)
    choice = scores if bias is None else scores + bias.float()
    if topk_groups < num_groups:
        choice = _keep_groups(choice, num_groups, topk_groups, group_score)
    idx = _largest(choice, num_topk)
    return _weigh(
        scores.gather(1, idx),
        idx,
        E,
        renormalize=renormalize,
        eps=eps,
        routed_scaling_factor=routed_scaling_factor,
        apply_routed_scaling_factor_on_output=apply_routed_scaling_factor_on_output,
        num_fused_shared_experts=num_fused_shared_experts,
        shared_slot_weight=shared_slot_weight,
    )


def hash_topk(
    gate_logits: Tensor,
    token_ids: Tensor,
    tid2eid: Tensor,
    *,
    scoring: Scoring = "sqrtsoftplus",
    renormalize: bool = True,
    eps: float = RENORM_EPS_SGLANG,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    num_fused_shared_experts: int = 0,
    shared_slot_weight: float | None = None,
) -> TopK:
    """Experts by token id: idx = tid2eid[token_ids]; the weights still come from the gate scores.

    gate_logits [T, E], token_ids int [T], tid2eid int [vocabulary, K] -> (weights fp32 [T, K], idx int64 [T, K]).
    ValueError when the table names an expert or is asked for a token that does not exist (checked on the CPU only).
    """
    T, E = gate_logits.shape
    if token_ids.shape != (T,):
        raise ValueError(f"token_ids has shape {tuple(token_ids.shape)}; gate_logits has {T} rows")
    if T and token_ids.device.type == "cpu":
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= tid2eid.shape[0]:
            raise ValueError(f"token id {low if low < 0 else high} is outside the {tid2eid.shape[0]} rows of tid2eid")
    idx = tid2eid[token_ids].long()
    if T and idx.device.type == "cpu" and (int(idx.min()) < 0 or int(idx.max()) >= E):
        raise ValueError(f"tid2eid names an expert outside 0..{E - 1}")
    if scoring == "softmax":
        chosen = gate_scores(gate_logits, scoring).gather(1, idx)
    else:
        chosen = gate_scores(gate_logits.gather(1, idx), scoring)  # elementwise: score the chosen ones alone
    return _weigh(
        chosen,
        idx,
        E,
        renormalize=renormalize,
        eps=eps,
        routed_scaling_factor=routed_scaling_factor,
        apply_routed_scaling_factor_on_output=apply_routed_scaling_factor_on_output,
        num_fused_shared_experts=num_fused_shared_experts,
        shared_slot_weight=shared_slot_weight,
    )
