"""Run folder → history entries: one manifest per served build, with its probe rows."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrecall.results import run_folder
from longrecall.results.history import Entry, NoisePoint, RungPoint, parse_time
from longrecall.results.report import assemble_with_scores, version
from longrecall.results.schema import Campaign, Report
from longrecall.results.storage import HistoryError, Storage
from longrecall.runners.schema import Build

if TYPE_CHECKING:
    import pyarrow as pa

COMMIT_VARIABLES = ("LONGRECALL_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA", "BUILDKITE_COMMIT", "GIT_COMMIT")
"""Where CI systems say which commit is measured, tried in this order."""


def commit_from_environment() -> str | None:
    """The measured commit as the CI system names it."""
    return next((os.environ[name] for name in COMMIT_VARIABLES if os.environ.get(name)), None)


def commit_time(commit: str, repository: Path = Path(".")) -> str | None:
    """The committer time of a commit of the repository here, None when it is not known here."""
    command = ["git", "-C", str(repository), "show", "-s", "--format=%cI", f"{commit}^{{commit}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return parse_time(done.stdout.strip()).isoformat() if done.returncode == 0 and done.stdout.strip() else None


def entries_of(
    run_dir: Path,
    *,
    line: str = "base",
    commit: str | None = None,
    created: str | None = None,
    note: str = "",
    builds: Sequence[str] | None = None,
) -> list[tuple[Entry, "pa.Table"]]:
    """The builds of a run as history entries with their rows, the base on line `line`, the others on their own id.

    created: time that orders the line; None takes the campaign's. Raises HistoryError when the run is not finished (a
    half-asked suite is no point of a series) or when a build is asked for that the run does not have.
    """
    from longrecall.evals.scores_file import scores_table

    report, campaign, scores = assemble_with_scores(run_dir)
    if report.partial:
        raise HistoryError(f"{run_dir}: the run is not finished; go on with it before it becomes history")
    known = [b.build_id for b in report.builds]
    for build_id in builds or ():
        if build_id not in known:
            raise HistoryError(f"{run_dir}: no build {build_id!r}; the run has {', '.join(known)}")
    made = []
    for build in report.builds:
        if builds is None or build.build_id in builds:
            entry = _entry(report, campaign, build, line=line, commit=commit, created=created, note=note)
            made.append((entry, scores_table([s for s in scores if s.build_id == build.build_id])))
    return made


def _entry(
    report: Report, campaign: Campaign, build: Build, *, line: str, commit: str | None, created: str | None, note: str
) -> Entry:
    fit = next((f for f in report.length_fits if f.build == build.build_id), None)
    aa = report.controls.get("aa")
    verdict = next((v for v in report.verdicts if v.patch == build.build_id), None)
    margin = report.verdict_config.margin
    manifest: dict[str, Any] = asdict(build.manifest) if build.manifest else {}
    manifest.pop("server_info", None)  # large, and in the run's campaign.json
    return Entry(
        run_id=report.run_id,
        build_id=build.build_id,
        role=build.role,
        line=line if build.role == "base" else build.build_id,
        suite_hash=report.suite_hash,
        created=parse_time(created or campaign.created).isoformat(timespec="seconds"),
        commit=commit,
        engine=campaign.patchset.engine,
        margin=margin,
        points=tuple(
            RungPoint(
                rung=p.rung,
                recall=p.recall,
                ci_low=p.ci_low,
                ci_high=p.ci_high,
                n_conversations=p.n_conversations,
                n_probes=p.n_probes,
                n_missing=sum(p.outcomes.get(name, 0) for name in ("truncated", "overflow", "error")),
            )
            for p in sorted(report.curves, key=lambda p: p.rung)
            if p.build == build.build_id
        ),
        noise=tuple(
            NoisePoint(rung=c.rung, delta=c.delta_recall, ci_low=c.ci_low, ci_high=c.ci_high)
            for c in (aa.comparisons if aa else ())
            if c.rung is not None
        )
        if build.role == "base"
        else (),
        l50_tokens=fit.l50_tokens if fit else None,
        l50_low=fit.l50_ci_low if fit else None,
        l50_high=fit.l50_ci_high if fit else None,
        controls={name: control.passed for name, control in report.controls.items()},
        verdict=verdict.verdict if verdict else None,
        analysis_version=report.analysis_version,
        longrecall_version=version(),
        build={"patch_ids": list(build.patch_ids), **manifest},
        note=note,
    )


def store_transcripts(run_dir: Path, storage: Storage) -> list[str]:
    """Put the replies (zstd) and the conversations of a run where their size does no harm. Returns the names."""
    import pyarrow as pa

    if not storage.keeps_rows:
        raise HistoryError(f"{storage.url}: transcripts do not belong in git; give a folder or bucket with --rows")
    campaign = run_folder.load_campaign(run_dir)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write((run_dir / run_folder.REPLAYS).read_bytes())
    files = {
        f"transcripts/{campaign.run_id}/{run_folder.REPLAYS}.zst": sink.getvalue().to_pybytes(),
        f"transcripts/{campaign.run_id}/{run_folder.CONVERSATIONS}": (run_dir / run_folder.CONVERSATIONS).read_bytes(),
        f"transcripts/{campaign.run_id}/{run_folder.CAMPAIGN}": (run_dir / run_folder.CAMPAIGN).read_bytes(),
    }
    storage.write_many(files)
    return list(files)
