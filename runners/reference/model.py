"""The reference model: Gemma 3 270M with DSA indexer, mixture of experts and hyper-connections, for a CPU or one GPU.

Prefill attends with a mask over dense keys; decode gathers the selected entries and merges splits by fp32 log-sum-exp,
a code path of its own, as in real engines. Sequences are packed: every GEMM runs once over all tokens of a batch.

    model = ReferenceModel.load(reference_folder())
    cache = model.new_cache()
    (logits,) = model.prefill([Chunk(tokens=[2, 1599], cache=cache, logits="last")])
    logits = model.decode([int(logits[0].argmax())], [cache])
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longrecall.kernels.indexer import indexer_logits_ref, select_topk
from longrecall.kernels.mhc import Precision, mhc_coefficients, mhc_mix, mhc_post
from longrecall.kernels.sparse_attention import sparse_decode
from longrecall.runners.reference.attention import (
    Job,
    Member,
    attend,
    columns_of,
    group_members,
    plan_jobs,
    selection_mask,
)
from longrecall.runners.reference.cache import SequenceCache
from longrecall.runners.reference.config import ReferenceConfig, ReferenceModelError
from longrecall.runners.reference.indexer import Indexer, load_indexers
from longrecall.runners.reference.interface import Chunk
from longrecall.runners.reference.interface import SequenceCache as CacheProtocol
from longrecall.runners.reference.moe import ReferenceMoE, blocks_of, inverse_rms

log = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"

MHC_PRECISION: Precision = "fp32"
"""Arithmetic of the hyper-connections' mixing coefficients."""

DECODE_SPLIT_SIZE = 256
"""Selected entries per split of the decode attention; splits are merged in fp32."""

DecodeBackend = Literal["sparse", "dense"]
"""sparse: as real engines decode. dense: by prefill's code, to tell a fault of the decode kernel from all others."""


