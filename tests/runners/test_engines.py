"""What an engine declares and how it launches; engines whose servers cannot run here are looked at without starting."""

import sys
from pathlib import Path

import pytest

from longrecall.runners.builds import ModelFolder, prepare_builds
from longrecall.runners.engines import ENGINES, engine_of
from longrecall.runners.patchset import PatchsetError, parse_patchset
from longrecall.runners.sglang_launch import launch_plans

MODEL = ModelFolder(path=Path("model"), weights_hash=None, tokenizer_hash=None, template_hash=None)


def test_vllm_is_built_from_the_installed_package_and_launched_with_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("SCALE = 1\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path / "site"}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "p.diff").write_text(
        "--- a/vllm/__init__.py\n+++ b/vllm/__init__.py\n@@ -1 +1 @@\n-SCALE = 1\n+SCALE = 2\n"
    )
    text = (
        f'engine = "vllm"\npython = "{python}"\nargs = ["--max-model-len", "4096"]\n'
        '[[patch]]\nid = "p"\ndiffs = ["p.diff"]\nargs = ["--kv-cache-dtype", "fp8"]\n'
    )
    patchset = parse_patchset(text, tmp_path / "set.toml")
    builds = prepare_builds(patchset, engine_of(patchset), MODEL, threads=1)
    plans = {plan.build_id: plan for plan in launch_plans(builds, None, first_port=31_000)}
    (process,) = plans["p"].processes
    assert process.command[1:] == (
        "-m", "vllm.entrypoints.openai.api_server", "--model", "model", "--host", "127.0.0.1", "--port",
        str(process.port), "--enable-prompt-tokens-details", "--max-model-len", "4096", "--kv-cache-dtype", "fp8",
    )  # fmt: skip
    assert process.command[0] == str(python)
    trees = {item.build.build_id: item.tree for item in builds}
    assert trees["p"] is not None and (trees["p"] / "vllm" / "__init__.py").read_text() == "SCALE = 2\n"
    assert trees["base"] is not None and (trees["base"] / "vllm" / "__init__.py").read_text() == "SCALE = 1\n"
    assert trees["base"] == trees["base-again"] and process.env["PYTHONPATH"] == str(trees["p"])


def test_without_vllm_the_environment_is_named(tmp_path: Path) -> None:
    patchset = parse_patchset('engine = "vllm"\n[[patch]]\nid = "p"\nargs = ["--x"]\n', tmp_path / "set.toml")
    with pytest.raises(PatchsetError, match="has no vllm; give python = an environment that has"):
        prepare_builds(patchset, engine_of(patchset), MODEL, threads=1)


def test_the_cache_page_of_vllm_is_its_block() -> None:
    vllm = ENGINES["vllm"]
    assert vllm.page_tokens(("--block-size", "32")) == vllm.page_tokens(("--block-size=32", "--seed", "0")) == 32
    assert vllm.page_tokens(()) == 128 and ENGINES["sglang"].page_tokens(("--page-size", "64")) == 1


def test_what_sglang_returns_follows_its_launch_flags() -> None:
    engine = ENGINES["sglang"]
    assert engine.returns(("--tp", "8")) == frozenset()
    flags = ("--enable-return-indexer-topk", "--enable-return-routed-experts")
    assert engine.returns(flags) == {"return_indexer_topk", "return_routed_experts"}
    assert ENGINES["reference"].returns(()) == {"return_indexer_topk"} and ENGINES["llamacpp"].returns(()) == set()
