"""Sparse decode attention in fp64, one softmax over all entries: the ground truth."""

import torch
from torch import Tensor

from longrecall.kernels.sparse_attention.decode import Attended


def sparse_decode_ref(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float, sink: Tensor | None = None
) -> Attended:
    """`sparse_decode` head by head in fp64; out fp64 [B, H, Dv], lse fp64 [B, H] without the sink."""
    B, H, _ = q.shape
    out = torch.zeros(B, H, v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.full((B, H), float("inf"), dtype=torch.float64, device=q.device)
    for b in range(B):
        chosen = indices[b][indices[b] >= 0].long()
        if not len(chosen):
            continue
        keys = (k if k.dim() == 2 else k[b])[chosen].double()
        values = (v if v.dim() == 2 else v[b])[chosen].double()
        for h in range(H):
            logits = keys @ q[b, h].double() * scale
            denominator = logits if sink is None else torch.cat([logits, sink[h : h + 1].double()])
            out[b, h] = (logits - denominator.logsumexp(0)).exp() @ values
            lse[b, h] = logits.logsumexp(0)
    return Attended(out, lse)
