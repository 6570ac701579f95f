"""Patchset files are read strictly: a misspelt key must not serve the base under a patch's name."""

from pathlib import Path

import pytest

from longrecall.runners.engines import engine_of
from longrecall.runners.patchset import PatchsetError, content_hash, load_patchset, parse_patchset

GOOD = """
name = "demo"
engine = "reference"
margin = 0.1
env = { A = "1" }
args = ["--index-topk", "512"]

[[patch]]
id = "fp8-keys"
title = "fp8 index keys"
diffs = ["keys.diff"]
env = { B = "2" }
expect = "exonerated"

[[patch]]
id = "known-bad"
role = "positive-control"
args = ["--index-topk", "16"]
expect = "culprit"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "keys.diff").write_text("--- a/kernels/x.py\n+++ b/kernels/x.py\n@@ -1 +1 @@\n-a\n+b\n")
    path = tmp_path / "demo.toml"
    path.write_text(GOOD)
    return path


def test_a_good_file_is_read_whole(file: Path) -> None:
    patchset = load_patchset(file)
    assert patchset.name == "demo" and patchset.margin == 0.1 and patchset.env == {"A": "1"}
    assert [patch.patch_id for patch in patchset.patches] == ["fp8-keys", "known-bad"]
    assert patchset.patches[0].diffs == ("keys.diff",) and patchset.patches[0].env == {"B": "2"}
    assert patchset.patches[1].role == "positive-control" and patchset.patches[1].args == ("--index-topk", "16")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("diffs =", "diff =", "patch 'fp8-keys': unknown key 'diff'; did you mean 'diffs'?"),
        ('name = "demo"', 'name = "../demo"', "name = '../demo' names run folders"),
        ('"--index-topk", "16"', '"--index-topk", "512"', "patch 'known-bad': the base has its env and args already"),
        ('args = ["--index-topk", "16"]', 'env = { A = "1" }', "patch 'known-bad': the base has its env and args"),
        ("margin =", "margn =", "unknown key 'margn'; did you mean 'margin'?"),
        ("[[patch]]", "[[patches]]", "unknown key 'patches'; did you mean 'patch'?"),
        ('"keys.diff"', '"keyz.diff"', "diff 'keyz.diff' is not a file"),
        ('id = "fp8-keys"', 'id = "FP8 keys"', "an id is lower-case letters"),
        ('id = "fp8-keys"', 'id = "base"', "taken by the base builds"),
        ('id = "known-bad"', 'id = "fp8-keys"', "two patches have the id 'fp8-keys'"),
        ('role = "positive-control"', 'role = "positive"', "did you mean 'positive-control'?"),
        ('expect = "culprit"', 'expect = "guilty"', "expect = 'guilty' is none of culprit, exonerated"),
        ('B = "2"', "B = 2", 'env B = 2 is not a string; write B = "2"'),
        ("margin = 0.1", "margin = 0.5", "margin = 0.5 is not a share of recall between 0 and 0.5"),
        ('engine = "reference"', "", "key 'engine' is missing"),
        ("margin = 0.1", "margin = = 0.1", "not TOML"),
        ('args = ["--index-topk", "16"]', "", "changes nothing"),
        ("margin = 0.1", "schema_version = 7", "schema_version = 7"),
    ],
)
def test_a_bad_file_names_file_key_and_remedy(file: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 2 if old == "[[patch]]" else 1))
    with pytest.raises(PatchsetError) as problem:
        load_patchset(file)
    assert said in str(problem.value) and str(file) in str(problem.value)


def test_a_missing_file_names_those_that_exist(file: Path) -> None:
    with pytest.raises(PatchsetError, match=r"no such patchset; there is .*demo\.toml"):
        load_patchset(file.with_name("other.toml"))


def test_the_hash_sees_a_changed_diff_and_not_a_moved_file(file: Path, tmp_path: Path) -> None:
    before = content_hash(load_patchset(file))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for item in ("demo.toml", "keys.diff"):
        (moved / item).write_text((tmp_path / item).read_text())
    assert content_hash(load_patchset(moved / "demo.toml")) == before
    (moved / "keys.diff").write_text((tmp_path / "keys.diff").read_text().replace("+b", "+c"))
    assert content_hash(load_patchset(moved / "demo.toml")) != before


def test_an_unknown_engine_names_the_nearest(file: Path) -> None:
    with pytest.raises(PatchsetError, match="did you mean 'reference'"):
        engine_of(parse_patchset(GOOD.replace('"reference"', '"referense"'), file))


@pytest.mark.parametrize(
    ("engine", "given"),
    [("sglang", '"--model-path", "org/name"'), ("sglang", '"--model=m"'), ("vllm", '"--model", "m"')],
)
def test_a_model_among_the_arguments_is_sent_to_model_folder(file: Path, engine: str, given: str) -> None:
    text = f'name = "x"\nengine = "{engine}"\nargs = [{given}, "--tp", "8"]\n[[patch]]\nid = "b"\nenv = {{ A = "1" }}\n'
    with pytest.raises(PatchsetError, match=r"args name '--model.*give its folder with --model-folder"):
        engine_of(parse_patchset(text, file))
    of_a_patch = (
        text.replace(f"{given}, ", "") + f"args = [{given}]\n"
    )  # another checkpoint can be what is under suspicion
    assert engine_of(parse_patchset(of_a_patch, file)).name == engine


@pytest.mark.parametrize("engine", ["reference", "sglang", "vllm", "llamacpp"])
@pytest.mark.parametrize("given", ['"--port", "30000"', '"--host=0.0.0.0"'])
def test_an_address_among_the_arguments_is_refused(file: Path, engine: str, given: str) -> None:
    text = f'name = "x"\nengine = "{engine}"\n[[patch]]\nid = "b"\nargs = [{given}]\n'
    with pytest.raises(PatchsetError, match=r"patch 'b': args name '--.*a free port of 127.0.0.1"):
        engine_of(parse_patchset(text, file))


def test_running_servers_take_endpoints_and_nothing_else(file: Path) -> None:
    given = 'engine = "openai"\nsource = "http://a:1"\n[[patch]]\nid = "b"\n'
    assert engine_of(parse_patchset(given + 'endpoint = "http://b:1"\n', file)).launches is False
    with pytest.raises(PatchsetError, match="give endpoint, and no diffs"):
        engine_of(parse_patchset(given + 'args = ["--x"]\n', file))
    with pytest.raises(PatchsetError, match="source = the base URL"):
        engine_of(parse_patchset(given.replace('source = "http://a:1"\n', "") + 'endpoint = "http://b:1"\n', file))


def test_two_builds_cannot_be_one_running_server(file: Path) -> None:
    text = 'name = "x"\nengine = "openai"\nsource = "http://127.0.0.1:8000/v1"\n'
    for url in ("http://127.0.0.1:8000", "http://localhost:8000/v1/"):
        file.write_text(f'{text}[[patch]]\nid = "a"\nendpoint = "{url}"\n')
        with pytest.raises(PatchsetError, match="'a' and 'source' name one server"):
            engine_of(load_patchset(file))
    file.write_text(f'{text}[[patch]]\nid = "a"\nendpoint = "http://127.0.0.1:8001"\n')
    assert engine_of(load_patchset(file)).name == "openai"
