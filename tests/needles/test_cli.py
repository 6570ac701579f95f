import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from longrecall.needles.cli import app
from longrecall.needles.dataset import SetError, read_parquet, stored_hash, suite_hash, write_parquet
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler
from longrecall.needles.rungs import parse_rungs

run = CliRunner()


def made(folder: Path, tekken_folder: Path, *extra: str) -> dict:  # type: ignore[type-arg]
    arguments = ["make", "--out", str(folder), "--recipe", "keys", "--rungs", "700,1100", "--count", "3"]
    result = run.invoke(app, [*arguments, "--tokenizer", str(tekken_folder), *extra])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_make_lint_show_and_stats(tmp_path: Path, tekken_folder: Path) -> None:
    document = made(tmp_path / "set", tekken_folder, "--concat")
    assert document["conversations"] == 3 and document["problems"] == 0
    stored = json.loads((tmp_path / "set" / "set.json").read_text())
    assert stored["suite_hash"] == document["suite_hash"] and stored["rungs"] == [700, 1100]
    for folder in ("set", "set/concat"):
        checked = run.invoke(app, ["lint", str(tmp_path / folder), "--tokenizer", str(tekken_folder)])
        assert checked.exit_code == 0 and "3 conversations, 0 problems (lengths checked)" in checked.output
    shown = run.invoke(app, ["show", str(tmp_path / "set"), "--conversation", "2", "--rung", "1100"])
    assert shown.exit_code == 0 and "keys-00002" in shown.output
    turns = read_parquet(tmp_path / "set" / "conversations.parquet")[2].turns
    assert 0 < shown.output.count("[fact: ") <= sum(bool(turn.fact_ids) for turn in turns)
    counted = run.invoke(app, ["stats", str(tmp_path / "set"), "--json"])
    cells = json.loads(counted.stdout)["cells"]
    assert [(cell["kind"], cell["rung"], cell["prompts"]) for cell in cells] == [("keys", 700, 24), ("keys", 1100, 24)]
    assert "24" in run.invoke(app, ["stats", str(tmp_path / "set")]).output


def test_the_reference_tokenizer_has_a_name(
    tmp_path: Path, tekken_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrecall.runners.reference.convert.reference_folder", lambda: tekken_folder)
    made(tmp_path / "set", tekken_folder)
    unchecked = run.invoke(app, ["lint", str(tmp_path / "set")])
    assert unchecked.exit_code == 0 and "(lengths not checked: give --tokenizer reference" in unchecked.output
    checked = run.invoke(app, ["lint", str(tmp_path / "set"), "--tokenizer", "reference"])
    assert checked.exit_code == 0 and "3 conversations, 0 problems (lengths checked)" in checked.output
    arguments = ["make", "--recipe", "keys", "--rungs", "700", "--count", "1", "--out"]
    one, other = (run.invoke(app, [*arguments, str(tmp_path / name), *given])
                  for name, given in (("named", ["--tokenizer", "reference"]), ("default", [])))  # fmt: skip
    assert one.exit_code == other.exit_code == 0
    assert json.loads(one.stdout)["suite_hash"] == json.loads(other.stdout)["suite_hash"]


def test_facts_are_marked_in_words_where_no_colour_shows_them(tmp_path: Path, tekken: Ruler) -> None:
    path = tmp_path / "set.parquet"
    made_now = list(make_conversations(recipe("single"), ruler=tekken, rungs=[400], count=1, seed=0))
    write_parquet(made_now, path)
    value = made_now[0].facts[0].value
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "200"}
    for environment, marked in (
        ({"COLUMNS": "200"}, True),
        (terminal, False),
        (terminal | {"NO_COLOR": "1"}, True),
        (terminal | {"TERM": "dumb"}, True),
    ):
        names = ("FORCE_COLOR", "NO_COLOR", "TERM", "COLORTERM", "COLUMNS")
        shown = run.invoke(app, ["show", str(path)], env=dict.fromkeys(names) | environment).output
        assert ("[fact: " in shown) == marked and ("\x1b[1;33m" in shown) == (not marked), environment
        if marked:
            plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
            assert re.search(rf"\[fact: [^]]*{value}[^]]*\]", plain), environment


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["lint", "--template", "mine.jinja"], "give --tokenizer or --server"),
        (["lint", "--template-args", '{"enable_thinking": false}'], "give --tokenizer or --server"),
        (["lint", "--model", "m"], "give --tokenizer or --server"),
        (["lint", "--tokenizer", "FOLDER", "--model", "m"], "--model m names a model of --server"),
        (
            ["lint", "--tokenizer", "FOLDER", "--server", "http://127.0.0.1:9"],
            "--tokenizer cannot be given with --server",
        ),
        (
            ["lint", "--template", "x.jinja", "--server", "http://127.0.0.1:9"],
            "--template cannot be given with --server",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    command: list[str], message: str, tmp_path: Path, tekken_folder: Path, tekken: Ruler
) -> None:
    path = tmp_path / "set.parquet"
    write_parquet(make_conversations(recipe("single"), ruler=tekken, rungs=[400], count=1, seed=0), path)
    given = [str(tekken_folder) if word == "FOLDER" else word for word in command]
    result = run.invoke(app, [given[0], str(path), *given[1:]])
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_lengths_may_be_written_in_k(tmp_path: Path, tekken_folder: Path) -> None:
    assert parse_rungs("448, 1K,2k,1M") == (448, 1024, 2048, 2**20)
    made(tmp_path / "set", tekken_folder, "--rungs", "1K,2K", "--count", "1")
    assert json.loads((tmp_path / "set" / "set.json").read_text())["rungs"] == [1024, 2048]


