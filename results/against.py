"""Two measured builds against each other, though they were measured on different days: the same suite, paired by probe.

The history keeps probe rows, so any two commits can be compared after the fact with the campaign's own verdict rule.
The controls are those of the baseline's run, asked the same prompts: its A/A build and its known-bad build.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longrecall.evals.schema import Judgement, VerdictConfig
from longrecall.results.history import History, Stored, called
from longrecall.results.storage import HistoryError
from longrecall.runners.schema import Build

if TYPE_CHECKING:
    import pyarrow as pa

CONTROL_ROLES = ("aa", "positive-control", "negative-control")


def relabel(table: "pa.Table", build_id: str) -> "pa.Table":
    """The rows under another build id and one common run id, as a joint judgement wants them."""
    import pyarrow as pa

    for name, value in (("build_id", build_id), ("run_id", "joint")):
        column = pa.array([value] * table.num_rows, pa.string())
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table.replace_schema_metadata(None)


def label_of(stored: Stored) -> str:
    """How a measured build is called beside others: line@commit, or by its run where no commit is known."""
    return f"{stored.entry.line}{'@' if stored.entry.commit else ', '}{called(stored)}"


def labels_of(one: Stored, other: Stored) -> tuple[str, str]:
    """As `label_of`, told apart by their runs where one commit was measured twice."""
    same = label_of(one) == label_of(other)
    first, second = (f"{label_of(s)}{f', run {s.entry.run_id}' if same else ''}" for s in (one, other))
    return first, second


def judge_joint(
    baseline: "tuple[str, pa.Table]",
    controls: "Sequence[tuple[Build, pa.Table]]",
    candidates: "Sequence[tuple[str, pa.Table]]",
    config: VerdictConfig,
) -> Judgement:
    """Judge candidates against a baseline on the rungs that all of them were asked at.

    Raises HistoryError when they share no rung.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from longrecall.evals.verdict import judge

    parts = [("base", baseline[1]), *((b.build_id, t) for b, t in controls), *candidates]
    shared = set.intersection(*(set(table["rung"].unique().to_pylist()) for _, table in parts))
    if not shared:
        raise HistoryError(f"{baseline[0]} and {', '.join(n for n, _ in candidates)} were asked at no common length")
    builds = [
        Build(build_id="base", patch_ids=(), role="base"),
        *(b for b, _ in controls),
        *(Build(build_id=name, patch_ids=(name,), role="suspect") for name, _ in candidates),
    ]
    joint = pa.concat_tables([relabel(table, name) for name, table in parts], promote_options="default")
    joint = joint.filter(pc.is_in(joint["rung"], pa.array(sorted(shared), joint["rung"].type)))
    return judge(joint, builds, rungs=sorted(shared), config=config)


def controls_of(history: History, baseline: Stored) -> "list[tuple[Build, pa.Table]]":
    """The control builds that were measured in the baseline's run and kept."""
    found = []
    for stored in history.entries(baseline.entry.suite_hash)[0]:
        entry = stored.entry
        if entry.run_id == baseline.entry.run_id and entry.role in CONTROL_ROLES and entry.rows is not None:
            build = Build(build_id=entry.build_id, patch_ids=tuple(entry.build.get("patch_ids", ())), role=entry.role)  # type: ignore[arg-type]
            found.append((build, history.scores(stored)))
    return found


def judge_entries(
    history: History, baseline: Stored, candidate: Stored, config: VerdictConfig | None = None
) -> Judgement:
    """One stored build against another. Raises HistoryError when their suites differ."""
    same_suite(baseline, candidate.entry.suite_hash, label_of(candidate))
    config = config or VerdictConfig(margin=baseline.entry.margin)
    rows = history.scores(candidate)
    return judge_joint(
        (label_of(baseline), history.scores(baseline)),
        controls_of(history, baseline),
        [(label_of(candidate), rows)],
        config,
    )


def same_suite(baseline: Stored, suite_hash: str, who: str) -> None:
    """Refuse to compare answers to different questions."""
    if baseline.entry.suite_hash != suite_hash:
        raise HistoryError(
            f"{who} was asked suite {suite_hash[:12]}, the baseline {label_of(baseline)} suite"
            f" {baseline.entry.suite_hash[:12]}: not the same prompts. Run the baseline's commit on the new suite once"
            " (both suites on one commit bridge the series), then pin it with: longrecall history baseline"
        )


def pinned(history: History, name: str) -> Stored:
    """The entry that a baseline name stands for. Raises HistoryError when it was never set or its entry is gone."""
    setting = history.current("baseline", name)
    if setting is None:
        known = sorted({s.name for s in history.settings("baseline")[0]})
        raise HistoryError(
            f"{history.storage.url}: no baseline {name!r}"
            + (
                f" (there are {', '.join(known)})"
                if known
                else "; set one with: longrecall history baseline NAME ENTRY"
            )
        )
    wanted = str(setting.value.get("entry"))
    for stored in history.entries()[0]:
        if stored.id == wanted or wanted in stored.ids:
            return stored
    raise HistoryError(f"{history.storage.url}: baseline {name!r} is entry {wanted}, which is not in the history")
