"""For tests that serve a third-party engine: a campaign from a patchset to its report, and what is left running."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longrecall.runners.engines import ROOT


@dataclass(frozen=True)
class Campaign:
    """A finished campaign."""

    run_dir: Path
    report: dict[str, Any]
    replays: list[dict[str, Any]]
    stderr: str

    @property
    def verdicts(self) -> dict[str, str]:
        return {verdict["patch"]: verdict["verdict"] for verdict in self.report["verdicts"]}

    @property
    def said(self) -> str:
        """For a failure: the verdicts with their reasons, and how the campaign's own words end."""
        lines = [f"{v['patch']}: {v['verdict']}: {v['reason']}" for v in self.report["verdicts"]]
        lines += [f"control {name}: {c['passed']}: {c['detail']}" for name, c in self.report["controls"].items()]
        return "\n".join([*lines, self.stderr[-2000:]])


def campaign(patchset: Path, runs: Path, timeout_s: float, *args: str) -> Campaign:
    """Run `longrecall eval`; fails with the end of its output when it does not end well and in time."""
    command = [sys.executable, "-m", "longrecall.results.main", "eval", str(patchset), "--runs-dir", str(runs), *args]
    env = os.environ | {"PYTHONPATH": str(ROOT / ".ns")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it stops its servers in order
        _, stderr = process.communicate(timeout=60)
        raise AssertionError(f"not done after {timeout_s:.0f} s:\n{stderr[-3000:]}") from None
    assert process.returncode == 0, f"ended with code {process.returncode}:\n{stderr[-3000:]}"
    (run_dir,) = runs.iterdir()
    replays = [json.loads(line) for line in (run_dir / "replays.jsonl").read_text().splitlines()]
    return Campaign(run_dir, json.loads((run_dir / "report.json").read_text()), replays, stderr)


def living(*words: str) -> list[str]:
    """Command lines of living processes whose command or environment holds all of these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            whole = command + (entry / "environ").read_bytes()
        except OSError:
            continue
        if int(entry.name) != os.getpid() and all(word.encode() in whole for word in words):
            found.append(command.replace(b"\0", b" ").decode("utf-8", "replace"))
    return found
