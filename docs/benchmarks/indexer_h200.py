"""The page of the indexer's H200 numbers: indexer_h200.json and indexer_h200.md, both from one run on a GPU machine.

    make bench-h200-indexer PYTHON=python3        # bench with peers, then the GPU tests
    python docs/benchmarks/indexer_h200.py --out DIR --minutes 8.5
    python docs/benchmarks/indexer_h200.py --render          # the page again, from the JSON

Peers are what the environment has (`longrecall.kernels.indexer.peers`): sgl-deep-gemm, sglang, flashinfer. Once
`--minutes` are over the bench is ended, with the cases that are done in both files and the others named; the tests have
what is left.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from longrecall.needles.whole_file import write_text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS_S = 150.0
"""Kept free for the tests when the bench takes long."""
PAIRS = {
    "deep_gemm": "DeepGEMM score alone, fp8",
    "deep_gemm + deep_select": "+ DeepSelect",
    "deep_gemm + sglang topk_v2": "+ SGLang topk_v2",
    "deep_gemm + flashinfer.top_k": "+ flashinfer",
    "deep_gemm + torch.topk": "+ torch.topk",
}
SELECTIONS = {
    "longrecall": "longrecall", "deep_select": "DeepSelect", "sglang topk_v2": "SGLang topk_v2",
    "flashinfer.top_k": "flashinfer.top_k", "torch.topk": "torch.topk",
}  # fmt: skip
TARGETS = (
    ("bf16 4096 x 128K", "score+select", "4096x128K", "bf16", 20_000, None),
    ("fp8 4096 x 128K", "score+select", "4096x128K", "fp8", 11_000, 9_650),
    ("fp8 64 x 128K, keys of each", "score+select", "64x128K-distinct", "fp8", 330, None),
    ("fp8 1 x 1M", "score+select", "1x1M", "fp8", 80, 63),
    ("top-512 alone, 4096 x 128K", "select", "4096x128K", "fp32", 1_500, None),
)
"""Case, op, shape, dtype, bar and wish in microseconds at p50."""


def number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


class Times:
    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = {(row["op"], row["provider"], row["shape"], row["dtype"]): row for row in rows}

    def p50(self, *key: str) -> float | None:
        return self.rows[key]["p50"] if key in self.rows else None

    def cell(self, *key: str) -> str:
        found = self.p50(*key)
        return "–" if found is None else number(found)

    def extra(self, *key: str) -> str:
        found = self.rows[key]["extra_mb"] if key in self.rows else None
        return "–" if found is None else f"{found:,.1f}"

    def shapes(self, op: str) -> list[str]:
        return list(dict.fromkeys(shape for kind, _, shape, _ in self.rows if kind == op))


def spaced(shape: str) -> str:
    body, _, tail = shape.partition("-")
    return body.replace("x", " x ") + (", keys of each" if tail else "")


def against_targets(times: Times) -> list[list[str]]:
    found = []
    for name, op, shape, dtype, bar, wish in TARGETS:
        ours = times.p50(op, "longrecall", shape, dtype)
        others = {
            who: value for (kind, who, where, what), row in times.rows.items()
            if (kind, where, what) == (op, shape, dtype) and who != "longrecall" and (value := row["p50"])
        }  # fmt: skip
        best = min(others, key=lambda who: others[who], default=None)
        target = number(bar) + (f", wish {number(wish)}" if wish else "")
        if ours is None:
            found.append([name, target, "–", "not measured", "–"])
            continue
        said = f"missed by {number(ours - bar)}" if ours > bar else "met"
        if wish and ours <= bar:
            said = "both met" if ours <= wish else f"met, the wish missed by {number(ours - wish)}"
        found.append([name, target, number(ours), said, "–" if best is None else f"{best} {number(others[best])}"])
    ratios = [
        theirs / ours
        for shape in times.shapes("select")
        if (ours := times.p50("select", "longrecall", shape, "fp32"))
        and (theirs := times.p50("select", "torch.topk", shape, "fp32"))
    ]
    if ratios:
        ahead = f"{min(ratios):.1f} to {max(ratios):.1f} times as fast"
        found.append(["never behind torch.topk", "every size", ahead, "met" if min(ratios) >= 1 else "missed", "–"])
    return found


def page(document: dict[str, Any]) -> str:
    times, tests = Times(document["rows"]), document.get("tests")
    peers = "; ".join(f"{name} {version}" for name, version in sorted(document["peers"].items())) or "torch alone"
    lines = [
        "# Index score and top-k on an H200",
        "",
        "Written by `docs/benchmarks/indexer_h200.py` from `indexer_h200.json`, which `make bench-h200-indexer` "
        f"measures in one run. {document['at'][:10]}, commit {document['commit']}: {document['gpu']}, "
        f"torch {document['torch']}, Triton {document['triton']}; peers: {peers}.",
        "",
        "H 64, D 128, k 512; p50 in microseconds, p20 and p80 in the JSON. Every case in a process of its own, its "
        "peers in the same; device time of calls replayed from a CUDA graph, L2 overwritten before each; every result "
        "was checked first. Peers that score store all scores and pass them to a selection.",
        "",
        *table(
            ["score + select", "longrecall bf16", "longrecall fp8", *PAIRS.values(), "torch bf16",
             "torch.compile score, bf16", "MB above inputs, longrecall fp8 / DeepGEMM + DeepSelect / torch bf16"],
            [
                [
                    spaced(shape),
                    *(times.cell("score+select", "longrecall", shape, dtype) for dtype in ("bf16", "fp8")),
                    *(times.cell("score+select" if "+" in who else "score", who, shape, "fp8") for who in PAIRS),
                    times.cell("score+select", "torch", shape, "bf16"),
                    times.cell("score", "torch.compile", shape, "bf16"),
                    " / ".join(
                        times.extra("score+select", who, shape, dtype)
                        for who, dtype in (("longrecall", "fp8"), ("deep_gemm + deep_select", "fp8"), ("torch", "bf16"))
                    ),
                ]
                for shape in times.shapes("score+select")
            ],
        ),
        "",
        *table(
            ["top-512 alone", *SELECTIONS.values()],
            [
                [spaced(shape), *(times.cell("select", who, shape, "fp32") for who in SELECTIONS)]
                for shape in times.shapes("select")
            ],
        ),
        "",
        "Against the targets:",
        "",
        *table(["case", "target", "measured", "", "best other"], against_targets(times)),
        "",
    ]  # fmt: skip
    for title, named in (("Left out", document["left_out"]), ("Failed", document.get("failed", {}))):
        if named:
            lines += [f"{title}: " + "; ".join(f"{name} ({why})" for name, why in named.items()) + ".", ""]
    if document.get("not_run"):
        lines += [f"Not run: {', '.join(document['not_run'])}.", ""]
    if tests is None:
        lines.append("The GPU tests were not run.")
    else:
        lines.append(
            f"GPU tests of the kernels, `pytest -m gpu tests/kernels`, in the same run: {tests['passed']} passed, "
            f"{tests['failed']} failed, {tests['skipped']} skipped, {tests['seconds']:.0f} s."
            + ("" if tests["exit_code"] is not None else " They did not end in the time left.")
        )
    return "\n".join(lines) + "\n"


def run(command: Sequence[str], seconds: float) -> int | None:
    """Its exit code; None where it had to be ended, with all that it started."""
    process = subprocess.Popen(command, stdout=sys.stderr, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def bench(out: Path, seconds: float, more: Sequence[str]) -> dict[str, Any]:
    """The bench's document; what it had measured, when the time was over before it ended."""
    part = out / "indexer_h200.part.json"
    part.unlink(missing_ok=True)
    command = [sys.executable, "-m", "longrecall.results.main", "bench", "indexer", "--json", str(part), *more]
    code = run(command, seconds)
    if code not in (0, 3, None) or not part.is_file():
        raise RuntimeError(f"the bench measured no case in {seconds:.0f} s (exit code {code})")
    document: dict[str, Any] = json.loads(part.read_text(encoding="utf-8"))
    part.unlink()
    return document


