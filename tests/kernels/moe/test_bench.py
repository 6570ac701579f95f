"""`longrecall bench moe` on a small layer: checked outputs, rows with units, one JSON document last."""

import json

import pytest
import typer
from typer.testing import CliRunner

from longrecall.kernels.moe.bench import bench

app = typer.Typer()
app.command()(bench)
SMALL = ["--experts", "8", "--hidden", "64", "--intermediate", "32", "--repeats", "2"]


def test_last_line_is_one_json_document(tmp_path) -> None:
    out = tmp_path / "moe.json"
    result = CliRunner().invoke(app, [*SMALL, "--tokens", "1,5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert {(row["op"], row["tokens"]) for row in document["rows"]} == {
        (op, tokens) for op in ("experts+combine", "sum-reduce") for tokens in (1, 5)
    }
    for row in document["rows"]:
        if row["provider"].startswith("longrecall"):
            assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"] and row["error_vs_fp64"] < 1e-5


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tokens", "1,x"], "--tokens '1,x' is not a list"),
        (["--preset", "v9"], "no MoE preset 'v9'"),
        (["--experts", "2"], "--experts 2 is fewer than the 6"),
    ],
)
def test_bad_arguments_exit_2_and_say_why(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and message in result.output
