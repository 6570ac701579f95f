"""llama.cpp itself, from its wheel: keys in 4 bits without their rotation lose recall, keys in 8 bits do not."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

from longrecall.runners.engines import ROOT

PATCHSET = ROOT / "patchsets" / "llamacpp.toml"
RECIPE = ROOT / "patchsets" / "recipes" / "stated-once.toml"
# `make served` installs it: that it is missing is a failure there, and a skipped test elsewhere.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None and os.environ.get("LONGRECALL_SERVED") != "1",
    reason="no xllamacpp here: run `make llamacpp`",
)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_four_bit_keys_without_rotation_are_convicted_and_eight_bit_keys_are_not(
    tmp_path: Path, third_party: ModuleType
) -> None:
    done = third_party.campaign(
        PATCHSET, tmp_path / "runs", 1800.0, "--recipe", str(RECIPE), "--rungs", "1024", "--conversations", "10",
        "--max-tokens", "8",
    )  # fmt: skip
    verdicts = done.verdicts
    assert verdicts["keys-q4_0-no-rotation"] == "culprit", done.said
    assert verdicts["keys-q8_0"] != "culprit" and verdicts["noop"] != "culprit", done.said
    assert all(control["passed"] for control in done.report["controls"].values()), done.said
    assert [replay for replay in done.replays if replay["response"].get("error")] == []
    # One slot, one cached prompt: whatever follows an answer of its conversation finds the history there.
    wanted = [r["response"] for r in done.replays if "cached_at_least" in r["response"]]
    assert len(wanted) > 0.8 * len(done.replays)
    assert all(response["cached_tokens"] >= response["cached_at_least"] for response in wanted)
    assert third_party.working_in(tmp_path) == []
