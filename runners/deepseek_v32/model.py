"""DeepSeek-V3.2 as a trainable torch module: MLA, lightning indexer, sigmoid-gated MoE, at any size.

Written to be trained, not served: MLA is expanded to ordinary heads, all experts are computed and those not chosen are
weighted by zero (two matrix products a layer, fast where experts are small). The numbers are those of the released
model: interleaved rope in attention, half-split rope in the indexer, sums over index heads of w_h ReLU(q_h · k), the
routed output times `routed_scaling_factor` once. Parameter names are HuggingFace's; experts are stacked
(`mlp.experts.gate_up_proj` [E, 2F, C], `down_proj` [E, C, F]) and unstacked by `export.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrecall.kernels.indexer.rotation import Rope, Yarn, inverse_frequencies
from longrecall.runners.deepseek_v32.config import V32Config


def rope_of(config: V32Config) -> Rope:
    """The rotation of attention and indexer; the layout is the indexer's."""
    return Rope(
        dims=config.qk_rope_head_dim,
        theta=config.rope_theta,
        yarn=Yarn(factor=config.rope_factor, original_tokens=config.rope_original),
    )


def rope_tables(config: V32Config, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rope/2] with YaRN's frequencies; no factor on cos and sin."""
    angle = torch.arange(length, dtype=torch.float64)[:, None] * inverse_frequencies(rope_of(config)).double()
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rope_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, R]; pairs (0, 1), (2, 3), …; cos and sin [N, R/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rope_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, R]; pairs (i, i + R/2)."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


CONSTANT_CHANNELS = 8
LOOK_BACK, COPY, MATCH = 8.0, 2.0, 1.0
"""Sizes at the start: of queries and keys that look back, of what such a head writes, of queries that match."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class Indexer(nn.Module):
    def __init__(self, config: V32Config) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        self.wq_b = _linear(config.q_lora_rank, self.heads * self.dim)
        self.wk = _linear(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = _linear(config.hidden_size, self.heads)

    def forward(self, x: Tensor, latent_q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [N, H, D], k [N, D] after norm and rope, weights [N, H] with the scales (H D)^-1/2 folded in."""
        q = self.wq_b(latent_q).view(-1, self.heads, self.dim)
        k = self.k_norm(self.wk(x).float()).to(x.dtype)[:, None]
        q, k = (
            torch.cat((rope_half_split(t[..., : self.rope], cos, sin), t[..., self.rope :]), dim=-1) for t in (q, k)
        )
        weights = self.weights_proj(x).float() * (self.heads * self.dim) ** -0.5
        return q, k[:, 0], weights


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[T, S] fp32 of q [T, H, D], k [S, D], weights [T, H]."""
    dots = torch.einsum("thd,sd->ths", q, k.to(q.dtype)).float().relu()
    return torch.einsum("ths,th->ts", dots, weights)


class Attention(nn.Module):
    def __init__(self, config: V32Config) -> None:
        super().__init__()
        c = self.config = config
        heads, eps = c.num_attention_heads, c.rms_norm_eps
        self.q_a_proj = _linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, eps)
        self.q_b_proj = _linear(c.q_lora_rank, heads * c.head_dim)
        self.kv_a_proj_with_mqa = _linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, eps)
        self.kv_b_proj = _linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = _linear(heads * c.v_head_dim, c.hidden_size)
        self.indexer = Indexer(c)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q and k [N, H, 192], v [N, H, 128], and the query latent that the indexer shares."""
        c = self.config
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        latent_q = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(latent_q).view(-1, heads, c.head_dim)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, rope), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(-1, heads, nope + c.v_head_dim)
        k_rope = rope_interleaved(k_rope[:, None], cos, sin).expand(-1, heads, -1)
        q = torch.cat((q[..., :nope], rope_interleaved(q[..., nope:], cos, sin)), dim=-1)
        return q, torch.cat((kv[..., :nope], k_rope), dim=-1), kv[..., nope:], latent_q


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(hidden, intermediate), _linear(hidden, intermediate)
        self.down_proj = _linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    e_score_correction_bias: Tensor

    def __init__(self, config: V32Config) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor) -> Tensor:
        """[N, E]: the weight of each expert, 0 where it is not chosen; weights sum to 1."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        groups = choice.view(-1, c.n_group, c.n_routed_experts // c.n_group)
        best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        open_groups = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)
        choice = choice.masked_fill(open_groups.repeat_interleave(groups.shape[-1], dim=1) == 0, -torch.inf)
        chosen = torch.zeros_like(scores).scatter(1, choice.topk(c.num_experts_per_tok, dim=-1).indices, 1.0)
        kept = scores * chosen
        return kept / kept.sum(-1, keepdim=True)


class Experts(nn.Module):
    def __init__(self, config: V32Config) -> None:
        super().__init__()
        count, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        count, hidden, inner = self.down_proj.shape
        both = F.linear(x, self.gate_up_proj.view(-1, hidden)).view(-1, count, 2, inner)
        act = F.silu(both[:, :, 0]) * both[:, :, 1] * weights.to(both.dtype)[..., None]
        return F.linear(act.flatten(1), self.down_proj.transpose(0, 1).reshape(hidden, count * inner))


class MoE(nn.Module):
    def __init__(self, config: V32Config) -> None:
        super().__init__()
        self.factor = config.routed_scaling_factor
        self.gate = Gate(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output, and how often each expert was chosen [E]."""
        weights = self.gate(x)
        return self.experts(x, weights * self.factor) + self.shared_experts(x), (weights > 0).float().sum(0).detach()


