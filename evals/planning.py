"""How much a campaign must ask: from a margin and the noise of base against base to conversations, tokens and time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longrecall.evals.cells import make_cells
from longrecall.evals.compare import differences, weigh
from longrecall.evals.schema import VerdictConfig
from longrecall.evals.scores_file import ScoresError
from longrecall.evals.sizes import PLANNED_POWER, size_for_effect, size_to_exonerate
from longrecall.evals.stored_run import load_run


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """One rung of a plan."""

    rung: int
    flips: float
    spread: float
    """sd over conversations of the mean difference between two runs of one build."""
    to_exonerate: int
    to_convict: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to ask, and what it costs."""

    margin: float
    loss: float
    source: str
    cells: tuple[PlannedCell, ...]
    n_conversations: int
    n_probes: int
    n_builds: int
    tokens_warm: int
    """Prefill with a prefix cache that holds: each ladder costs its longest rung and the branches."""
    tokens_cold: int
    seconds_warm: float | None


def make_plan(
    *,
    rungs: Sequence[int] | None,
    margin: float,
    loss: float,
    n_patches: int,
    n_probes: int,
    from_run: Path | None,
    flips: float,
    rho: float,
    tail_tokens: int,
    tokens_per_second: float | None,
    alpha: float = 0.05,
) -> Plan:
    """Sizes for 80 % power: to exonerate an innocent patch at all rungs at once, and to convict `loss` at any rung.

    With from_run, rungs, flips and spread come from its A/A build; else the spread is sqrt(flips (1 + (m-1) rho) / m).
    """
    for name, value, low, high in (
        ("margin", margin, 0.0, 0.5),
        ("loss", loss, 0.0, 1.0),
        ("alpha", alpha, 0.0, 0.5),
    ):
        if not low < value < high:
            raise ValueError(f"--{name} {value}: between {low:g} and {high:g} is needed")
    if not 0 <= flips < 1 or not 0 <= rho <= 1:
        raise ValueError(f"--flips {flips} and --rho {rho}: shares between 0 and 1 are needed")
    if tokens_per_second is not None and not tokens_per_second > 0:
        raise ValueError(f"--tokens-per-second {tokens_per_second}: more than 0 is needed")
    config = VerdictConfig(margin=margin, alpha=alpha)
    if from_run is not None:
        source, noise, n_probes = _measured(from_run, config)
    else:
        if not rungs:
            raise ValueError("at least one rung is needed")
        spread = math.sqrt(flips * (1 + (n_probes - 1) * rho) / n_probes)
        source = f"assumed: {flips:.1%} flips with correlation {rho} within a conversation"
        noise = [(rung, flips, spread, flips / 2, flips / 2) for rung in rungs]
    n_cells = n_patches * (len(noise) + (len(noise) > 1))
    each = PLANNED_POWER ** (1 / len(noise))
    cells = []
    for rung, rate, spread, lost, gained in noise:
        to_exonerate = size_to_exonerate(0.0, spread, lost, gained, config, power=each)
        # a loss that differs between conversations spreads the differences too: half of it, besides the noise
        to_convict = size_for_effect(loss, math.hypot(spread, loss / 2), alpha / n_cells)
        assert to_exonerate is not None  # the true change 0 is inside every margin
        cells.append(
            PlannedCell(rung=rung, flips=rate, spread=spread, to_exonerate=to_exonerate, to_convict=to_convict)
        )
    n = max(max(c.to_exonerate for c in cells), min(c.to_convict for c in cells))
    n_builds = n_patches + 4
    lengths = [c.rung for c in cells]
    warm = n * n_builds * (max(lengths) + n_probes * len(lengths) * tail_tokens)
    return Plan(
        margin=margin,
        loss=loss,
        source=source,
        cells=tuple(cells),
        n_conversations=n,
        n_probes=n_probes,
        n_builds=n_builds,
        tokens_warm=warm,
        tokens_cold=n * n_builds * n_probes * sum(lengths),
        seconds_warm=warm / tokens_per_second if tokens_per_second is not None else None,
    )


def _measured(path: Path, config: VerdictConfig) -> tuple[str, list[tuple[int, float, float, float, float]], int]:
    run = load_run(path)
    base = next((b.build_id for b in run.builds if b.role == "base"), None)
    again = next((b.build_id for b in run.builds if b.role == "aa"), None)
    if base is None or again is None:
        raise ScoresError(f"{path} has no A/A build: a run with the base served twice is needed")
    cells = make_cells(run.scores, builds=[b.build_id for b in run.builds], rungs=run.rungs, order=run.order)
    part = differences(cells, base, again)
    evidence = weigh([part], config)
    noise = []
    for row, rung in enumerate(run.rungs):
        n = int(evidence.n[row])
        if n < 2:
            raise ScoresError(f"{path}: base and {again} share {n} conversations at {rung} tokens; 2 are the least")
        lost, gained = float(np.nansum(part.lost_share[row])) / n, float(np.nansum(part.gained_share[row])) / n
        # which of the two runs came first is chance: both directions share the flips
        rate = lost + gained
        noise.append((rung, rate, float(evidence.stderr[row]) * math.sqrt(n), rate / 2, rate / 2))
    n_probes = max(len(names) for names in cells.probes)
    return f"measured: {run.run_id}, base against {again}", noise, n_probes
