"""What a stored campaign over combinations of patches says: effects alone and in company, pairs, Shapley, bisect."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longrecall.evals.cells import Floats, make_cells
from longrecall.evals.compare import differences
from longrecall.evals.designs import (
    Bisect,
    Contrast,
    DesignError,
    LossModel,
    LossSplit,
    PatchEffect,
    combination_id,
    combination_recalls,
    interaction_pairs,
    patch_effects,
    shapley,
    split_loss,
)
from longrecall.evals.stored_run import StoredRun, load_run


@dataclass(frozen=True, kw_only=True)
class DesignReport:
    """Everything a design's campaign says."""

    run_id: str
    rung: int | None
    patches: tuple[str, ...]
    effects: tuple[PatchEffect, ...]
    pairs_to_run: tuple[tuple[str, str], ...]
    shapley: dict[str, Contrast | None]
    split: LossSplit | None
    bisect_posterior: tuple[float, ...]
    """Of a bisect campaign: probability that each patch of the stack began the loss."""
    sentences: tuple[str, ...]


def read_design(path: Path, *, rung: int | None = None) -> DesignReport:
    """Read one run folder; raises DesignError when its builds are not those of a design."""
    run = load_run(path)
    if rung is not None and rung not in run.rungs:
        raise DesignError(f"{path} has no rung {rung}; it has {', '.join(map(str, run.rungs))}")
    names = [b.build_id for b in run.builds]
    suspects = [b.build_id for b in run.builds if b.role == "suspect"]
    patches = tuple(n for n in suspects if n != "all" and not n.startswith(("all-but-", "first-")) and "_and_" not in n)
    stack = sorted((n for n in suspects if n.startswith("first-")), key=lambda n: int(n.removeprefix("first-")))
    cells = make_cells(run.scores, builds=names, rungs=run.rungs, order=run.order)
    recalls = combination_recalls(cells, rung)
    if "base" not in recalls:
        recalls["base"] = recalls[next(b.build_id for b in run.builds if b.role == "base")]
    if stack:
        return _bisect_report(run, stack, rung)
    if not patches:
        raise DesignError(f"{path} holds no patch that is served alone: not the campaign of a design")
    effects = patch_effects(recalls, patches)
    pairs = interaction_pairs(effects)
    subsets = {
        frozenset(s): recalls[combination_id(s, patches)]
        for n in range(len(patches) + 1)
        for s in itertools.combinations(patches, n)
        if combination_id(s, patches) in recalls
    }
    full = len(patches) > 1 and len(subsets) == 2 ** len(patches)
    shares = shapley(subsets, patches) if full else {}
    split = None
    if full and len(patches) == 2:
        split = split_loss(
            recalls["base"], recalls[patches[0]], recalls[patches[1]], recalls["all"], names=(patches[0], patches[1])
        )
    sentences = [e.sentence for e in effects]
    sentences += [f"{a} and {b}: run the 2 x 2 of the two (design factorial)" for a, b in pairs if not full]
    for patch, share in shares.items():
        if share is not None:
            low, high = 100 * share.ci_low, 100 * share.ci_high
            sentences.append(f"{patch}: Shapley share {100 * share.estimate:+.1f} points [{low:+.1f}, {high:+.1f}]")
    if split is not None:
        sentences.append(split.sentence)
    return DesignReport(
        run_id=run.run_id,
        rung=rung,
        patches=patches,
        effects=effects,
        pairs_to_run=pairs,
        shapley=shares,
        split=split,
        bisect_posterior=(),
        sentences=tuple(sentences),
    )


def _bisect_report(run: StoredRun, stack: list[str], rung: int | None) -> DesignReport:
    """The posterior over the stack from builds "first-k"; "all" is its last and "base-again" the model of no loss."""
    names = [b.build_id for b in run.builds]
    again = next((b.build_id for b in run.builds if b.role == "aa"), None)
    if again is None or "all" not in names:
        raise DesignError(f"{run.path}: a bisect needs the base twice and the build with all patches")
    base = next(b.build_id for b in run.builds if b.role == "base")
    cells = make_cells(run.scores, builds=names, rungs=run.rungs, order=run.order)

    def losses(build: str) -> tuple[Floats, Floats]:
        part = differences(cells, base, build)
        y_base, y = cells.recall[cells.build(base)], cells.recall[cells.build(build)]
        rows = [run.rungs.index(rung)] if rung is not None else list(range(len(part.rungs)))
        both = np.isfinite(y_base[rows]) & np.isfinite(y[rows])
        right = np.where(both, y_base[rows] > 0.5, False)
        lost = right & (y[rows] < 0.5)
        return lost.sum(axis=(0, 2)).astype(float), right.sum(axis=(0, 2)).astype(float)

    n = max(int(name.removeprefix("first-")) for name in stack) + 1
    search = Bisect(n, good=LossModel.fit(*losses(again)), bad=LossModel.fit(*losses("all")))
    for name in stack:
        search.update(int(name.removeprefix("first-")), *losses(name))
    guilty = search.decided()
    best = int(np.argmax(search.posterior)) + 1
    said = (
        f"patch {guilty} of the stack began the loss (probability {search.posterior[guilty - 1]:.3f})"
        if guilty is not None
        else f"patch {best} is the most probable at {search.posterior[best - 1]:.2f}; "
        f"ask more of first-{search.next_query()}"
    )
    return DesignReport(
        run_id=run.run_id,
        rung=rung,
        patches=tuple(stack),
        effects=(),
        pairs_to_run=(),
        shapley={},
        split=None,
        bisect_posterior=tuple(float(p) for p in search.posterior),
        sentences=(said,),
    )
