"""Run folder → `Report`: scores the replies, judges the scores, writes report.json, report.md, report.html and charts.

Everything is recomputed from campaign.json, conversations.parquet and replays.jsonl, offline and at any time, also
while the run still goes on (`partial` is then true). Stored verdicts are never an input.
"""

import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrecall.evals.schema import Attribution, Score
from longrecall.needles.schema import Conversation
from longrecall.results import run_folder
from longrecall.results.run_folder import RunFolderError
from longrecall.results.schema import Campaign, Report
from longrecall.runners.schema import Arm, Replay

if TYPE_CHECKING:
    import pyarrow as pa


def version() -> str:
    """The installed longrecall's version; "unknown" when it runs from a bare checkout."""
    try:
        return importlib.metadata.version("longrecall")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def score_all(replays: Iterable[Replay], conversations: Sequence[Conversation], *, where: Path) -> list[Score]:
    """A score for every replay; raises RunFolderError when a replay was asked about a conversation not in the suite."""
    from longrecall.evals.score import foreign_index, score_replay

    foreign = foreign_index(conversations)
    questions = {
        (conversation.conversation_id, ask.probe_id, ask.rung): (conversation, ask, probe)
        for conversation in conversations
        for probes in [{probe.probe_id: probe for probe in conversation.probes}]
        for ask in conversation.asks
        for probe in [probes[ask.probe_id]]
    }
    scores = []
    for replay in replays:
        key = (replay.conversation_id, replay.probe_id, replay.rung)
        if key not in questions:
            raise RunFolderError(
                f"{where / run_folder.REPLAYS}: conversation {key[0]}, probe {key[1]} at {key[2]} tokens is not in"
                f" {run_folder.CONVERSATIONS}"
            )
        conversation, ask, probe = questions[key]
        scores.append(score_replay(replay, conversation, ask, probe, foreign[conversation.conversation_id]))
    return scores


def planned_replays(campaign: Campaign, conversations: Sequence[Conversation], arm: Arm = "warm") -> int:
    """How many replies the campaign wants from each build in an arm; arm mirrored asks the first block alone."""
    order = campaign.conversation_order
    wanted = set(order[: campaign.block_size] if arm == "mirrored" else order)
    rungs = set(campaign.rungs)
    asks = sum(1 for c in conversations if c.conversation_id in wanted for ask in c.asks if ask.rung in rungs)
    return asks * campaign.repeats


class _Run:
    """The files of a run folder, read once."""

    def __init__(self, run_dir: Path) -> None:
        from longrecall.needles.dataset import read_parquet

        self.path = run_dir
        self.campaign = run_folder.load_campaign(run_dir)
        path = run_dir / run_folder.CONVERSATIONS
        if not path.is_file():
            raise RunFolderError(f"{run_dir} is not complete: it has no {run_folder.CONVERSATIONS}")
        self.conversations = read_parquet(path)
        self.replays = run_folder.load_replays(run_dir)
        self.scores = score_all(self.replays, self.conversations, where=run_dir)
        self.timing: dict[str, float | None] = {**run_folder.load_timing(run_dir)}


def _stopped(run: _Run) -> set[str]:
    """Builds that were asked no further because their e-values had decided; what they lack is not missing."""
    from longrecall.evals.cells import ARM_ORDER
    from longrecall.results.early import EarlyStop

    campaign = run.campaign
    if not campaign.stop_early:
        return set()
    early = EarlyStop(campaign, run.conversations)
    judged = next(arm for arm in ARM_ORDER if arm in campaign.arms)
    for score in run.scores:
        if score.arm == judged:
            early.running.add(score)
    return {build.build_id for build in campaign.builds if early.finished(build.build_id)}


def _judge(run: _Run) -> Report:
    from longrecall.evals.scores_file import scores_table
    from longrecall.evals.verdict import judge

    campaign = run.campaign
    asked, stopped = Counter(score.build_id for score in run.scores), _stopped(run)
    wanted = sum(planned_replays(campaign, run.conversations, arm) for arm in campaign.arms)
    table = scores_table(run.scores)
    planned = planned_replays(campaign, run.conversations)
    judgement = judge(
        table,
        campaign.builds,
        rungs=campaign.rungs,
        planned={b.build_id: planned for b in campaign.builds if b.build_id not in stopped},
        config=campaign.verdict,
        order=campaign.conversation_order,
        stopped_early=campaign.stop_early,
    )
    return Report(
        run_id=campaign.run_id,
        suite_hash=campaign.suite_hash,
        partial=any(asked[b.build_id] < wanted for b in campaign.builds if b.build_id not in stopped),
        analysis_version=judgement.analysis_version,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict_config=judgement.config,
        builds=campaign.builds,
        rungs=campaign.rungs,
        onset_tokens=campaign.onset_tokens,
        curves=judgement.curves,
        comparisons=judgement.comparisons,
        verdicts=judgement.verdicts,
        controls={control.name: control for control in judgement.controls},
        missing=judgement.missing,
        timing=run.timing,
        length_fits=judgement.length_fits,
        logprob_shifts=judgement.logprob_shifts,
        flips=judgement.flips,
        attributions=_attributions(run, table),
    )


