"""The indexer as one served build computes it: formats, rotations, faults and top-k modes as fields of a `Pipeline`.

Activations are stored after norm and rope and before the Hadamard rotation and quantisation, where every build under
suspicion still agrees; what follows is what the builds differ in.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from longrecall.kernels.indexer.formats import Packed, check_format, dequantize, fake_quantize, quantize
from longrecall.kernels.indexer.presets import Preset
from longrecall.kernels.indexer.reference import indexer_logits_ref
from longrecall.kernels.indexer.rotation import apply_rope, hadamard
from longrecall.kernels.indexer.topk import (
    identity_topk,
    select_topk,
    select_topk_arbitrary,
    select_topk_truncating,
)

PAGE = 64


class PipelineError(ValueError):
    """A pipeline that the activations cannot feed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Activations:
    """One layer's indexer inputs for T queries over S keys, all fp32 or bf16."""

    preset: Preset
    q: Tensor
    """[T, H, D]."""
    keys: Tensor
    """[S, D]."""
    weights: Tensor
    """[T, H], the preset's scale folded in."""
    positions: Tensor
    """[T] token position of each query, 0-based."""
    needles: Tensor | None = None
    """[T, N] keys that hold the fact each query asks for, -1 padded; None where nobody planted one."""
    attention: Tensor | None = None
    """[T, S] true attention mass of each key, where it is known."""
    foreign_keys: Tensor | None = None
    """[S, D] keys of another layer (scale faults) or request (stale page)."""

    @property
    def visible(self) -> Tensor:
        return self.preset.visible(self.positions).clamp(max=self.keys.shape[0])


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The defaults are the healthy build in full precision; a fault's `switch` replaces fields."""

    key_format: str = "fp32"
    query_format: str | None = None
    """None: as the keys (the misread bytes of fp8_fnuz are the keys' alone)."""
    rotate: Literal["both", "none", "q", "k"] = "both"
    rope: Literal["trained", "swapped"] = "trained"
    key_scale: Literal["own", "first-layer", "dropped"] = "own"
    stale_page: int | None = None
    """Page of 64 keys replaced by a foreign one; -1: the page of the first needle, else the middle one."""
    dots: Literal["fp32", "bf16"] = "fp32"
    """bf16: dot products rounded to bf16 before ReLU, as torch fallbacks do."""
    topk_mode: Literal["exact", "arbitrary", "truncating"] = "exact"
    topk_buffer: int = 2048
    topk_bits: int = 12
    kept_fraction: float = 1.0
    """The k that the kernel was compiled for, as a fraction of the model's."""
    mask_value: float = float("-inf")
    """Score of the slots past the end, up to `padded_keys`."""
    padded_keys: int = 8192
    compressor_tail: int | None = None
    """Read by whoever runs the compressor (`compressor.compress(keep=...)`); no effect on given keys."""

    def with_switch(self, switch: dict[str, object]) -> "Pipeline":
        """This pipeline with a fault switched on."""
        return replace(self, **switch)  # type: ignore[arg-type]


def _stale(activations: Activations, page: int, keys: Tensor) -> Tensor:
    if activations.foreign_keys is None:
        raise PipelineError("a stale page needs activations with foreign_keys")
    if page < 0:
        needles = activations.needles
        page = int(needles[0, 0]) // PAGE if needles is not None else keys.shape[0] // (2 * PAGE)
    keys = keys.clone()
    part = slice(page * PAGE, min((page + 1) * PAGE, keys.shape[0]))
    keys[part] = activations.foreign_keys[part].to(keys.dtype)
    return keys


def _quantized_keys(pipeline: Pipeline, keys: Tensor, foreign: Tensor | None) -> Tensor:
    packed = quantize(keys, pipeline.key_format)
    if pipeline.key_scale == "own" or packed.scale is None:
        return dequantize(packed)
    if not pipeline.key_format.startswith("fp8"):
        raise PipelineError(f"scale faults are written for fp8 keys, not {pipeline.key_format}")
    if pipeline.key_scale == "dropped":
        scale: Tensor | None = torch.ones_like(packed.scale)
    elif foreign is None:
        raise PipelineError("another layer's scale needs activations with foreign_keys")
    else:
        scale = quantize(foreign, pipeline.key_format).scale
    return dequantize(Packed(fmt=packed.fmt, data=packed.data, scale=scale))


def prepared(activations: Activations, pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    """q [T, H, D] and keys [S, D] as the build's score sees them, fp32."""
    check_format(pipeline.key_format)
    q, keys, foreign = activations.q.float(), activations.keys.float(), activations.foreign_keys
    if pipeline.stale_page is not None:
        keys = _stale(activations, pipeline.stale_page, keys)
    if pipeline.rope == "swapped":
        rope = activations.preset.rope
        where = activations.preset.key_positions(keys.shape[0])
        q = apply_rope(apply_rope(q, activations.positions, rope, inverse=True), activations.positions, rope.swapped())
        keys = apply_rope(apply_rope(keys, where, rope, inverse=True), where, rope.swapped())
    if pipeline.rotate in ("both", "q"):
        q = hadamard(q)
    if pipeline.rotate in ("both", "k"):
        keys = hadamard(keys)
        foreign = hadamard(foreign.float()) if foreign is not None else None
    query_format = pipeline.query_format or pipeline.key_format.replace("fp8_fnuz", "fp8")
    return fake_quantize(q, query_format), _quantized_keys(pipeline, keys, foreign)


def scores(activations: Activations, pipeline: Pipeline) -> Tensor:
    """Index scores [T, S] in fp32, before any mask."""
    q, keys = prepared(activations, pipeline)
    if pipeline.dots == "fp32":
        return indexer_logits_ref(q, keys, activations.weights)
    weights = activations.weights.float()
    rows = [
        (weights[t].unsqueeze(1) * (q[t] @ keys.T).bfloat16().relu().float()).sum(0) for t in range(q.shape[0])
    ]  # fmt: skip
    return torch.stack(rows)


def select(
    activations: Activations,
    pipeline: Pipeline,
    *,
    index_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The build's selection, int32 [T, index_topk], -1 padded. `index_scores` saves scoring again."""
    table = scores(activations, pipeline) if index_scores is None else index_scores.clone()
    visible = activations.visible
    width = activations.preset.index_topk
    k = max(1, int(width * pipeline.kept_fraction))
    if pipeline.mask_value > float("-inf"):
        padded = torch.full((table.shape[0], max(table.shape[1], pipeline.padded_keys)), pipeline.mask_value)
        padded[:, : table.shape[1]] = table
        column = torch.arange(padded.shape[1])
        table = padded.masked_fill_(column >= visible.unsqueeze(1), pipeline.mask_value)
        picks = select_topk(table, k)
        picks = picks.masked_fill(picks >= visible.unsqueeze(1), -1)
    elif pipeline.topk_mode == "exact":
        picks = select_topk(table, k, visible=visible)
    elif pipeline.topk_mode == "arbitrary":
        generator = generator or torch.Generator().manual_seed(0)
        picks = select_topk_arbitrary(table, k, generator=generator, visible=visible)
    else:
        picks = select_topk_truncating(
            table, k, visible=visible, buffer=pipeline.topk_buffer, bits=pipeline.topk_bits, generator=generator
        )
    if pipeline.mask_value == float("-inf"):
        # Servers skip the scores of rows that see no more than k keys, so no fault of a score can act there.
        short = visible <= k
        picks[short] = identity_topk(k, visible[short])
    if k < width:
        picks = torch.nn.functional.pad(picks, (0, width - k), value=-1)
    return picks
