"""Attribution of stored runs: which patches lose recall, and why, over one or several run folders.

Arms served afterwards answer the same conversations (or some of them). Where their base answers as the first run's
did, their replies are read as if the arms had been builds of the first run; otherwise each run is read by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from longrecall.evals.attribute import (
    CACHE_ARMS,
    attribute,
    is_arm,
    load_observations,
    observe,
    observe_client_arm,
)
from longrecall.evals.cells import Cells, make_cells
from longrecall.evals.next_arm import unavailable
from longrecall.evals.replies import Replies, as_alike, replies_of
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
    known = suspects_of(first)
    if patch is not None and patch not in known:
        raise ScoresError(f"{first.path} has no patch {patch!r}; it has {', '.join(known)}")
    wanted = [patch] if patch is not None else losing_patches(first)
    return attribute_patches(runs, wanted, evidence=evidence)


def suspects_of(run: StoredRun) -> list[str]:
    """The patches of a run, controls among them, without the interventions of attribution."""
    return [b.build_id for b in run.builds if b.role not in ("base", "aa") and not is_arm(b.build_id)]


def losing_patches(run: StoredRun) -> list[str]:
    """The patches shown to lose recall, largest loss first."""
    judgement = judge(run.scores, run.builds, rungs=run.rungs, config=run.config, order=run.order, secondary=False)
    losing = {
        c.candidate: c.delta_recall
        for c in sorted(judgement.comparisons, key=lambda c: -(c.delta_recall or 0.0))
        if c.p_loss_holm is not None and c.p_loss_holm <= run.config.alpha and c.delta_recall is not None
    }
    return sorted((p for p in losing if p in suspects_of(run)), key=lambda p: losing[p])


def attribute_patches(
    runs: Sequence[StoredRun],
    patches: Iterable[str],
    *,
    evidence: Sequence[Path] = (),
    in_process: bool = True,
    not_next: Iterable[str] = (),
) -> tuple[Attribution, ...]:
    """Attributions of the named patches of the first run, in the order given.

    in_process: also read the evidence kept in the first run's folder; what `eval --inside` kept is read from every run.
    not_next: features not to be named as the next arm, beside those that the engine cannot give.
    """
    first, apart = runs[0], []
    for run in runs[1:]:
        joined = joined_runs(first, run)
        if joined is None:
            apart.append(run)
        else:
            first = joined
    # results/in_process.py writes the first, `eval --inside` (runners/inside.py) the others
    kept = sorted(first.path.glob("evidence-*.json")) if in_process else []
    kept += [path for run in runs if (path := run.path / "inside-evidence.json").is_file()]
    more = [o for path in (*kept, *evidence) for o in load_observations(path)]
    base, cells, replies = _base(first), _cells(first), _replies(first)
    others = {id(run): _client_arms(run) for run in (first, *apart)}
    out_of_reach = unavailable(first.path) | set(not_next)
    made = []
    for name in patches:
        extra = [o for o in more if o.patch == name]
        for run in apart:
            if name in [b.build_id for b in run.builds]:
                extra += observe(_cells(run), _base(run), name, onset=run.onset_tokens, replies=_replies(run))
        for run in (first, *apart):
            seen = [observe_client_arm(_cells(run, "warm"), o, _base(run), name) for o in others[id(run)]]
            extra += [o for o in seen if o is not None]
        own = {o.feature: o for o in observe(cells, base, name, onset=first.onset_tokens, replies=replies)}
        better = _most_exact([o for o in extra if o.feature not in own or o.stderr < own[o.feature].stderr])
        replaced = {o.feature for o in better}
        found = attribute(
            cells,
            base,
            name,
            onset=first.onset_tokens,
            replies=replies,
            more=better,
            without=tuple(replaced & set(own)),
            unavailable=out_of_reach,
        )
        unread = [run.path.name for run in apart if _only_arms_of(run, name)]
        if unread:
            told = (
                f"; the arms of {', '.join(unread)} are not read: its base answers otherwise than {first.path.name}'s"
            )
            found = replace(found, sentence=found.sentence + told)
        made.append(found)
    return tuple(made)


def _only_arms_of(run: StoredRun, patch: str) -> bool:
    """Whether a run serves interventions on a patch and not the patch itself: alone it says nothing of them."""
    names = [b.build_id for b in run.builds]
    return patch not in names and any(is_arm(n) and n.rpartition("--")[0] == patch for n in names)


def joined_runs(first: StoredRun, later: StoredRun) -> StoredRun | None:
    """The first run with the later one's new builds; None where the two did not ask the same of the same base.

    The base is the same where it answers as in the first run, as often as there it answers as the base again.
    """
    if not (set(later.order) <= set(first.order) and set(later.rungs) <= set(first.rungs)):
        return None
    known = {b.build_id for b in first.builds}
    new = [b for b in later.builds if b.build_id not in known and b.role not in ("base", "aa")]
    replies = _replies(first)
    mine, theirs = replies.of(_base(first)), _replies(later).of(_base(later))
    pairs = [(mine[k].text, theirs[k].text) for k in mine.keys() & theirs.keys()]
    equal = [a == b for a, b in pairs if a is not None and b is not None]
    again = replies.same(_base(first), f"{_base(first)}-again") or (1, 1)
    if not new or not equal or not as_alike((sum(equal), len(equal)), again):
        return None
    rows = later.scores.filter(pc.is_in(later.scores["build_id"], pa.array([b.build_id for b in new])))
    name = first.scores["run_id"][0].as_py() if first.scores.num_rows else first.run_id
    place = rows.column_names.index("run_id")
    rows = rows.set_column(place, "run_id", pa.array([name] * rows.num_rows, type=pa.string()))
    scores = pa.concat_tables([first.scores, rows.select(first.scores.column_names).cast(first.scores.schema)])
    return replace(first, builds=(*first.builds, *new), scores=scores)


def _client_arms(run: StoredRun) -> list[Cells]:
    """The other ways in which a run asked the same questions, where it also asked them warm."""
    arms = set(run.scores["arm"].unique().to_pylist())
    return [_cells(run, arm) for arm in CACHE_ARMS if {"warm", arm} <= arms]


def _replies(run: StoredRun) -> Replies:
    return replies_of(run.scores, _cells(run).arm)


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
