"""In-process evidence of a run: what cannot be measured is said, and leaves the run as it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longrecall.evals.attribute import load_observations
from longrecall.evals.explain import attribute_runs
from longrecall.kernels.contract.source_tree import SourceTree
from longrecall.results import run_folder
from longrecall.results.in_process import evidence_path, explain_losses, gather_evidence
from longrecall.results.report import write_reports
from longrecall.runners.builds import ModelFolder
from longrecall.runners.deepseek_v32.evidence import routed_scaling, write_observations


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, campaign40: Any, run_writer: Callable[..., Path]) -> Path:
    folder = run_writer(tmp_path_factory.mktemp("runs") / campaign40.campaign.run_id, campaign40)
    write_reports(folder)
    return folder


def model_at(folder: Path) -> ModelFolder:
    return ModelFolder(path=folder, weights_hash=None, tokenizer_hash=None, template_hash=None)


def test_losses_that_cannot_be_measured_are_said_and_the_run_stays(run_dir: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    notes: list[str] = []
    assert not explain_losses(run_dir, model_at(tmp_path), notes.append)
    (said,) = notes
    assert said.startswith("not measured in-process: ")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_evidence_that_is_kept_is_not_measured_again(run_dir: Path, tmp_path: Path) -> None:
    names = ["topk-256", "index-rotation-one-sided", "hash-topk-double-scaling"]
    for name in names:
        evidence_path(run_dir, name).write_text("[]")
    assert gather_evidence(run_dir, names) == [evidence_path(run_dir, name) for name in names]
    notes: list[str] = []
    assert not explain_losses(run_dir, model_at(tmp_path), notes.append) and notes == []


MOE = """\
import torch

class TopK(torch.nn.Module):
    def __init__(self, top_k):
        self.top_k = top_k

    def forward(self, router_logits):
        return torch.topk(router_logits.sigmoid(), 6)

class Experts(torch.nn.Module):
    def __init__(self, factor):
        self.factor = factor

    def forward(self, hidden_states, topk_output):
        weights, ids = topk_output
        partial = torch.ops.kernels.grouped_gemm(hidden_states, self.w13, weights, ids)
        out = torch.empty_like(hidden_states)
        moe_sum_reduce(partial, out, self.factor)
        return out

class DeepseekV2MoE(torch.nn.Module):
    def __init__(self, config, layer_id, quant_config=None, prefix=""):
        self.factor = config.routed_scaling_factor
        self.gate = MoEGate(config=config)
        self.topk = TopK(6)
        self.experts = Experts(self.factor)

    def _forward_shared_experts(self, hidden_states):
        return self.shared_experts(hidden_states)

    def forward(self, hidden_states, input_ids=None):
        shared = self._forward_shared_experts(hidden_states)
        out = self.experts(hidden_states, self.topk(self.gate(hidden_states)))
        out += shared
        return out
"""
UTILS = """\
from enum import Enum

class MoeRunnerBackend(Enum):
    TRITON = "triton"

class MoeA2ABackend(Enum):
    NONE = "none"
"""


def test_what_a_models_activations_and_the_source_say_of_sglangs_patches_is_kept_for_attribution(
    tmp_path: Path, campaign40: Any, run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / campaign40.campaign.run_id, campaign40)
    rotation, doubled, flags = "index-rotation-one-sided", "hash-topk-double-scaling", "topk-256"
    campaign = run_folder.load_campaign(folder)
    given = {rotation: ("patches/rotation.diff",), doubled: ("patches/doubled.diff",)}
    patches = tuple(replace(p, diffs=given.get(p.patch_id, ())) for p in campaign.patchset.patches)
    run_folder.write_campaign(folder, replace(campaign, patchset=replace(campaign.patchset, patches=patches)))
    write_reports(folder)
    (folder / "patches").mkdir()
    model = "sglang/srt/models/deepseek_v2.py"
    head, at = f"--- a/{model}\n+++ b/{model}\n", MOE.splitlines().index("        out += shared") + 1
    (folder / "patches" / "doubled.diff").write_text(
        f"{head}@@ -{at},1 +{at},2 @@\n         out *= self.factor\n".replace("         out *=", "+        out *=")
        + "         out += shared\n"
    )
    (folder / "patches" / "rotation.diff").write_text(f"{head}@@ -1,1 +1,2 @@\n import torch\n+# rotated\n")
    files = {"sglang/__init__.py": "", "sglang/version.py": '__version__ = "0"', model: MOE}
    source = SourceTree("sglang", "a small engine", files | {"sglang/srt/layers/moe/utils.py": UTILS})
    seen = routed_scaling(folder, source)
    write_observations(folder, seen, {rotation: [0.3, 0.34, 0.32]}, "three prompts")
    assert not evidence_path(folder, flags).is_file()
    kept = {o.feature: o for o in load_observations(evidence_path(folder, rotation))}
    assert kept["selection_shift"].estimate == pytest.approx(0.68) and kept["selection_shift"].n == 3
    assert kept["scale_exponent"].estimate == 0
    (twice,) = load_observations(evidence_path(folder, doubled))
    assert twice.estimate == 1 and "to the power of 2" in twice.detail
    found = {a.patch: a.causes[0].family for a in attribute_runs([folder])}
    assert found[rotation] == "index keys" and found[doubled] == "routed scaling"
