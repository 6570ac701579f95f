"""Verdicts while a campaign runs: e-values that stay valid however often they are looked at.

Two e-processes per patch and rung, conversations in the campaign's random order: one against "no loss" (convicts), one
against "loses at least the margin" (exonerates). A conversation counts once all its probes were asked of both builds;
those that finish early wait for their turn, so that slow (perhaps bad) replies cannot arrange the order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy import stats

from longrecall.evals.paired import FRACTIONS_EQUIVALENT, LAMBDAS_LOSS, Floats, min_conversations
from longrecall.evals.schema import MISSING, Score, VerdictConfig
from longrecall.evals.scores_file import ScoresError


@dataclass(frozen=True, kw_only=True)
class RunningCell:
    """One patch at one rung, as known so far."""

    build: str
    rung: int
    n_conversations: int
    recall_baseline: float | None
    recall: float | None
    delta_recall: float | None
    e_loss: float
    e_equivalent: float
    """Highest e-values so far: by Ville's inequality one crossing of 1/alpha is enough."""


@dataclass
class _Cell:
    next_place: int = 0
    n: int = 0
    base_sum: float = 0.0
    cand_sum: float = 0.0
    squares: float = 0.0
    log_loss: Floats = field(default_factory=lambda: np.zeros(len(LAMBDAS_LOSS)))
    log_equivalent: Floats = field(default_factory=lambda: np.zeros(len(FRACTIONS_EQUIVALENT)))
    peak_loss: float = 0.0
    peak_equivalent: float = 0.0

    def take(self, base: float, candidate: float, margin: float) -> None:
        d = candidate - base
        self.n += 1
        self.base_sum += base
        self.cand_sum += candidate
        self.squares += d * d
        self.log_loss = self.log_loss - LAMBDAS_LOSS * d - np.log(np.cosh(LAMBDAS_LOSS * d))
        self.log_equivalent = self.log_equivalent + np.log1p(FRACTIONS_EQUIVALENT / (1 - margin) * (d + margin))
        self.peak_loss = max(self.peak_loss, _log_mean(self.log_loss))
        self.peak_equivalent = max(self.peak_equivalent, _log_mean(self.log_equivalent))


def _log_mean(terms: Floats) -> float:
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).mean()))


class RunningVerdicts:
    """Fed with scores as they come; asked for cells and decisions at any time."""

    def __init__(
        self,
        *,
        base: str,
        candidates: Sequence[str],
        rungs: Sequence[int],
        order: Sequence[str],
        probes_per_conversation: int | Mapping[str, int],
        config: VerdictConfig,
        n_suspects: int | None = None,
    ) -> None:
        """order: conversation_ids as planned. n_suspects: patches that share the error budget; None: all candidates."""
        self.base, self.candidates, self.rungs = base, tuple(candidates), tuple(rungs)
        self.config = config
        self._order = list(order)
        self._place = {name: i for i, name in enumerate(order)}
        self._planned = probes_per_conversation
        n_rows = len(self.rungs) + (len(self.rungs) > 1)  # the rungs pooled are a row of the final analysis, too
        self._n_cells = max(1, (len(self.candidates) if n_suspects is None else n_suspects) * n_rows)
        self._replies: dict[tuple[str, int, str], dict[tuple[str, int], float | None]] = {}
        self._cells = {(b, r): _Cell() for b in self.candidates for r in self.rungs}

    def add(self, score: Score) -> None:
        """Take one score in, in any order. Scores of one arm only; a repeated row is an error."""
        if score.build_id != self.base and score.build_id not in self.candidates:
            raise ScoresError(f"score of build {score.build_id!r}, which is not in this campaign")
        if score.rung not in self.rungs or score.conversation_id not in self._place:
            raise ScoresError(f"score of {score.conversation_id} at rung {score.rung}, which was never planned")
        replies = self._replies.setdefault((score.build_id, score.rung, score.conversation_id), {})
        key = (score.probe_id, score.repeat)
        if key in replies:
            raise ScoresError(f"{score.build_id}/{score.conversation_id}/{score.probe_id} scored twice at {score.rung}")
        replies[key] = None if score.outcome in MISSING else float(score.outcome == "ok")
        touched = self.candidates if score.build_id == self.base else (score.build_id,)
        for candidate in touched:
            self._advance(candidate, score.rung)

    def _advance(self, candidate: str, rung: int) -> None:
        cell = self._cells[candidate, rung]
        while cell.next_place < len(self._order):
            name = self._order[cell.next_place]
            planned = self._planned if isinstance(self._planned, int) else self._planned[name]
            base = self._replies.get((self.base, rung, name), {})
            cand = self._replies.get((candidate, rung, name), {})
            if len(base) < planned or len(cand) < planned:
                return
            pairs = [(base[k], cand[k]) for k in base.keys() & cand.keys()]
            known = [(x, y) for x, y in pairs if x is not None and y is not None]
            if known:
                cell.take(
                    sum(x for x, _ in known) / len(known), sum(y for _, y in known) / len(known), self.config.margin
                )
            cell.next_place += 1

    def cell(self, build: str, rung: int) -> RunningCell:
        cell = self._cells[build, rung]
        return RunningCell(
            build=build,
            rung=rung,
            n_conversations=cell.n,
            recall_baseline=cell.base_sum / cell.n if cell.n else None,
            recall=cell.cand_sum / cell.n if cell.n else None,
            delta_recall=(cell.cand_sum - cell.base_sum) / cell.n if cell.n else None,
            e_loss=math.exp(min(cell.peak_loss, 700.0)),
            e_equivalent=math.exp(min(cell.peak_equivalent, 700.0)),
        )

    def decision(self, build: str) -> Literal["culprit", "exonerated"] | None:
        """What the e-values allow to say of a patch now (the campaign's controls aside); None: keep asking.

        A conviction pays for all patches × rungs, and the rungs pooled (Bonferroni); an exoneration needs every
        rung and the minimum number of conversations.
        """
        cells = [self._cells[build, rung] for rung in self.rungs]
        bar = math.log(1 / self.config.alpha)
        if any(cell.peak_loss >= bar + math.log(self._n_cells) for cell in cells):
            return "culprit"
        least = min_conversations(self.config.margin, self.config.alpha)
        if all(cell.peak_equivalent >= bar and cell.n >= least for cell in cells):
            return "exonerated"
        return None

    def within_margin(self, build: str) -> bool:
        """Whether this build's difference from the base is known to within the margin at every rung by now.

        What the A/A control asks of base against itself (evals/controls.py).
        """
        for cell in (self._cells[build, rung] for rung in self.rungs):
            if cell.n < 2:
                return False
            mean = (cell.cand_sum - cell.base_sum) / cell.n
            variance = max(cell.squares / cell.n - mean * mean, 0.0) / (cell.n - 1)
            if (
                abs(mean) + stats.t.ppf(1 - self.config.alpha / 2, cell.n - 1) * math.sqrt(variance)
                > self.config.margin
            ):
                return False
        return True