class Layer(nn.Module):
    def __init__(self, config: V32Config, place: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = place < config.first_k_dense_replace
        self.mlp: MLP | MoE = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        normed = self.input_layernorm(x)
        return (normed, *self.self_attn.project(normed, cos, sin))

    def after(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn.o_proj(attended)
        out = self.mlp(self.post_attention_layernorm(x))
        if isinstance(out, tuple):
            return x + out[0], out[1]
        return x + out, out.new_zeros(0)


Select = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""(layer, q [B, S, H, D], k [B, S, D], weights [B, S, H]) -> bool [B, S, S] of what is attended to, or None: all."""


class V32Model(nn.Module):
    """The decoder with its embedding and head; `model.…` and `lm_head` as in the checkpoint."""

    def __init__(self, config: V32Config) -> None:
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config, place) for place in range(config.num_hidden_layers)),
                "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        self.lm_head = _linear(config.hidden_size, config.vocab_size)
        self._tables: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._compiled: list[tuple[Callable[..., Any], Callable[..., Any]]] | None = None

    @property
    def layers(self) -> list[Layer]:
        layers = self.model["layers"]
        assert isinstance(layers, nn.ModuleList)
        return [layer for layer in layers if isinstance(layer, Layer)]

    def initialise(self, seed: int) -> None:
        """Normal with fan_in^-1/2; what is added to the residual stream begins at a tenth of that.

        Eight channels of every embedding begin at the same constant, which gives projections without a bias one, and
        some heads begin with a purpose (`_look_back`): without, training stayed for thousands of steps where a value is
        drawn from those in sight (docs/v32.md).
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.named_parameters():
                if value.dim() < 2:
                    continue
                std = value.shape[-1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    std *= 0.1
                if name.startswith("lm_head") or name.endswith("gate.weight"):
                    std *= 0.3
                if "embed_tokens" in name:
                    std = 0.5
                value.copy_(torch.randn(value.shape, generator=generator) * std)
            embedding = self.model["embed_tokens"]
            assert isinstance(embedding, nn.Embedding)
            embedding.weight[:, :CONSTANT_CHANNELS] = 0.5
            self._look_back(generator)

    def _look_back(self, generator: torch.Generator) -> None:
        """Begin with what recall is made of: heads that look back, and heads that match what those have brought.

        Layer 0, heads 0 to 3: queries q0 and keys k0 that do not depend on the token meet by rope alone as
        sum_i cos(w_i (t - s - n)), largest at s = t - n; each copies what it sees, P e, to a place R_n of its own.
        Layer 1, head 0: this token against what stood 1 before (the token after an earlier occurrence); heads 1 and
        2: what stood 1 before against what stood 2 or 3 before ("of Ada is" finds "of Ada is 48213").
        """
        c, wide, nope = self.config, CONSTANT_CHANNELS, self.config.qk_nope_head_dim
        size, value = c.kv_lora_rank // 4, c.v_head_dim
        width = min(size, value, nope, c.q_lora_rank // 2)
        heads = min(4, c.num_attention_heads)
        bases = torch.linalg.qr(torch.randn(c.hidden_size, c.hidden_size, generator=generator)).Q
        own = bases[:width].clone()  # P [W, C]
        places = [
            torch.linalg.qr(torch.randn(c.hidden_size, width, generator=generator)).Q for _ in range(heads)
        ]  # R_n [C, W]

        first = self.layers[0].self_attn
        unit = 1.0 / wide  # each constant channel is about 1 after the norm
        first.kv_a_proj_with_mqa.weight[c.kv_lora_rank :] = 0.0
        first.kv_a_proj_with_mqa.weight[c.kv_lora_rank :: 2, :wide] = LOOK_BACK * unit
        first.kv_a_proj_with_mqa.weight[:width] = own
        first.q_a_proj.weight[:wide] = 0.0
        first.q_a_proj.weight[:wide, :wide] = unit
        angle = inverse_frequencies(rope_of(c)).float()
        # Pairs that turn slowly tell neighbours apart the least, and add to every score alike.
        turning = LOOK_BACK * (angle > 0.2).float()
        for head in range(heads):
            rows = first.q_b_proj.weight[head * c.head_dim : (head + 1) * c.head_dim]
            rows.zero_()
            turned = angle * (head + 1)
            rows[nope::2, :wide] = (turning * turned.cos() * unit)[:, None]
            rows[nope + 1 :: 2, :wide] = (-turning * turned.sin() * unit)[:, None]
            out = first.kv_b_proj.weight[head * (nope + value) + nope : (head + 1) * (nope + value)]
            out.zero_()
            out[:width, :width] = torch.eye(width)
            first.o_proj.weight[:, head * value : head * value + width] = COPY * places[head]

        if len(self.layers) < 2:
            return
        second = self.layers[1].self_attn
        half = c.q_lora_rank // 2
        second.q_a_proj.weight[:width] = own
        second.q_a_proj.weight[half : half + width] = places[0].T
        second.kv_a_proj_with_mqa.weight[:width] = own
        for place in range(min(3, heads)):
            second.kv_a_proj_with_mqa.weight[(place + 1) * size : (place + 1) * size + width] = places[place].T
        for head, (asks, answers) in enumerate([(0, 1), (1, 2), (1, 3)][: min(3, heads)]):
            rows = second.q_b_proj.weight[head * c.head_dim : (head + 1) * c.head_dim]
            rows.zero_()
            rows[:width, asks * half : asks * half + width] = MATCH * torch.eye(width)
            keys = second.kv_b_proj.weight[head * (nope + value) : head * (nope + value) + nope]
            keys.zero_()
            keys[:width, answers * size : answers * size + width] = torch.eye(width)

    def compile_parts(self) -> None:
        """Compile what is per token, for dense training alone, whose steps all have one size."""
        self._compiled = [(torch.compile(layer.before), torch.compile(layer.after)) for layer in self.layers]

    def positions(self, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of `rows` sequences of `length` tokens, flat."""
        key = (length, str(device))
        if key not in self._tables:
            self._tables[key] = rope_tables(self.config, length, device)
        cos, sin = self._tables[key]
        return cos.repeat(rows, 1), sin.repeat(rows, 1)

    def forward(
        self,
        ids: Tensor,
        *,
        select: Select | None = None,
        look: Callable[[int, Tensor, Tensor, Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Final hidden states [B, S, C] of ids [B, S], and of each MoE layer how often each expert was chosen.

        `select` chooses what each token attends to; `look` is shown (layer, x, query latent, q, k) of every layer,
        x and latent [B S, …], q and k [B, S, H, 192].
        """
        c = self.config
        rows, length = ids.shape
        cos, sin = self.positions(rows, length, ids.device)
        x = self.model["embed_tokens"](ids.flatten())
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        loads = []
        parts = self._compiled if torch.is_grad_enabled() and select is None and look is None else None
        for place, layer in enumerate(self.layers):
            before, after = parts[place] if parts is not None else (layer.before, layer.after)
            normed, q, k, v, latent_q = before(x, cos, sin)
            q, k, v = (t.view(rows, length, c.num_attention_heads, -1) for t in (q, k, v))
            if look is not None:
                look(place, normed, latent_q, q, k)
            mask = None
            if select is not None:
                with torch.no_grad():
                    iq, ik, iw = layer.self_attn.indexer(normed, latent_q, cos, sin)
                    mask = select(
                        place, iq.view(rows, length, *iq.shape[1:]), ik.view(rows, length, -1),
                        iw.view(rows, length, -1),
                    )  # fmt: skip
            attended = attend(q, k, v, mask, c.softmax_scale)
            x, load = after(x, attended.reshape(rows * length, -1))
            if load.numel():
                loads.append(load)
        return self.model["norm"](x).view(rows, length, -1), loads


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Causal attention [B, S, H, V]; `mask` [B, S, S] replaces causality. Values are padded to the keys' size: flash
    attention wants one head size."""
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    return out.transpose(1, 2)[..., :width]


def top_selection(topk: int, *, chunk: int = 512) -> Select:
    """The top `topk` visible tokens by index score; None where every context is at most that long."""

    def select(place: int, q: Tensor, k: Tensor, weights: Tensor) -> Tensor | None:
        rows, length = q.shape[:2]
        if length <= topk:
            return None
        mask = torch.ones(rows, length, length, dtype=torch.bool, device=q.device).tril_()
        for row in range(rows):
            for start in range(topk, length, chunk):
                end = min(start + chunk, length)
                scores = index_scores(q[row, start:end], k[row, :end], weights[row, start:end])
                scores = scores.masked_fill(~mask[row, start:end, :end], -torch.inf)
                chosen = torch.zeros_like(mask[row, start:end, :end])
                chosen.scatter_(1, scores.topk(topk, dim=1).indices, True)
                mask[row, start:end, :end] &= chosen
        return mask

    return select
