"""Two builds of one or two stored runs, compared on the conversations that both were asked."""

from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from longrecall.evals.cells import make_cells
from longrecall.evals.compare import comparisons, differences, weigh
from longrecall.evals.family import missing_gate
from longrecall.evals.paired import holm, min_conversations
from longrecall.evals.schema import Comparison
from longrecall.evals.scores_file import ScoresError
from longrecall.evals.stored_run import StoredRun, load_run, parse_target
from longrecall.evals.verdict import ANALYSIS_VERSION

Result = Literal["loss shown", "loss excluded", "cannot tell"]


@dataclass(frozen=True, kw_only=True)
class AcrossRuns:
    """The outcome of `compare_runs`."""

    analysis_version: str
    suite_hash: str
    baseline: str
    candidate: str
    margin: float
    result: Result
    reason: str
    notes: tuple[str, ...]
    comparisons: tuple[Comparison, ...]


def compare_runs(baseline: str, candidate: str, *, margin: float | None = None) -> AcrossRuns:
    """Compare "RUN[:BUILD]" with "RUN[:BUILD]". Raises ScoresError when the two did not answer the same questions."""
    (path_a, build_a), (path_b, build_b) = parse_target(baseline), parse_target(candidate)
    run_a = load_run(path_a)
    run_b = run_a if path_b == path_a else load_run(path_b)
    if run_a.suite_hash != run_b.suite_hash:
        raise ScoresError(
            f"{path_a} asked suite {run_a.suite_hash[:12]} and {path_b} asked suite {run_b.suite_hash[:12]}: two runs "
            "are compared on the same conversations only"
        )
    rungs = tuple(r for r in run_a.rungs if r in run_b.rungs)
    if not rungs:
        raise ScoresError(f"{path_a} and {path_b} share no rung: {list(run_a.rungs)} and {list(run_b.rungs)}")
    name_a, name_b = _build(run_a, build_a), _build(run_b, build_b)
    if (run_a.path, name_a) == (run_b.path, name_b):
        raise ScoresError(f"{baseline} and {candidate} are the same build of the same run: name two")
    config = replace(run_a.config, margin=margin) if margin is not None else run_a.config
    if not 0 < config.margin < 0.5:
        raise ScoresError(f"margin {config.margin}: a share of recall between 0 and 0.5 is needed, such as 0.10")
    if not 0 < config.alpha < 0.5:
        raise ScoresError(f"{path_a / 'campaign.json'}: verdict.alpha {config.alpha}: 0 to 0.5 is needed, such as 0.05")
    table = pa.concat_tables([_rows(run_a, name_a, "baseline", rungs), _rows(run_b, name_b, "candidate", rungs)])
    cells = make_cells(table, builds=["baseline", "candidate"], rungs=rungs, order=run_a.order)
    part = differences(cells, "baseline", "candidate")
    evidence = weigh([part], config)
    p = evidence.p_conviction
    p[evidence.n < 2] = float("nan")
    adjusted = holm(p)
    gate = missing_gate(part, config)
    convicted = [i for i in range(len(p)) if adjusted[i] <= config.alpha and evidence.mean[i] < 0]
    n_rungs, least = len(rungs), min_conversations(config.margin, config.alpha)
    excluded = all(
        evidence.lower_t[i] > -config.margin and evidence.lower_tango[i] > -config.margin and evidence.n[i] >= least
        for i in range(n_rungs)
    )
    result: Result
    if gate is not None:
        result, reason = "cannot tell", gate
    elif convicted:
        worst = min(convicted, key=lambda i: float(evidence.mean[i]))
        where = f"at {rungs[worst]} tokens" if worst < n_rungs else "over all rungs"
        result, reason = "loss shown", f"{100 * evidence.mean[worst]:+.1f} points {where} (p = {adjusted[worst]:.2g})"
    elif excluded:
        result, reason = "loss excluded", f"a loss of {100 * config.margin:.0f} points is excluded at every rung"
    else:
        n = int(evidence.n[:n_rungs].min())
        reason = f"neither a loss nor its absence within {100 * config.margin:.0f} points is shown by {n} conversations"
        result = "cannot tell"
    notes = []
    if run_a.path != run_b.path:
        notes.append("two runs: no A/A or positive control covers what differs between them besides the build")
    left_out = [r for r in (*run_a.rungs, *run_b.rungs) if r not in rungs]
    if left_out:
        notes.append(f"not compared, asked in one run only: {', '.join(map(str, sorted(set(left_out))))} tokens")
    made = comparisons(part, evidence, 0, adjusted)
    label_a, label_b = f"{run_a.run_id}:{name_a}", f"{run_b.run_id}:{name_b}"
    return AcrossRuns(
        analysis_version=ANALYSIS_VERSION,
        suite_hash=run_a.suite_hash,
        baseline=label_a,
        candidate=label_b,
        margin=config.margin,
        result=result,
        reason=reason,
        notes=tuple(notes),
        comparisons=tuple(replace(c, baseline=label_a, candidate=label_b) for c in made),
    )


def _build(run: StoredRun, name: str | None) -> str:
    names = [b.build_id for b in run.builds]
    if not names:
        raise ScoresError(f"{run.path}: its campaign.json holds no builds, so there is nothing to compare")
    if name is None:
        base = [b.build_id for b in run.builds if b.role == "base"]
        if not base:
            raise ScoresError(f"{run.path} has no base build; name one of {', '.join(names)} as {run.path}:BUILD")
        return base[0]
    if name not in names:
        raise ScoresError(f"{run.path} has no build {name!r}; it has {', '.join(names)}")
    return name


def _rows(run: StoredRun, build: str, label: str, rungs: tuple[int, ...]) -> pa.Table:
    """One build's rows under the name `label`, as if of one run."""
    keep = pc.and_(pc.equal(run.scores["build_id"], build), pc.is_in(run.scores["rung"], pa.array(rungs)))
    table = run.scores.filter(keep)
    for column, value in (("build_id", label), ("run_id", "compared")):
        i = table.column_names.index(column)
        table = table.set_column(i, column, pa.array([value] * table.num_rows, type=pa.string()))
    return table
