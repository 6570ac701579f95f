"""The bench's cases: chosen by name, each in a process of its own, one that dies reported beside the others."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from longrecall.kernels.indexer import bench, bench_cases, topk
from longrecall.kernels.indexer.bench_cases import CaseName
from longrecall.kernels.indexer.cli import UsageError
from longrecall.kernels.indexer.peers import Peers
from longrecall.results.main import build_app

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = """
import json, os, sys, time
asked = json.loads(sys.stdin.readline() or "null")
if asked is None:
    sys.exit(0)
name = asked["case"]
if name == "select:1x3K":
    time.sleep(600)
row = {"op": "select", "provider": "longrecall", "shape": name, "dtype": "fp32", "unit": "us", "p20": 1.0, "p50": 1.0,
       "p80": 1.0, "extra_mb": None, "worst_tie": 0.0, "pid": os.getpid()}
found = {"rows": [row], "peers": {"some": "1"}, "left_out": {}, "machine": {"device": sys.argv[1], "gpu": None}}
with open(asked["to"], "w") as file:
    json.dump(found, file)
if name == "select:1x2K":
    print("something before")
    print("out of shared memory")
    sys.exit(7)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what measures: one row for each case, then death at 1x2K; nothing and no end at 1x3K."""
    (tmp_path / "stand_in_for_cases.py").write_text(STAND_IN)
    monkeypatch.setattr(bench, "MEASURES", "stand_in_for_cases")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def invoke(*arguments: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    result = CliRunner().invoke(build_app(["bench", "indexer"]), ["bench", "indexer", *arguments])
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_cases_are_named_in_full_or_by_patterns_of_the_table() -> None:
    assert len(bench.cases("cuda", None)) == 7 * 2 + 9
    assert bench.cases("cuda", "score:64x128K*:fp8") == ["score:64x128K:fp8", "score:64x128K-distinct:fp8"]
    assert bench.cases("cpu", "select:3x600, select:3x600,score:1x2M:fp32") == ["select:3x600", "score:1x2M:fp32"]
    for name in [*bench.cases("cuda", None), *bench.cases("cpu", None)]:
        assert str(CaseName.parse(name)) == name


@pytest.mark.parametrize(
    "wrong",
    ["score:1x4K", "score:1x4K:fp4", "select:1x4K:fp8", "sort:1x9K", "score:8x1K-distinct:fp32",
     "select:1x1K-distinct", "score:1x7K:*"],
)  # fmt: skip
def test_a_case_that_does_not_exist_is_named(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.replace("*", r"\*")):
        bench.cases("cuda", wrong)


@pytest.mark.parametrize("early", [False, True])
def test_a_case_that_dies_is_reported_and_the_others_go_on(stand_in: None, tmp_path: Path, early: bool) -> None:
    names = ["select:1x1K", "select:1x2K", "select:1x4K"]
    findings = bench.Findings(device="cuda" if early else "cpu", commit=None, not_run=list(names))
    file = tmp_path / "out.json"
    bench.run_cases(names, findings, threads=1, seconds=120, json_to=file)
    assert findings.failed == {"select:1x2K": "exit code 7: out of shared memory"}
    written = json.loads(file.read_text())
    # what was measured before a case broke off stays
    assert [row["shape"] for row in written["rows"]] == names
    assert len({row["pid"] for row in written["rows"]} - {os.getpid()}) == 3
    assert written["not_run"] == [] and written["peers"] == {"some": "1"}


def test_a_case_that_never_ends_is_ended(stand_in: None) -> None:
    findings = bench.Findings(device="cpu", commit=None, not_run=["select:1x3K"])
    bench.run_cases(["select:1x3K"], findings, threads=1, seconds=1, json_to=None)
    assert findings.failed == {"select:1x3K": "not done after 1 s"} and findings.rows == []


def test_a_bench_with_a_failed_case_says_so_and_leaves_with_three(stand_in: None) -> None:
    code, document = invoke("--device", "cpu", "--cases", "select:1x2K,select:1x1K")
    assert code == 3 and list(document["failed"]) == ["select:1x2K"] and len(document["rows"]) == 2


def test_a_case_on_a_cpu_is_checked_and_timed() -> None:
    code, document = invoke("--device", "cpu", "--cases", "select:2x600")
    assert code == 0 and document["failed"] == {} and document["device"] == "cpu"
    assert [(row["provider"], row["worst_tie"]) for row in document["rows"]] == [("longrecall", 0), ("torch.topk", 0)]
    assert all(0 < row["p20"] <= row["p50"] <= row["p80"] for row in document["rows"])


def test_a_wrong_result_of_ours_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "index_topk", lambda *given, **more: torch.arange(bench_cases.K).unsqueeze(0))
    with pytest.raises(bench_cases.BenchError, match="longrecall at 1x2K bf16 picks a key"):
        list(bench_cases.score_rows(bench_cases.Shape.parse("1x2K"), "bf16", "cpu", Peers()))


# The page of the H200 numbers


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("indexer_h200", ROOT / "docs/benchmarks/indexer_h200.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def measured(op: str, provider: str, shape: str, dtype: str, p50: float) -> dict[str, object]:
    return {"op": op, "provider": provider, "shape": shape, "dtype": dtype, "p50": p50, "extra_mb": None}


def test_the_page_holds_every_time_against_its_target_and_the_best_of_the_same_case(script: ModuleType) -> None:
    rows = [
        measured("score+select", "longrecall", "64x128K-distinct", "fp8", 346.1),
        measured("score+select", "deep_gemm + deep_select", "64x128K-distinct", "fp8", 300.2),
        measured("score+select", "torch", "64x128K-distinct", "bf16", 3531.0),
        measured("score+select", "longrecall", "1x1M", "fp8", 67.7),
        measured("select", "longrecall", "1x1M", "fp32", 29.6),
        measured("select", "torch.topk", "1x1M", "fp32", 59.2),
    ]
    document = {
        "at": "2026-11-30T00:00:00+00:00", "commit": "abc", "gpu": "GPU", "torch": "2", "triton": "3", "peers": {},
        "left_out": {}, "failed": {"select:1x4K": "exit code 7"}, "not_run": ["select:64x1M"], "rows": rows,
        "tests": {"passed": 25, "failed": 0, "skipped": 0, "seconds": 60.0, "exit_code": None},
    }  # fmt: skip
    page = script.page(document)
    assert "| 64 x 128K, keys of each | – | 346 | – | 300 |" in page
    said = "| fp8 64 x 128K, keys of each | 330 | 346 | missed by 16.1 | deep_gemm + deep_select 300 |"
    assert said in page
    assert "| fp8 1 x 1M | 80.0, wish 63.0 | 67.7 | met, the wish missed by 4.7 | – |" in page
    assert "| never behind torch.topk | every size | 2.0 to 2.0 times as fast | met | – |" in page
    assert "| bf16 4096 x 128K | 20,000 | – | not measured | – |" in page
    assert "Failed: select:1x4K (exit code 7)." in page and "Not run: select:64x1M." in page
    assert "25 passed" in page and "did not end" in page


def test_what_takes_longer_than_its_share_of_the_time_is_ended(script: ModuleType, tmp_path: Path) -> None:
    assert script.run([sys.executable, "-c", "import time; time.sleep(600)"], 1) is None
    assert script.run([sys.executable, "-c", "raise SystemExit(3)"], 120) == 3
    with pytest.raises(RuntimeError, match="measured no case"):
        script.bench(tmp_path, 120, ["--device", "none"])


@pytest.mark.parametrize(("exit_code", "said"), [(0, 0), (None, 3)])
def test_gpu_tests_that_did_not_end_are_no_success(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int | None, said: int
) -> None:
    document = {
        "at": "2026-11-30T00:00:00+00:00", "commit": "abc", "gpu": "GPU", "torch": "2", "triton": "3", "peers": {},
        "left_out": {}, "failed": {}, "not_run": [], "rows": [],
        "tests": {"passed": 25, "failed": 0, "skipped": 0, "seconds": 60.0, "exit_code": exit_code},
    }  # fmt: skip
    (tmp_path / "indexer_h200.json").write_text(json.dumps(document))
    monkeypatch.setattr(sys, "argv", ["indexer_h200.py", "--render", "--out", str(tmp_path)])
    assert script.main() == said
    assert (tmp_path / "indexer_h200.md").is_file()
