"""The evidence on all candidates of one campaign together, with Holm's correction and the missingness gate."""

from dataclasses import dataclass

import numpy as np

from longrecall.evals.cells import Cells, Floats
from longrecall.evals.compare import Differences, Evidence, differences, weigh
from longrecall.evals.paired import holm
from longrecall.evals.schema import VerdictConfig
from longrecall.runners.schema import Build


@dataclass(frozen=True, kw_only=True)
class Family:
    """All candidates' evidence, and Holm's correction over the patches' cells."""

    cells: Cells
    builds: list[Build]
    parts: list[Differences]
    evidence: Evidence
    p_cell: Floats
    """[candidates, R + 1] p-value of a conviction, conservative about missing replies."""
    p_holm: list[Floats | None]
    """Per candidate [R + 1]; None for the A/A build, which is judged by its own gate."""
    unbalanced: list[str | None]
    """Per candidate: what the missingness gate says, None when it is satisfied."""
    config: VerdictConfig
    stopped_early: bool

    @classmethod
    def of(
        cls, cells: Cells, builds: list[Build], parts: list[Differences], config: VerdictConfig, stopped_early: bool
    ) -> "Family":
        width = len(cells.rungs) + 1
        evidence = weigh(parts, config)
        unbalanced = [missing_gate(part, config) for part in parts]
        p = np.where(
            stopped_early, np.minimum(1.0, 1.0 / np.maximum(evidence.peak_loss, 1.0)), evidence.p_conviction
        ).reshape(len(parts), width)
        p = np.where(evidence.n.reshape(p.shape) > 1, p, np.nan)
        for i, gate in enumerate(unbalanced):
            if gate is not None:
                kind = differences(cells, parts[i].baseline, parts[i].candidate, impute="for")
                worst = weigh([kind], config)
                cautious = np.minimum(1.0, 1.0 / worst.peak_loss) if stopped_early else worst.p_conviction
                p[i] = np.fmax(p[i], cautious)
        if width == 2:  # one rung: pooled is the same cell
            p[:, 1] = np.nan
        p_holm: list[Floats | None] = [None] * len(parts)
        # a positive control is corrected over its own rungs; the patches (and the no-op) over all of theirs
        groups = [[i] for i, b in enumerate(builds) if b.role == "positive-control"]
        groups.append([i for i, b in enumerate(builds) if b.role in ("suspect", "negative-control")])
        for group in groups:
            if group:
                adjusted = holm(p[group].ravel()).reshape(len(group), width)
                for row, i in enumerate(group):
                    p_holm[i] = adjusted[row]
        return cls(
            cells=cells,
            builds=builds,
            parts=parts,
            evidence=evidence,
            p_cell=p,
            p_holm=p_holm,
            unbalanced=unbalanced,
            config=config,
            stopped_early=stopped_early,
        )

    def offset(self, i: int) -> int:
        return i * (len(self.cells.rungs) + 1)

    def convicted(self, i: int) -> list[int]:
        """Rows (rungs, then pooled) at which candidate i loses recall."""
        adjusted = self.p_holm[i]
        if adjusted is None:
            return []
        mean = self.evidence.mean[self.offset(i) : self.offset(i) + len(adjusted)]
        return [row for row in range(len(adjusted)) if adjusted[row] <= self.config.alpha and mean[row] < 0]

    def rung_name(self, row: int) -> str:
        return f"{self.cells.rungs[row]} tokens" if row < len(self.cells.rungs) else "all rungs together"


def missing_gate(part: Differences, config: VerdictConfig) -> str | None:
    """Missing data must not differ between two builds, at any rung; one odd reply alone is not a difference."""
    share = part.missing_share
    gap = np.abs(share[:, 1] - share[:, 0])
    n = np.maximum(part.n_probes + part.n_missing, 1)
    bad = np.flatnonzero((gap > config.max_missing_difference + 1e-12) & (gap * n >= 1.5))
    if not len(bad):
        return None
    row = int(bad[np.argmax(gap[bad])])
    where = f"at {part.rungs[row]} tokens" if row < len(part.rungs) else "overall"
    return (
        f"{share[row, 1]:.1%} of its replies are missing {where} against {share[row, 0]:.1%} of the baseline's "
        f"(at most {config.max_missing_difference:.1%} may differ)"
    )
