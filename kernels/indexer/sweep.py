"""The sweep: key formats and faults at growing lengths, measured on synthetic or captured activations.

One row per (length, arm): an arm is a key format in a healthy build, or a fault on top of the served format. The
reference of every recall is the exact fp32 selection on the same activations.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from longrecall.kernels.faults import Fault
from longrecall.kernels.indexer import measures
from longrecall.kernels.indexer.capture import read_capture
from longrecall.kernels.indexer.emulate import Activations, Pipeline, scores, select
from longrecall.kernels.indexer.presets import Preset
from longrecall.kernels.indexer.synthetic import synthetic


@dataclass(frozen=True, kw_only=True)
class Row:
    """Means over the queries; None where a measure is not defined (no needle, no attention, at most k candidates)."""

    source: str
    layer: int | None
    tokens: int
    candidates: int
    arm: str
    queries: int
    set_recall: float
    needle_hit: float | None
    needle_rank: float | None
    needle_margin_sigma: float | None
    """Needle above the k-th score, in standard deviations of the arm's score noise."""
    mass_recall: float | None
    boundary_margin_sigma: float | None
    """k-th above (k+1)-th score, same unit."""
    critical_tokens: int | None
    """Predicted length at which the needle leaves the top-k, with the arm's noise."""


def arms_of(formats: Iterable[str], faults: Iterable[Fault], served_format: str) -> dict[str, Pipeline]:
    arms = {fmt: Pipeline(key_format=fmt) for fmt in formats}
    fp8 = served_format if served_format.startswith("fp8") else "fp8"
    for fault in faults:
        # Scale and byte faults exist only where there are scales and bytes.
        arms[fault.name] = Pipeline(key_format=fp8).with_switch(fault.switch)
    return arms


def _finite_mean(values: Tensor) -> float | None:
    values = values[values.isfinite()]
    return float(values.mean()) if values.numel() else None


def measure(
    activations: Activations,
    arms: dict[str, Pipeline],
    *,
    source: str,
    layer: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Row]:
    """One row per arm."""
    preset, visible, needles = activations.preset, activations.visible, activations.needles
    exact = scores(activations, Pipeline())
    reference = select(activations, Pipeline(), index_scores=exact)
    tokens = int(activations.positions.max()) + 1
    for name, pipeline in arms.items():
        table = scores(activations, pipeline)
        picks = select(activations, pipeline, index_scores=table, generator=generator)
        noise = measures.score_noise(table, exact, visible)
        beyond = int(visible.min()) > preset.index_topk
        rank = margin = boundary = critical = None
        if beyond:
            boundary = _finite_mean(
                measures.boundary_margin(exact, preset.index_topk, visible) / noise.clamp(min=1e-30)
                if float(noise.max()) > 0
                else torch.full_like(noise, torch.inf)
            )
        if needles is not None:
            finite = torch.nan_to_num(table, nan=-torch.inf)
            rank = float(measures.needle_rank(finite, needles, visible).mean())
            if beyond:
                args = (needles, preset.index_topk, visible)
                margin = _finite_mean(measures.needle_margin(finite, *args, noise))
                reach = float(measures.critical_candidates(exact, *args, noise).median())
                critical = int(reach * preset.ratio) if reach < 2**40 else None
        yield Row(
            source=source,
            layer=layer,
            tokens=tokens,
            candidates=int(visible.max()),
            arm=name,
            queries=table.shape[0],
            set_recall=float(measures.set_recall(picks, reference).mean()),
            needle_hit=None if needles is None else float(measures.needle_hit(picks, needles).mean()),
            needle_rank=rank,
            needle_margin_sigma=margin,
            mass_recall=None
            if activations.attention is None
            else float(measures.mass_recall(picks, reference, activations.attention).mean()),
            boundary_margin_sigma=boundary,
            critical_tokens=critical,
        )


def sweep_synthetic(
    preset: Preset,
    lengths: Iterable[int],
    arms: dict[str, Pipeline],
    *,
    seed: int,
    queries: int = 8,
    needle_sigma: float = 4.0,
    outlier_channels: int = 0,
) -> Iterator[Row]:
    """Rows for each length in tokens; a length's activations depend on (seed, length) alone."""
    for tokens in lengths:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + tokens)
        activations = synthetic(
            preset,
            tokens,
            generator=generator,
            queries=queries,
            needle_sigma=needle_sigma,
            outlier_channels=outlier_channels,
        )
        yield from measure(activations, arms, source="synthetic", generator=generator)


def sweep_captures(paths: Iterable[Path], arms: dict[str, Pipeline]) -> Iterator[Row]:
    """Rows for each layer of each capture; scale and stale-page faults take the next layer's keys as foreign ones."""
    for path in paths:
        for layer, activations in read_capture(path):
            yield from measure(activations, arms, source=path.name, layer=layer)


def rows_as_dicts(rows: Iterable[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
