"""Bridge to Apache Otava: series as CSV with its configuration, and its answer read back.

    longrecall trend --export-otava out/
    otava analyze --config-file out/otava.yaml recall_448_main …        (in an environment of its own)
    longrecall trend --otava /opt/otava/bin/otava

Otava knows no missing value, so each series is a file of its own with its missing points left out.
"""

import csv
import io
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longrecall.results.history import safe
from longrecall.results.run_folder import write_bytes
from longrecall.results.storage import HistoryError


@dataclass(frozen=True, kw_only=True)
class OtavaSeries:
    """One series as Otava takes it: times (ISO 8601), commits and values of the same length, None = not measured."""

    name: str
    times: tuple[str, ...]
    commits: tuple[str, ...]
    values: tuple[float | None, ...]

    @property
    def places(self) -> list[int]:
        """Indices of the points that Otava gets."""
        return [i for i, value in enumerate(self.values) if value is not None]


def export(series: Sequence[OtavaSeries], folder: Path) -> Path:
    """Write a CSV per series and otava.yaml; return the configuration's path."""
    folder = folder.absolute()
    tests = []
    for one in series:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["time", "commit", "value"])
        rows.writerows([one.times[i], one.commits[i], repr(one.values[i])] for i in one.places)
        path = folder / f"{one.name}.csv"
        write_bytes(path, text.getvalue().encode())
        tests.append(
            f"  {one.name}:\n    type: csv\n    file: {json.dumps(str(path))}\n    time_column: time\n"
            "    attributes: [commit]\n    metrics:\n      value:\n        column: value\n        direction: 1\n"
        )
    config = folder / "otava.yaml"
    write_bytes(config, ("tests:\n" + "".join(tests) if tests else "tests: {}\n").encode())
    return config


def analyze(
    executable: Path, series: Sequence[OtavaSeries], *, max_pvalue: float, window_len: int
) -> dict[str, list[int]]:
    """Change points by Otava itself: series name → indices into its values. Raises HistoryError when it fails.

    A population standard deviation goes into its t-test and its magnitude is relative (style of that project), so it
    may find more than results/changes.py.
    """
    long_enough = [one for one in series if len(one.places) > 2]
    if not long_enough:
        return {one.name: [] for one in series}
    with tempfile.TemporaryDirectory() as folder:
        config = export(long_enough, Path(folder))
        command = [str(executable), "analyze", *(one.name for one in long_enough), "--config-file", str(config)]
        command += ["--output", "json", "--since", "100 years ago", "--window", str(window_len)]
        command += ["-P,", str(max_pvalue)]  # the comma is Otava's own: its parser was given "-P, --p-value"
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        except (FileNotFoundError, PermissionError) as error:
            raise HistoryError(
                f"cannot run {executable}: {error.strerror}; install apache-otava apart from this"
            ) from error
    found: dict[str, list[int]] = {one.name: [] for one in series}
    by_name = {one.name: one for one in long_enough}
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            continue
        for name, groups in json.loads(line).items():
            one = by_name[name]
            found[name] = sorted(one.places[int(c["index"])] for group in groups for c in group["changes"])
    if done.returncode or "ERROR" in done.stderr:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or [f"exit code {done.returncode}"]
        raise HistoryError(f"{executable}: {said[0]}")
    return found


def series_name(metric: str, line: str, suite_hash: str) -> str:
    """A name that is a YAML key, a file name and an argument."""
    return safe(f"{metric}-{line}-{suite_hash[:8]}", 120)
