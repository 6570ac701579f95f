import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longrecall.kernels.faults import catalogue
from longrecall.kernels.indexer.cli import UsageError, app, parse_lengths


def test_lengths_double_or_are_listed() -> None:
    assert parse_lengths("1K..8K") == [1024, 2048, 4096, 8192]
    assert parse_lengths("2052,1M") == [2052, 1024**2]
    for wrong in ("4Q", "", "8K..4K", "0"):
        with pytest.raises(UsageError):
            parse_lengths(wrong)


@pytest.mark.parametrize("suffix", ["svg", "png", "json"])
def test_sweep_prints_plots_and_writes_rows(tmp_path: Path, suffix: str) -> None:
    picture, rows = tmp_path / f"s.{suffix}", tmp_path / "rows.json"
    result = CliRunner().invoke(
        app,
        ["sweep", "--lengths", "1K,4K", "--formats", "bf16,fp4", "--faults", "hadamard-query-only", "--queries", "3",
         "--plot", str(picture), "--json", str(rows)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "every key is selected up to 2,051 tokens" in result.output
    written = json.loads(rows.read_text())["rows"]
    assert [(r["tokens"], r["arm"]) for r in written] == [
        (t, arm) for t in (1024, 4096) for arm in ("bf16", "fp4", "hadamard-query-only")
    ]
    assert [r["set_recall"] for r in written[:3]] == [1.0, 1.0, 1.0], "the identity region is exact"
    assert written[5]["set_recall"] < 0.6 < written[4]["set_recall"]
    head = picture.read_bytes()[:8]
    assert head.startswith({"svg": b"<svg", "png": b"\x89PNG", "json": b"{"}[suffix])


def test_unknown_names_are_errors_that_name_them() -> None:
    wrong = (("--preset", "v9"), ("--formats", "fp7"), ("--faults", "gremlins"), ("--lengths", "4Q"),
             ("--capture", "no-such.safetensors"))  # fmt: skip
    for option, value in wrong:
        result = CliRunner().invoke(app, ["sweep", option, value])
        assert result.exit_code == 2 and result.output.startswith("longrecall: error: ")
        assert value in result.output and result.output.count("\n") == 1


def test_faults_are_listed_with_their_sources() -> None:
    result = CliRunner().invoke(app, ["faults", "--part", "indexer"])
    assert result.exit_code == 0 and "ROCm/ATOM#1507" in result.output.replace("\n", "")


def test_all_faults_are_measured_beside_the_formats_and_named_whole() -> None:
    arguments = ["sweep", "--lengths", "1K", "--formats", "bf16", "--queries", "2"]
    told = [CliRunner().invoke(app, [*arguments, *more]).output for more in ([], ["--faults", "all"])]
    names = [fault.name for fault in catalogue("indexer")]
    assert "hadamard-query-only" in names
    assert [[name in text for name in names] for text in told] == [[False] * len(names), [True] * len(names)]
