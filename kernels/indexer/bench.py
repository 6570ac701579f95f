"""`longrecall bench indexer`: score and top-k, timed against peers on a CPU core or a GPU.

    longrecall bench indexer                                     # the GPU if there is one, else one CPU core
    longrecall bench indexer --device cpu --json out.json
    longrecall bench indexer --cases 'score:64x128K*:fp8,select:1x1M'

Every case (inputs, ours, the peers beside it) runs in a process of its own, one after the other, since what ran before
changes times. It is checked against the plain reference first: a peer that is wrong, fails or is not installed
(`peers` has them) is left out and named; a case in which ours is wrong, or that dies or does not end, is named under
`failed`, the others go on, and the exit code is 3. Before each timed call the L2 cache is overwritten. On a GPU the
calls, peers' too, are replayed from a CUDA graph, and the device is kept waiting until the replay is queued: times are
the device's, not those of the host that launches; the next case's process then imports what it needs meanwhile. Times
are microseconds, p20/p50/p80. The file of --json is written after every case. The last line on standard output is one
JSON document.
"""

import fnmatch
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from longrecall.kernels.indexer.bench_cases import DIM, HEADS, CaseName, K
from longrecall.kernels.indexer.cli import UsageError, refusing, write_atomically

SCORE_SHAPES = {
    "cuda": "1x4K,1x128K,1x1M,64x128K,64x128K-distinct,4096x32K,4096x128K",
    "cpu": "1x4K,1x32K,1x128K,8x32K",
}
SELECT_SHAPES = {
    "cuda": "1x4K,1x32K,1x128K,1x1M,64x32K,64x128K,64x1M,4096x32K,4096x128K",
    "cpu": "1x4K,1x128K",
}
MEASURES = "longrecall.kernels.indexer.bench_cases"


def cases(device: str, wanted: str | None) -> list[str]:
    """Names of the cases: the device's table, those of it that patterns match, or any case named in full."""
    table = [f"score:{shape}:{dtype}" for shape in SCORE_SHAPES[device].split(",") for dtype in ("bf16", "fp8")]
    table += [f"select:{shape}" for shape in SELECT_SHAPES[device].split(",")]
    found: list[str] = []
    for part in table if wanted is None else [part.strip() for part in wanted.split(",")]:
        if set(part) & set("*?["):
            matched = fnmatch.filter(table, part)
            if not matched:
                raise UsageError(f"no case matches {part!r}; there are {', '.join(table)}")
            found += matched
        else:
            found.append(str(CaseName.parse(part)))
    return list(dict.fromkeys(found))


class Child:
    """A process that imports what a case needs and waits for its name."""

    def __init__(self, device: str, threads: int, folder: Path, number: int) -> None:
        self.to, self.output = folder / f"{number}.json", folder / f"{number}.log"
        self.log: IO[bytes] = self.output.open("wb")
        command = [sys.executable, "-m", MEASURES, device, "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self.log, stderr=subprocess.STDOUT, text=True
        )

    def measure(self, case: str, seconds: float) -> tuple[dict[str, Any] | None, str | None]:
        """What it found, perhaps only a part, and why it did not do all."""
        reason = None
        try:
            self.process.communicate(json.dumps({"case": case, "to": str(self.to)}) + "\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            reason = f"not done after {seconds:g} s"
        self.end()
        if reason is None and self.process.returncode:
            lines = [line for line in self.output.read_text(errors="replace").splitlines() if line.strip()]
            reason = f"exit code {self.process.returncode}: {lines[-1] if lines else 'no output'}"[:300]
        return (json.loads(self.to.read_text()) if self.to.is_file() else None), reason

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        self.log.close()


@dataclass(kw_only=True, eq=False)
class Findings:
    device: str
    commit: str | None
    not_run: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def document(self) -> str:
        return json.dumps(
            {
                "schema_version": 1,
                "bench": "indexer",
                "commit": self.commit,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "device": self.device,
                **self.machine,
                "peers": self.peers,
                "left_out": self.left_out,
                "failed": self.failed,
                "not_run": self.not_run,
                "rows": self.rows,
            },
            separators=(",", ":"),
        )


def run_cases(names: list[str], findings: Findings, *, threads: int, seconds: float, json_to: Path | None) -> None:
    """One process after the other; on a GPU, whose times the host's load does not touch, the next one starts early."""
    early = findings.device == "cuda"
    with tempfile.TemporaryDirectory() as place:
        folder, child, following = Path(place), None, None
        try:
            for number, name in enumerate(names):
                child = following or Child(findings.device, threads, folder, number)
                following = None
                if early and number + 1 < len(names):
                    following = Child(findings.device, threads, folder, number + 1)
                found, reason = child.measure(name, seconds)
                findings.not_run.remove(name)
                if reason is not None:
                    findings.failed[name] = reason
                    typer.echo(f"case {name} failed: {reason}", err=True)
                if found is not None:
                    findings.rows += found["rows"]
                    findings.peers |= found["peers"]
                    findings.left_out |= found["left_out"]
                    findings.machine = found["machine"]
                typer.echo(f"{number + 1}/{len(names)} {name}", err=True)
                if json_to:
                    write_atomically(json_to, (findings.document() + "\n").encode())
        finally:
            for process in (child, following):
                if process is not None:
                    process.end()


def _commit() -> str | None:
    """The checkout's commit, with + where it has changes; None outside one."""
    run = {"capture_output": True, "text": True, "cwd": Path(__file__).parent}
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], **run)  # type: ignore[call-overload]
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "."], **run)  # type: ignore[call-overload]
    except OSError:
        return None
    return head.stdout.strip() + ("+" if dirty.returncode else "") if head.returncode == 0 else None


def show(rows: Iterable[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"H {HEADS}, D {DIM}, k {K}; microseconds, cold L2")
    for name in ("op", "shape", "dtype", "provider", "p20", "p50", "p80", "MB above inputs", "worst tie / σ"):
        table.add_column(name, justify="left" if name in ("op", "shape", "dtype", "provider") else "right")
    for row in rows:
        times = [f"{row[name]:,.1f}" for name in ("p20", "p50", "p80")]
        extra = "–" if row["extra_mb"] is None else f"{row['extra_mb']:,.1f}"
        tie = "–" if row["worst_tie"] is None else f"{row['worst_tie']:.0e}"
        table.add_row(row["op"], row["shape"], row["dtype"], row["provider"], *times, extra, tie)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def bench(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    wanted: Annotated[
        str | None,
        typer.Option("--cases", help="score:64x128K-distinct:fp8, select:1x1M, or patterns: 'score:*:fp8,select:1x*'."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    seconds: Annotated[float, typer.Option("--case-seconds", min=1, help="A case that takes longer is ended.")] = 240,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the document here too.")] = None,
) -> None:
    """Index score and top-k against peers; the last line on standard output is one JSON document."""
    with refusing():
        if device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"device {device!r} is unknown; known: auto, cpu, cuda")
        if device == "auto":
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        names = cases(device, wanted)
    findings = Findings(device=device, commit=_commit(), not_run=list(names))
    run_cases(names, findings, threads=threads, seconds=seconds, json_to=json_to)
    for name, reason in findings.left_out.items():
        typer.echo(f"peer {name} left out: {reason}")
    show(findings.rows)
    for name, reason in findings.failed.items():
        typer.echo(f"case {name} failed: {reason}")
    typer.echo(findings.document())
    if findings.failed:
        raise typer.Exit(3)