class _Rope:
    """cos and sin of one batch of positions, fp32 [T, D/2]."""

    def __init__(self, positions: Tensor, dim: int, theta: float) -> None:
        inverse = theta ** -(torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
        angles = positions.float()[:, None] * inverse
        self.cos, self.sin = angles.cos(), angles.sin()
        self.turn = torch.complex(self.cos, self.sin)


@dataclass
class _Batch:
    """What one forward pass knows of its packed rows."""

    members: list[Member]
    token_ids: Tensor
    rope_global: _Rope
    rope_local: _Rope
    rope_index: _Rope
    jobs_global: list[Job]
    jobs_local: list[Job]
    decode: bool
    sparse: bool
    """Decode gathers the selected entries; else it masks all keys, as prefill does."""
    indexer_topk: list[Tensor] | None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 RMSNorm over the last dimension; `weight` is the whole factor (Gemma's 1 + w)."""
    return (x * inverse_rms(x, eps)).mul_(weight)


def rotate_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """Rope of contiguous fp32 x [T, N, D] whose dimensions lie in pairs, in place; turn complex [T, D/2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    pairs.mul_(turn[:, None])
    return x


class _Part:
    """One sub-layer between its hyper-connections: attention or FFN of one layer."""

    def __init__(
        self,
        config: ReferenceConfig,
        weights: dict[str, Tensor],
        name: str,
        dtype: torch.dtype,
        norm_weight: Tensor,
        run: "Callable[[Tensor, _Batch], Iterator[Tensor]]",
    ) -> None:
        self.config, self.dtype, self.norm_weight, self.run = config, dtype, norm_weight, run
        self.fn, self.scale, self.base = (weights[f"hc_{name}_{part}"] for part in ("fn", "scale", "base"))

    def enter(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Of one block of streams [rows, n, C]: the normed input [rows, C], the logits of its mixing coefficients."""
        u, logits = mhc_mix(streams, self.fn, self.scale, self.base, precision=MHC_PRECISION)
        return rms_norm(u, self.norm_weight, self.config.rms_norm_eps).to(self.dtype), logits

    def coefficients(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """post [T, n] and comb [T, n, n] for this part's output."""
        c = self.config
        return mhc_coefficients(logits, c.hc_mult, sinkhorn_steps=c.hc_sinkhorn_iters, precision=MHC_PRECISION)


class _Layer:
    """One transformer layer."""

    def __init__(
        self, config: ReferenceConfig, layer_id: int, weights: dict[str, Tensor], indexer: Indexer | None
    ) -> None:
        self.config, self.layer_id = config, layer_id
        self.indexer = indexer
        self.index_slot = config.full_attention_layers.index(layer_id) if indexer else -1
        self.qkv, self.o = weights["self_attn.qkv_proj.weight"], weights["self_attn.o_proj.weight"]
        heads = [weights["self_attn.q_norm.weight"]] * config.num_attention_heads
        self.qk_norm = torch.stack([*heads, weights["self_attn.k_norm.weight"]])  # [H + 1, D]
        self.input_norm = weights["input_layernorm.weight"]
        self.post_attention_norm = weights["post_attention_layernorm.weight"]
        self.pre_ffn_norm = weights["pre_feedforward_layernorm.weight"]
        own = {name.removeprefix("mlp."): w for name, w in weights.items() if name.startswith("mlp.")}
        self.mlp = ReferenceMoE(config, layer_id, own, weights["post_feedforward_layernorm.weight"])
        self.parts = [
            _Part(config, weights, "attn", self.qkv.dtype, self.input_norm, self.attention),
            _Part(config, weights, "ffn", self.qkv.dtype, self.pre_ffn_norm, self.ffn),
        ]
        self.scale = config.head_dim**-0.5

    def attention(self, h: Tensor, batch: _Batch) -> Iterator[Tensor]:
        """Attention of the normed input [T, C], after its post-norm: fp32, block by block (`blocks_of`)."""
        out = self._attention(h, batch)
        for rows in blocks_of(len(out)):
            yield rms_norm(out[rows].float(), self.post_attention_norm, self.config.rms_norm_eps)

    def ffn(self, h: Tensor, batch: _Batch) -> Iterator[Tensor]:
        """The experts' output for the normed input [T, C], after its post-norm, likewise."""
        return self.mlp(h, batch.token_ids)

    def _attention(self, h: Tensor, batch: _Batch) -> Tensor:
        c = self.config
        heads, dim = c.num_attention_heads, c.head_dim
        rope = batch.rope_global if self.indexer else batch.rope_local
        qkv = F.linear(h, self.qkv)
        qk, v = qkv[:, : (heads + 1) * dim].unflatten(1, (heads + 1, dim)), qkv[:, (heads + 1) * dim :]
        for rows in blocks_of(len(h)):
            turned = rotate_pairs(rms_norm(qk[rows].float(), self.qk_norm, c.rms_norm_eps), rope.turn[rows])
            qk[rows] = turned.to(h.dtype)
        q, k = qk[:, :heads], qk[:, heads]
        index_k = self.indexer.keys(h, batch.rope_index.cos, batch.rope_index.sin) if self.indexer else None
        for member in batch.members:
            rows = slice(member.row, member.row + member.tokens)
            block = member.cache.tail
            assert block is not None
            at = member.cache.tail_length
            block.k[self.layer_id, at : at + member.tokens] = k[rows]
            block.v[self.layer_id, at : at + member.tokens] = v[rows]
            if index_k is not None:
                block.index_k[self.index_slot, at : at + member.tokens] = index_k[rows]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.indexer is None:
            for job in batch.jobs_local:
                rows = slice(job.row, job.row + job.rows)
                keys, values = job.gather("k", self.layer_id), job.gather("v", self.layer_id)
                out[rows] = attend(q[rows], keys, values, job.wide_mask, self.scale)
        else:
            self._selected_attention(q, h, out, batch)
        return F.linear(out.reshape(-1, heads * dim), self.o)

    def _selected_attention(self, q: Tensor, h: Tensor, out: Tensor, batch: _Batch) -> None:
        """Attend to what the indexer selects: a mask in prefill, gathered entries in decode."""
        assert self.indexer is not None
        longest = max(m.start + m.tokens for m in batch.members)
        needed = longest > self.indexer.topk or batch.decode or batch.indexer_topk is not None
        index_q, weights = (
            self.indexer.queries(h, batch.rope_index.cos, batch.rope_index.sin) if needed else (None, None)
        )
        captured = []
        for job in batch.jobs_global:
            rows = slice(job.row, job.row + job.rows)
            selected = None
            if index_q is not None and weights is not None:
                if batch.decode:
                    selected = self._select_branches(job, index_q[rows], weights[rows])
                else:
                    selected = torch.cat([self._select(m, index_q, weights) for m in job.members])
                captured.append(selected)
            keys, values = job.gather("k", self.layer_id), job.gather("v", self.layer_id)
            if batch.decode and batch.sparse:
                assert selected is not None
                columns = torch.cat(
                    [columns_of(job, n, selected[n : n + 1]) for n in range(len(job.members))]
                ).masked_fill_(selected < 0, -1)
                attended = sparse_decode(q[rows], keys, values, columns, scale=self.scale, split_size=DECODE_SPLIT_SIZE)
                out[rows] = attended.out
                continue
            last = int(job.positions.max()) + 1
            mask = job.wide_mask
            if selected is not None and last > self.indexer.topk:
                mask = selection_mask(job, selected).repeat_interleave(q.shape[1], 0)
            out[rows] = attend(q[rows], keys, values, mask, self.scale)
        if batch.indexer_topk is not None:
            batch.indexer_topk.append(torch.cat(captured))

    def _select(self, member: Member, index_q: Tensor, weights: Tensor) -> Tensor:
        assert self.indexer is not None
        rows = slice(member.row, member.row + member.tokens)
        keys = member.cache.index_keys(self.index_slot, member.start + member.tokens)
        visible = torch.arange(member.start + 1, member.start + member.tokens + 1, device=index_q.device)
        return self.indexer.select(index_q[rows].to(keys.dtype), keys, weights[rows], visible)

    def _select_branches(self, job: Job, index_q: Tensor, weights: Tensor) -> Tensor:
        """`_select` for one new token of each branch of a history: the shared index keys are scored for all at once."""
        assert self.indexer is not None
        if len(job.members) == 1 or max(m.start for m in job.members) < self.indexer.topk:
            lone = [Member(m.cache, n, 1, m.start) for n, m in enumerate(job.members)]
            return torch.cat([self._select(m, index_q, weights) for m in lone])
        scores = indexer_logits_ref(index_q, job.gather("index_k", self.index_slot), weights)
        shared, tails = scores[:, : job.base_end], scores[:, job.base_end :]
        # all tails stand side by side behind the shared keys: move each branch's own to where its positions say
        lengths = torch.tensor([end for _, _, end in job.tails], device=scores.device)[:, None]
        place = torch.arange(int(lengths.max()), device=scores.device)
        own = torch.tensor(job.tail_columns, device=scores.device)[:, None] - job.base_end + place
        missing = place >= lengths
        picked = tails.gather(1, own.clamp(max=tails.shape[1] - 1)).masked_fill_(missing, float("-inf"))
        return select_topk(torch.cat((shared, picked), 1), self.indexer.topk)


class ReferenceModel:
    """Weights and forward passes. Not safe for concurrent calls: one thread runs one batch at a time."""

    def __init__(
        self, config: ReferenceConfig, weights: dict[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.embed = weights[EMBEDDING]
        self.norm = weights["model.norm.weight"]
        self.embed_scale = float(torch.tensor(config.hidden_size**0.5).bfloat16())  # rounded, as in Gemma
        indexers = load_indexers(config, device=device, dtype=dtype)
        self.layers = []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            self.layers.append(_Layer(config, layer, own, indexers.get(layer)))
        self.decode_backend: DecodeBackend = "sparse"
        self.capture_indexer_topk = False
        self.last_indexer_topk: Tensor | None = None
        """int32 [packed rows, layers with an indexer, index_topk], -1 padded, when `capture_indexer_topk` is set."""

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        **overrides: object,
    ) -> "ReferenceModel":
        """Read a model folder; on the CPU in bf16 the embedding stays mapped, so processes share it.

        `dtype` None: bf16 where the device multiplies it in hardware, else fp32. `overrides` change fields of the
        configuration that the weights allow (index_topk, routed_scaling_factor, …). ReferenceModelError names a
        missing or torn file, or an override that does not exist.
        """
        device = torch.device(device)
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" or _has_bf16_gemm() else torch.float32
        config = ReferenceConfig.from_file(folder / "config.json").replaced(**overrides)
        path = folder / "model.safetensors"
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise ReferenceModelError(f"{path} is not a readable weight file: {error}") from error
        if dtype != torch.bfloat16:
            weights = {n: w.to(dtype) if w.dtype == torch.bfloat16 else w for n, w in weights.items()}
        elif device.type == "cpu":
            # a GEMM reads mapped pages a third slower than a process's own, which may be huge ones
            weights = {n: w if n == EMBEDDING else w.clone() for n, w in weights.items()}
        try:
            return cls(config, weights, device=device, dtype=dtype)
        except KeyError as error:
            raise ReferenceModelError(f"{path} has no tensor {error}") from error

    def new_cache(self) -> SequenceCache:
        return SequenceCache(self.config, device=self.device, dtype=self.dtype)

    @torch.inference_mode()
    def prefill(self, chunks: list[Chunk]) -> list[Tensor]:
        """fp32 logits [wanted rows, vocabulary] per chunk; every cache is extended by its chunk's tokens.

        ValueError for an empty chunk, a cache named twice, or more tokens than the model can hold.
        """
        if len({id(chunk.cache) for chunk in chunks}) != len(chunks):
            raise ValueError("two chunks of one prefill name the same cache")
        hidden = self._forward([list(c.tokens) for c in chunks], [_own(c.cache) for c in chunks], False)
        wanted, row = [], 0
        for chunk in chunks:
            end = row + len(chunk.tokens)
            first = {"none": end, "last": end - 1, "all": row}[chunk.logits]
            wanted.append(torch.arange(first, end))
            row = end
        logits = self._logits(hidden[torch.cat(wanted).to(hidden.device)])
        return list(logits.split([len(rows) for rows in wanted]))

    @torch.inference_mode()
    def decode(self, tokens: list[int], caches: Sequence[CacheProtocol]) -> Tensor:
        """One more token for each sequence: fp32 logits [B, vocabulary]."""
        if len(tokens) != len(caches) or len({id(cache) for cache in caches}) != len(caches):
            raise ValueError(f"decode got {len(tokens)} tokens for {len({id(c) for c in caches})} distinct caches")
        return self._logits(self._forward([[t] for t in tokens], [_own(c) for c in caches], True))

    def _forward(self, tokens: list[list[int]], caches: list[SequenceCache], decode: bool) -> Tensor:
        batch = self._batch(tokens, caches, decode)
        x = self.embed[batch.token_ids].float() * self.embed_scale
        blocks = blocks_of(len(x))
        streams = [x[rows, None].repeat(1, self.config.hc_mult, 1) for rows in blocks]
        parts = [part for layer in self.layers for part in layer.parts]
        entered = [parts[0].enter(block) for block in streams]
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            h, logits = (torch.cat(blocks_in) for blocks_in in zip(*entered, strict=True))
            post, comb = part.coefficients(logits)
            for i, (rows, out) in enumerate(zip(blocks, part.run(h, batch), strict=True)):
                # a block leaves this part and enters the next while it is in the cache
                streams[i] = mhc_post(streams[i], out, post[rows], comb[rows])
                if following is not None:
                    entered[i] = following.enter(streams[i])
        for member in batch.members:
            member.cache.extended(member.tokens)
        self.last_indexer_topk = torch.stack(batch.indexer_topk, 1) if batch.indexer_topk is not None else None
        return torch.cat([block.mean(1) for block in streams])

    def _batch(self, tokens: list[list[int]], caches: list[SequenceCache], decode: bool) -> _Batch:
        c = self.config
        members, row = [], 0
        for own, cache in zip(tokens, caches, strict=True):
            if not own:
                raise ValueError("a chunk without tokens")
            if cache.length + len(own) > c.max_position_embeddings:
                raise ValueError(
                    f"{cache.length} + {len(own)} tokens exceed the context of {c.max_position_embeddings} tokens"
                )
            cache.reserve(len(own))
            members.append(Member(cache, row, len(own), cache.length))
            row += len(own)
        groups = group_members(members)
        positions = torch.cat([torch.arange(m.start, m.start + m.tokens) for m in members]).to(self.device)
        return _Batch(
            members=members,
            token_ids=torch.tensor([t for own in tokens for t in own], device=self.device),
            rope_global=_Rope(positions, c.head_dim, c.rope_theta),
            rope_local=_Rope(positions, c.head_dim, c.rope_local_theta),
            rope_index=_Rope(positions, c.index_rope_dim, c.rope_theta),
            jobs_global=plan_jobs(groups, None, c.num_attention_heads, self.device),
            jobs_local=plan_jobs(groups, c.sliding_window, c.num_attention_heads, self.device),
            decode=decode,
            sparse=self.decode_backend == "sparse",
            indexer_topk=[] if self.capture_indexer_topk else None,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        h = rms_norm(hidden, self.norm, self.config.rms_norm_eps).to(self.dtype)
        return F.linear(h, self.embed).float()


def _own(cache: CacheProtocol) -> SequenceCache:
    if not isinstance(cache, SequenceCache):
        raise TypeError(f"the reference model made no cache of type {type(cache).__name__}; use new_cache()")
    return cache


def _has_bf16_gemm() -> bool:
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
