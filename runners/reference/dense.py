"""Gemma 3 270M as published: one residual stream, dense FFN, dense attention. What the reference build must equal.

Batched sequences of one length, for training the indexer on a GPU and for the tests of function preservation; it has no
cache and no packing. Weights: the GGUF's tensors, or a reference model folder folded back (`fold_experts`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longrecall.runners.reference.config import ReferenceConfig
from longrecall.runners.reference.convert import unpaired

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer, h [B, T, C], q [B, H, T, D], k [B, T, D], v [B, T, D]) → [B, H, T, D] for the full-attention layers."""


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """What a full-attention layer's indexer sees and imitates."""

    h: Tensor
    """[B, T, C] after the input norm."""
    q: Tensor
    """[B, H, T, D] after norm and rope."""
    k: Tensor
    """[B, T, D] after norm and rope."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, result in x's dtype."""
    y = x.float()
    return (y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_() * weight).to(x.dtype)


def rope(x: Tensor, theta: float) -> Tensor:
    """Half-split rope of x [..., T, D] at positions 0..T-1."""
    dim = x.shape[-1]
    inverse = theta ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., : dim // 2].float(), x[..., dim // 2 :].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def causal_attention(layer: int, h: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention with the one key head shared by all query heads."""
    del layer, h
    heads = q.shape[1]
    return F.scaled_dot_product_attention(
        q, k[:, None].expand(-1, heads, -1, -1), v[:, None].expand(-1, heads, -1, -1), is_causal=True
    )


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Each query sees the last `window` tokens, itself included; work is linear in T."""
    B, H, T, D = q.shape
    pad = -T % window
    blocks = (T + pad) // window
    q = F.pad(q, (0, 0, 0, pad)).view(B, H, blocks, window, D).transpose(1, 2).flatten(0, 1)  # [B blocks, H, W, D]
    k, v = (F.pad(x, (0, 0, window, pad)).unfold(1, 2 * window, window).transpose(2, 3).flatten(0, 1) for x in (k, v))
    distance = torch.arange(window, device=q.device)[:, None] + window - torch.arange(2 * window, device=q.device)
    seen = (distance >= 0) & (distance < window)
    before_start = torch.arange(2 * window, device=q.device) < window
    first = torch.arange(B * blocks, device=q.device) % blocks == 0
    mask = (seen[None] & ~(first[:, None, None] & before_start))[:, None]
    k, v = (x[:, None].expand(-1, H, -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


class DenseGemma:
    """Weights by the GGUF's names, matrices in one dtype, norms in fp32."""

    def __init__(self, config: ReferenceConfig, raw: dict[str, Tensor], *, device: str, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.w = {n: t.to(device, dtype if t.ndim == 2 else torch.float32) for n, t in raw.items()}
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5).bfloat16())

    def hidden(
        self,
        tokens: Tensor,
        *,
        attend: Attend = causal_attention,
        seen: dict[int, LayerInput] | None = None,
        last_layer: int | None = None,
    ) -> Tensor:
        """tokens [B, T] → final normed hidden states [B, T, C].

        `seen` collects the inputs of the full-attention layers; `last_layer` stops after that layer's queries and keys
        are known (the result is then of no use).
        """
        c, w = self.config, self.w
        eps, heads, dim = c.rms_norm_eps, c.num_attention_heads, c.head_dim
        x = (w["token_embd.weight"][tokens].float() * self.embed_scale).to(self.dtype)
        for layer in range(c.num_hidden_layers):
            b = f"blk.{layer}."
            full = layer in c.full_attention_layers
            h = norm(x, w[b + "attn_norm.weight"], eps)
            q = F.linear(h, w[b + "attn_q.weight"]).unflatten(-1, (heads, dim)).transpose(1, 2)
            k, v = F.linear(h, w[b + "attn_k.weight"]), F.linear(h, w[b + "attn_v.weight"])
            theta = c.rope_theta if full else c.rope_local_theta
            q = rope(norm(q, w[b + "attn_q_norm.weight"], eps), theta)
            k = rope(norm(k, w[b + "attn_k_norm.weight"], eps), theta)
            if full and seen is not None:
                seen[layer] = LayerInput(h=h, q=q, k=k)
            if layer == last_layer:
                return x
            out = attend(layer, h, q, k, v) if full else window_attention(q, k, v, c.sliding_window)
            out = F.linear(out.transpose(1, 2).flatten(2), w[b + "attn_output.weight"])
            x = x + norm(out, w[b + "post_attention_norm.weight"], eps)
            h = norm(x, w[b + "ffn_norm.weight"], eps)
            gate, up = F.linear(h, w[b + "ffn_gate.weight"]), F.linear(h, w[b + "ffn_up.weight"])
            out = F.linear(F.gelu(gate, approximate="tanh") * up, w[b + "ffn_down.weight"])
            x = x + norm(out, w[b + "post_ffw_norm.weight"], eps)
        return norm(x, w["output_norm.weight"], eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [..., rows of the embedding]."""
        return F.linear(hidden, self.w["token_embd.weight"]).float()


def fold_experts(weights: dict[str, Tensor], config: ReferenceConfig) -> dict[str, Tensor]:
    """The dense model inside a reference model's weights: shared expert beside the mean of the routed experts."""
    raw = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    heads, dim = config.num_attention_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        b, p = f"blk.{layer}.", f"model.layers.{layer}."
        q, k, v = weights[p + "self_attn.qkv_proj.weight"].split([heads * dim, dim, dim])
        raw |= {b + "attn_q.weight": unpaired(q, dim), b + "attn_k.weight": unpaired(k, dim), b + "attn_v.weight": v}
        shared = weights[p + "mlp.shared_experts.gate_up_proj.weight"].float()
        routed = weights[p + "mlp.experts.w13_weight"].float().mean(0)
        shared_gate, shared_up = shared.chunk(2)
        routed_gate, routed_up = routed.chunk(2)
        gate, up = torch.cat((shared_gate, routed_gate)), torch.cat((shared_up, routed_up))
        down = torch.cat(
            (
                weights[p + "mlp.shared_experts.down_proj.weight"].float(),
                weights[p + "mlp.experts.w2_weight"].float().mean(0) * config.trained_routed_scaling_factor,
            ),
            1,
        )
        raw |= {b + "ffn_gate.weight": gate, b + "ffn_up.weight": up, b + "ffn_down.weight": down}
        for ours, theirs in (
            ("self_attn.o_proj", "attn_output"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ):
            raw[f"{b}{theirs}.weight"] = weights[f"{p}{ours}.weight"]
        for name in ("q_norm", "k_norm"):
            raw[f"{b}attn_{name}.weight"] = unpaired(weights[f"{p}self_attn.{name}.weight"], dim)
    return raw
