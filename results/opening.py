"""The run folder of a plan: results/runs/<UTC time>-<patchset>-<key>, made whole or found unfinished."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from longrecall.needles.dataset import write_parquet
from longrecall.results import run_folder
from longrecall.results.plan import ASKED_BY, CampaignError, Plan
from longrecall.results.schema import Campaign
from longrecall.runners.patchset import read_diffs
from longrecall.runners.schema import Build

_STALE_S = 3600.0


def check_writable(folder: Path) -> None:
    """Raise ValueError, before anything is hashed or served, when a run folder cannot be made there."""
    if not folder.name:
        raise ValueError(f"run folder {str(folder)!r} has no name of its own; give a new folder below it")
    place = folder
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{folder}: the run folder cannot be made: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{folder}: the run folder cannot be made: {place} is not writable")


def open_run(plan: Plan, note: Callable[[str], None]) -> tuple[Path, Campaign]:
    """The run folder of a plan: the unfinished one of the same plan, or a new one with campaign and conversations."""
    options = plan.options
    existing = options.run_dir if options.run_dir and (options.run_dir / run_folder.CAMPAIGN).is_file() else None
    if existing is None and options.run_dir is None and not options.fresh:
        existing = unfinished(options.runs_dir, plan.key)
    if existing is not None:
        campaign = run_folder.load_campaign(existing)
        if differ := _differences(campaign, plan.campaign):
            raise CampaignError(
                f"{existing} holds another campaign: {'; '.join(differ)}; give another --run-dir, or leave it out"
            )
        run_folder.load_timing(existing)  # a damaged one is named now, not after hours of asking
        note(f"going on with {existing}")
        return existing, campaign
    run_dir = options.run_dir or options.runs_dir / plan.campaign.run_id
    campaign = replace(plan.campaign, run_id=run_dir.name)
    made = run_dir.with_name(f".{run_dir.name}.tmp")
    for stale in run_dir.parent.glob(".*.tmp"):
        if time.time() - stale.stat().st_mtime > _STALE_S:  # left by a process that was killed while making it
            shutil.rmtree(stale, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        write_parquet(plan.conversations, made / run_folder.CONVERSATIONS)
        if plan.prompts.twins:
            write_parquet(plan.prompts.twins.values(), made / run_folder.CONCAT)
        for patch in plan.patchset.patches:
            for name, text in read_diffs(plan.patchset, patch):
                if not Path(name).is_absolute() and ".." not in Path(name).parts:
                    run_folder.write_bytes(made / name, text.encode())
        run_folder.write_campaign(made, campaign)
        if run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()
        os.rename(made, run_dir)
    except OSError as problem:
        shutil.rmtree(made, ignore_errors=True)
        raise CampaignError(f"{run_dir}: the run folder cannot be made: {problem.strerror or problem}") from None
    except ValueError as problem:
        shutil.rmtree(made, ignore_errors=True)
        raise CampaignError(f"{run_dir}: the run folder cannot be made: {problem}") from None
    return run_dir, campaign


def unfinished(runs_dir: Path, key: str) -> Path | None:
    """The newest run of this key that has no whole report yet."""
    for path in sorted(runs_dir.glob(f"*-{key[:8]}"), reverse=True):
        if not (path / run_folder.CAMPAIGN).is_file():
            continue
        report = path / run_folder.REPORT_JSON
        said = run_folder.read_json(report) if report.is_file() else None
        if not isinstance(said, dict) or said.get("partial"):
            return path
    return None


# The recipe is not among them: its name may be another path to the same file, and the suite's hash says what it made.
# The recipe is not among them: its name may be another path to the same file, and the suite's hash says what it made.
_FIXED = (*ASKED_BY, "rungs", "n_conversations", "template_args", "verdict", "onset_tokens")


def _differences(stored: Campaign, planned: Campaign) -> list[str]:
    """What keeps a run from being gone on with, each with what is stored and what is asked for now."""
    found = [
        f"{name} is {getattr(stored, name)!r} there and {getattr(planned, name)!r} here"
        for name in _FIXED
        if getattr(stored, name) != getattr(planned, name)
    ]
    if stored.suite_hash != planned.suite_hash:
        found.append(f"its conversations are suite {stored.suite_hash[:12]}, these {planned.suite_hash[:12]}")
    there, here = ({b.build_id: _without_info(b) for b in campaign.builds} for campaign in (stored, planned))
    if list(there) != list(here):
        found.append(f"its builds are {', '.join(there)}, these {', '.join(here)}")
    for name in there.keys() & here.keys():
        if there[name] != here[name]:
            found.append(f"build {name} differs in {', '.join(_differing(there[name], here[name]))}")
    return found


def _differing(stored: Build, planned: Build) -> list[str]:
    if stored.manifest is None or planned.manifest is None:
        return ["its manifest"]
    names = [
        f.name for f in fields(stored.manifest) if getattr(stored.manifest, f.name) != getattr(planned.manifest, f.name)
    ]
    return names or [f.name for f in fields(stored) if getattr(stored, f.name) != getattr(planned, f.name)]


def _without_info(build: Build) -> Build:
    return replace(build, manifest=replace(build.manifest, server_info=None)) if build.manifest else build
