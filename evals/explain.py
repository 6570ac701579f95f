"""Attribution of stored runs: which patches lose recall, and why, over one or several run folders."""

import json
from collections.abc import Sequence
from pathlib import Path

from longrecall.evals.attribute import (
    attribute,
    is_arm,
    load_observations,
    observe,
    observe_cache_arms,
)
from longrecall.evals.cells import Cells, make_cells
from longrecall.evals.next_arm import unavailable
from longrecall.evals.schema import Attribution, Observation
from longrecall.evals.scores_file import ScoresError
from longrecall.evals.stored_run import StoredRun, load_run
from longrecall.evals.verdict import judge


def attribute_runs(
    paths: Sequence[Path], *, patch: str | None = None, evidence: Sequence[Path] = ()
) -> tuple[Attribution, ...]:
    """Attributions of the first run's patches that are shown to lose recall (or of `patch`), largest loss first.

    Later runs and evidence files add observations; where one feature was observed twice the more exact one counts.
    """
    runs = [load_run(path) for path in paths]
    if not runs:
        raise ScoresError("attribution needs at least one run folder")
    first = runs[0]
    more = [o for path in evidence for o in load_observations(path)]
    known = [b.build_id for b in first.builds if b.role not in ("base", "aa") and not is_arm(b.build_id)]
    if patch is not None and patch not in known:
        raise ScoresError(f"{first.path} has no patch {patch!r}; it has {', '.join(known)}")
    base = _base(first)
    judgement = judge(
        first.scores, first.builds, rungs=first.rungs, config=first.config, order=first.order, secondary=False
    )
    losing = {
        c.candidate: c.delta_recall
        for c in sorted(judgement.comparisons, key=lambda c: -(c.delta_recall or 0.0))
        if c.p_loss_holm is not None and c.p_loss_holm <= first.config.alpha and c.delta_recall is not None
    }
    wanted = [patch] if patch is not None else sorted((p for p in losing if p in known), key=lambda p: losing[p])
    cells = _cells(first)
    cold = _cells(first, "cold") if {"warm", "cold"} <= set(first.scores["arm"].unique().to_pylist()) else None
    out_of_reach = unavailable(_engine(first.path))
    made = []
    for name in wanted:
        extra = [o for o in more if o.patch == name]
        for run in runs[1:]:
            if name in [b.build_id for b in run.builds]:
                extra += observe(_cells(run), _base(run), name, onset=run.onset_tokens)
        if cold is not None and (reuse := observe_cache_arms(cells, cold, base, name)) is not None:
            extra.append(reuse)
        own = {o.feature: o for o in observe(cells, base, name, onset=first.onset_tokens)}
        better = _most_exact([o for o in extra if o.feature not in own or o.stderr < own[o.feature].stderr])
        replaced = {o.feature for o in better}
        made.append(
            attribute(
                cells,
                base,
                name,
                onset=first.onset_tokens,
                more=better,
                without=tuple(replaced & set(own)),
                unavailable=out_of_reach,
            )
        )
    return tuple(made)


def _cells(run: StoredRun, arm: str | None = None) -> Cells:
    return make_cells(run.scores, builds=[b.build_id for b in run.builds], rungs=run.rungs, order=run.order, arm=arm)


def _most_exact(observations: Sequence[Observation]) -> list[Observation]:
    best: dict[str, Observation] = {}
    for o in observations:
        if o.feature not in best or o.stderr < best[o.feature].stderr:
            best[o.feature] = o
    return list(best.values())


def _base(run: StoredRun) -> str:
    base = next((b.build_id for b in run.builds if b.role == "base"), None)
    if base is None:
        raise ScoresError(f"{run.path} has no base build")
    return base


def _engine(path: Path) -> str:
    try:
        return str(json.loads((path / "campaign.json").read_bytes())["patchset"]["engine"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"