def gpu_tests(out: Path, seconds: float, more: Sequence[str]) -> dict[str, Any]:
    told = out / "gpu_tests.xml"
    told.unlink(missing_ok=True)
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels", f"--junitxml={told}", *more]
    if importlib.util.find_spec("xdist"):  # compiling is what takes time; nothing is timed here
        command += ["-n", "3", "--dist", "loadfile"]
    code = run(command, seconds)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    if told.is_file():
        for suite in ElementTree.parse(told).getroot().iter("testsuite"):
            counts = {name: counts[name] + int(suite.get(name, 0)) for name in counts}
        told.unlink()
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"],
        "seconds": round(time.monotonic() - begun, 1), "exit_code": code,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of both files")
    parser.add_argument("--minutes", type=float, default=8.5, help="of bench and tests together")
    parser.add_argument("--render", action="store_true", help="only the page, from the JSON that is there")
    parser.add_argument("--bench-args", default="", help="options of `longrecall bench indexer`")
    parser.add_argument("--test-args", default="", help="options of pytest")
    options = parser.parse_args()
    data = options.out / "indexer_h200.json"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.render:
        document = json.loads(data.read_text(encoding="utf-8"))
    else:
        end = time.monotonic() + options.minutes * 60
        reserved = min(TESTS_S, options.minutes * 30)
        document = bench(options.out, end - reserved, options.bench_args.split())
        write_text(data, json.dumps(document, indent=1) + "\n")  # whatever becomes of the tests
        document["tests"] = gpu_tests(options.out, end - time.monotonic(), options.test_args.split())
        write_text(data, json.dumps(document, indent=1) + "\n")
    text = page(document)
    write_text(options.out / "indexer_h200.md", text)
    print(text)
    tests = document.get("tests")
    unsound = tests is not None and (tests["failed"] or tests["exit_code"] is None)
    return 3 if document.get("failed") or document.get("not_run") or unsound else 0


if __name__ == "__main__":
    sys.exit(main())