def _attributions(run: _Run, table: "pa.Table") -> tuple[Attribution, ...]:
    """Why each patch loses recall (or that it has none to explain), with the in-process evidence kept in the folder."""
    from longrecall.evals.explain import attribute_patches, suspects_of
    from longrecall.evals.stored_run import StoredRun

    campaign = run.campaign
    if campaign.onset_tokens is None or not table.num_rows:
        return ()
    stored = StoredRun(
        path=run.path,
        run_id=campaign.run_id,
        suite_hash=campaign.suite_hash,
        rungs=campaign.rungs,
        order=campaign.conversation_order,
        builds=campaign.builds,
        config=campaign.verdict,
        onset_tokens=campaign.onset_tokens,
        scores=table,
    )
    asked = set(table["build_id"].unique().to_pylist())
    if "base" not in asked:
        return ()
    return attribute_patches([stored], [name for name in suspects_of(stored) if name in asked])


def assemble(run_dir: Path) -> Report:
    """The report of what is in the folder now; writes nothing.

    Raises RunFolderError naming the file when one is missing or damaged.
    """
    return _judge(_Run(run_dir))


def assemble_with_scores(run_dir: Path) -> tuple[Report, Campaign, list[Score]]:
    """As `assemble`, with the campaign and the scores that the report rests on."""
    run = _Run(run_dir)
    return _judge(run), run.campaign, run.scores


def write_reports(run_dir: Path) -> Report:
    """Write scores.parquet, report.json, report.md, report.html, flips.jsonl and charts/*.svg; return the report."""
    from longrecall.results import charts, page
    from longrecall.results.flips import BASE, find_flips
    from longrecall.results.markdown import report_markdown
    from longrecall.results.words import anchor

    run = _Run(run_dir)
    report = _judge(run)
    others = [build.build_id for build in report.builds if build.build_id != BASE]
    flips = find_flips(run.scores, run.conversations, run.replays, others)
    data = page.RunData(
        report=report,
        campaign=run.campaign,
        scores=run.scores,
        replays=run.replays,
        flips=flips,
        diffs=page.find_diffs(run.campaign, run_dir),
        version=version(),
    )
    run_folder.write_scores(run_dir, run.scores)
    lines = (json.dumps(asdict(flip), ensure_ascii=True) for own in flips.values() for flip in own)
    run_folder.write_bytes(run_dir / run_folder.FLIPS, "".join(f"{line}\n" for line in lines).encode())
    for name, svg in page.chart_set(data).items():
        run_folder.write_bytes(run_dir / run_folder.CHARTS / f"{anchor(name)}.svg", charts.standalone(svg).encode())
    run_folder.write_bytes(run_dir / run_folder.REPORT_MD, report_markdown(report, run.campaign).encode())
    run_folder.write_bytes(run_dir / run_folder.REPORT_HTML, page.report_html(data).encode())
    # report.json last: where it is, the others are
    run_folder.write_json(run_dir / run_folder.REPORT_JSON, report)
    return report


def export_logs(run_dir: Path, folder: Path) -> list[Path]:
    """Write the run as Inspect AI logs, one per build."""
    from longrecall.results.inspect_export import export_inspect

    run = _Run(run_dir)
    return export_inspect(folder, run.campaign, run.conversations, run.replays, run.scores)


def summary_line(run_dir: Path, report: Report) -> dict[str, Any]:
    """The compact document that commands print as their last line."""
    return {
        "run_dir": str(run_dir),
        "run_id": report.run_id,
        "suite_hash": report.suite_hash,
        "partial": report.partial,
        "controls": {name: control.passed for name, control in report.controls.items()},
        "verdicts": {verdict.patch: verdict.verdict for verdict in report.verdicts},
    }