def test_residues_are_asked(tmp_path: Path, tekken_folder: Path) -> None:
    made(tmp_path / "set", tekken_folder, "--residues", "0,1,2,3/4")
    rungs = json.loads((tmp_path / "set" / "set.json").read_text())["rungs"]
    assert rungs == [697, 698, 699, 700, 1097, 1098, 1099, 1100]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nedles"], "unknown recipe 'nedles'"),
        (["--rungs", "ten"], "--rungs 'ten': 'ten' is not a length in tokens"),
        (["--rungs", "10"], "need at least"),
        (["--residues", "1,2"], "names no modulus"),
        (["--template-args", "[1]"], "is not a JSON object"),
        (["--template", "missing.jinja"], "missing.jinja"),
        (["--tokenizer", "missing"], "--tokenizer missing: there is no such file or folder"),
    ],
)
def test_wrong_arguments_exit_2_with_one_message_and_leave_nothing(
    arguments: list[str], message: str, tmp_path: Path, tekken_folder: Path
) -> None:
    base = ["make", "--out", str(tmp_path / "set"), "--recipe", "keys", "--tokenizer", str(tekken_folder)]
    result = run.invoke(app, [*base, *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("longrecall: error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_set_is_not_replaced_unasked(tmp_path: Path, tekken_folder: Path) -> None:
    first = made(tmp_path / "set", tekken_folder)
    base = ["make", "--out", str(tmp_path / "set"), "--recipe", "keys", "--tokenizer", str(tekken_folder)]
    refused = run.invoke(app, [*base, "--rungs", "900", "--count", "1"])
    assert refused.exit_code == 2 and "--overwrite" in refused.stderr
    assert made(tmp_path / "set", tekken_folder, "--overwrite", "--seed", "1") != first


def test_changed_content_is_found(tmp_path: Path, tekken: Ruler) -> None:
    made_now = list(make_conversations(recipe("keys"), ruler=tekken, rungs=[700], count=2, seed=0))
    path = tmp_path / "set.parquet"
    written = write_parquet(made_now, path)
    assert written.suite_hash == stored_hash(path) == suite_hash(read_parquet(path))
    table = pq.read_table(path)
    ids = pa.array([f"{value}x" for value in table["conversation_id"].to_pylist()])
    changed = table.set_column(table.schema.get_field_index("conversation_id"), "conversation_id", ids)
    pq.write_table(changed.replace_schema_metadata({"longrecall.suite_hash": written.suite_hash}), path)
    assert stored_hash(path) == written.suite_hash
    result = run.invoke(app, ["lint", str(path)])
    assert result.exit_code == 3 and "content-hash" in result.output


def test_broken_sets_are_named(tmp_path: Path) -> None:
    for content, message in ((None, "there is no set"), (b"PAR1", "not a readable Parquet file")):
        path = tmp_path / "set.parquet"
        if content is not None:
            path.write_bytes(content)
        result = run.invoke(app, ["stats", str(path)])
        assert result.exit_code == 2 and message in result.stderr and "set.parquet" in result.stderr
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(SetError, match="no column 'schema_version'"):
        read_parquet(tmp_path / "other.parquet")


def test_a_set_that_is_no_set_inside_is_named(tmp_path: Path, tekken: Ruler) -> None:
    path = tmp_path / "set.parquet"
    write_parquet(make_conversations(recipe("single"), ruler=tekken, rungs=[400], count=2, seed=0), path)
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[1]["facts"] = None
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    for command in ("lint", "show", "stats"):
        result = run.invoke(app, [command, str(path), *(["--conversation", "1"] if command == "show" else [])])
        assert result.exit_code == 2 and "set.parquet, row 1: not a conversation" in result.stderr
    rows = table.to_pylist()
    rows[0]["asks"][0]["probe_id"] = "nowhere"
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    for command in ("show", "stats"):
        result = run.invoke(app, [command, str(path)])
        assert result.exit_code == 2 and "asks nowhere, which does not exist" in result.stderr


def test_failed_write_leaves_the_old_set(tmp_path: Path, tekken: Ruler) -> None:
    made_now = list(make_conversations(recipe("single"), ruler=tekken, rungs=[400], count=2, seed=0))
    path = tmp_path / "set.parquet"
    write_parquet(made_now, path)

    def failing():  # type: ignore[no-untyped-def]
        yield made_now[0]
        raise RuntimeError("stopped half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_parquet(failing(), path)
    assert read_parquet(path) == made_now
    assert [entry.name for entry in tmp_path.iterdir()] == ["set.parquet"]
    assert write_parquet([], tmp_path / "empty.parquet").conversations == 0
    assert read_parquet(tmp_path / "empty.parquet") == []
