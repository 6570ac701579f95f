"""The tracer on a small engine with SGLang's shape, and on SGLang's own wheels.

The small engine has the real one's joints (config → HashTopK/TopK → should_fuse → runner → sum → model) in a few lines,
so that each way of applying the factor 0, 1 or 2 times can be written down and must be found.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from longrecall.kernels.contract.routed_scaling import Scenario, trace
from longrecall.kernels.contract.source_tree import SourceError, SourceTree, open_source

UTILS = """
from enum import Enum

class MoeRunnerBackend(Enum):
    TRITON = "triton"
    MARLIN = "marlin"

    def is_marlin(self):
        return self == MoeRunnerBackend.MARLIN

class MoeA2ABackend(Enum):
    NONE = "none"

def get_moe_runner_backend():
    raise RuntimeError("set at start")
"""
HASH_TOPK = """
import torch
from torch import nn

class HashTopK(nn.Module):
    def __init__(self, topk, *, routed_scaling_factor=1.5, apply_routed_scaling_factor_on_output=False):
        self.routed_scaling_factor = routed_scaling_factor
        {guard}
        self.apply = apply_routed_scaling_factor_on_output

    def forward(self, hidden_states, router_logits, input_ids):
        weights = torch.nn.functional.softplus(router_logits).sqrt().gather(1, self.tid2eid[input_ids])
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.apply:
            weights = weights * self.routed_scaling_factor
        return weights, self.tid2eid[input_ids]
"""
TOPK = """
import torch

def select(router_logits, routed_scaling_factor, apply_routed_scaling_factor_on_output):
    weights, ids = torch.topk(router_logits.sigmoid(), 6)
    if apply_routed_scaling_factor_on_output:
        weights *= routed_scaling_factor
    return weights, ids

class TopK(MultiPlatformOp):
    def __init__(self, top_k, *, routed_scaling_factor=None, apply_routed_scaling_factor_on_output=False):
        self.routed_scaling_factor = routed_scaling_factor
        self.flag = apply_routed_scaling_factor_on_output

    def forward_cuda(self, hidden_states, router_logits):
        return select(router_logits, self.routed_scaling_factor, self.flag)
"""
LAYER = """
import torch
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.fp4 import ModelOptNvFp4FusedMoEMethod

class FusedMoE(torch.nn.Module):
    def __init__(self, quant_config=None, routed_scaling_factor=None):
        self.routed_scaling_factor = routed_scaling_factor
        self.quant_method = quant_config.get_quant_method(self, "experts") if quant_config is not None else None
        self.should_fuse_routed_scaling_factor_in_topk = isinstance(
            self.quant_method, ModelOptNvFp4FusedMoEMethod
        ){fuse}

    def forward(self, hidden_states, topk_output):
        weights, ids = topk_output
        partial = torch.ops.kernels.grouped_gemm(hidden_states, self.w13, weights, ids)
        out = torch.empty_like(hidden_states)
        if get_moe_runner_backend().is_marlin() or not self.should_fuse_routed_scaling_factor_in_topk:
            moe_sum_reduce(partial, out, self.routed_scaling_factor)
        else:
            moe_sum(partial, out)
        return out
"""
MODEL = """
import torch
from sglang.srt.layers.moe.hash_topk import HashTopK
from sglang.srt.layers.moe.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.utils import is_cuda

_is_cuda = is_cuda()

class DeepseekV2MoE(torch.nn.Module):
    def __init__(self, config, layer_id, quant_config=None, prefix=""):
        self.routed_scaling_factor = config.routed_scaling_factor
        self.gate = MoEGate(config=config)
        self.is_hash = layer_id < getattr(config, "num_hash_layers", 0)
        self.experts = FusedMoE(quant_config, routed_scaling_factor=self.routed_scaling_factor)
        flag = self.experts.should_fuse_routed_scaling_factor_in_topk
        if self.is_hash:
            self.topk = HashTopK(
                6, routed_scaling_factor=self.routed_scaling_factor, apply_routed_scaling_factor_on_output=flag
            )
        else:
            self.topk = TopK(
                6, routed_scaling_factor=self.routed_scaling_factor, apply_routed_scaling_factor_on_output=flag
            )

    def _forward_shared_experts(self, hidden_states):
        return self.shared_experts(hidden_states)

    def forward(self, hidden_states, input_ids=None):
        router_logits = self.gate(hidden_states)
        shared = self._forward_shared_experts(hidden_states)
        if self.is_hash:
            topk_output = self.topk(hidden_states, router_logits, input_ids)
        else:
            topk_output = self.topk(hidden_states, router_logits)
        out = self.experts(hidden_states, topk_output)
        if not _is_cuda:
            out *= self.routed_scaling_factor
        out += shared
        return out
"""


def engine(guard: str = "pass", fuse: str = "", **overrides: str) -> SourceTree:
    files = {
        "sglang/__init__.py": "",
        "sglang/version.py": '__version__ = "0.0.1"',
        "sglang/srt/__init__.py": "",
        "sglang/srt/utils/__init__.py": "def is_cuda():\n    import torch\n    return torch.cuda.is_available()\n",
        "sglang/srt/layers/moe/utils.py": UTILS,
        "sglang/srt/layers/moe/hash_topk.py": HASH_TOPK.replace("{guard}", guard),
        "sglang/srt/layers/moe/topk.py": TOPK,
        "sglang/srt/layers/moe/layer.py": LAYER.replace("{fuse}", fuse),
        "sglang/srt/layers/quantization/fp4.py": "class ModelOptNvFp4FusedMoEMethod:\n    pass\n",
        "sglang/srt/models/deepseek_v2.py": MODEL,
        "sglang/srt/models/deepseek_v4.py": (
            "from sglang.srt.models import deepseek_v2\n\n"
            "class Layer:\n    def __init__(self):\n        self.mlp = deepseek_v2.DeepseekV2MoE(config=1, layer_id=2)"
        ),
    }
    return SourceTree("sglang", "a small engine", {**files, **overrides})


def exponents(tree: SourceTree, **scenario: str) -> dict[str, tuple[int, ...] | None]:
    return {kind: layer.routed for kind, layer in trace(tree, Scenario(**scenario)).layers.items()}


def test_sum_reduce_applies_the_factor_once() -> None:
    found = trace(engine(), Scenario(quant="bf16", runner="triton"))
    assert found.verdict == "once"
    assert {kind: layer.shared for kind, layer in found.layers.items()} == {"hash": (0,), "other": (0,)}
    assert [site.where for site in found.layers["other"].sites if site.applies] == ["FusedMoE.forward"]


def test_topk_applies_the_factor_when_the_quant_method_fuses_it() -> None:
    found = trace(engine(), Scenario(quant="nvfp4", runner="triton"))
    assert found.verdict == "once"
    assert [site.where for site in found.layers["hash"].sites if site.applies] == ["HashTopK.forward"]
    assert [site.where for site in found.layers["other"].sites if site.applies] == ["select"]


def test_topk_and_kernel_apply_it_twice() -> None:
    found = trace(engine(), Scenario(quant="nvfp4", runner="marlin"))
    assert found.verdict == "twice"
    assert found.as_json()["routed"] == {"hash": 2, "other": 2}


def test_condition_in_should_fuse_mends_it() -> None:
    tree = engine(fuse=" and not get_moe_runner_backend().is_marlin()")
    assert trace(tree, Scenario(quant="nvfp4", runner="marlin")).verdict == "once"


def test_model_multiplies_again_off_cuda() -> None:
    tree = engine(**{"sglang/srt/layers/moe/topk.py": TOPK.replace("forward_cuda", "forward")})
    assert exponents(tree, quant="bf16", runner="triton", platform="hip") == {"hash": (2,), "other": (2,)}


def test_hash_layers_alone_can_be_wrong() -> None:
    wrong = HASH_TOPK.replace("if self.apply:", "if True:").replace("{guard}", "pass")
    tree = engine(**{"sglang/srt/layers/moe/hash_topk.py": wrong})
    found = trace(tree, Scenario(quant="bf16", runner="triton"))
    assert found.as_json()["routed"] == {"hash": 2, "other": 1}
    assert found.verdict == "mixed"


def test_never_applied_is_never() -> None:
    layer = LAYER.replace("{fuse}", "").replace(
        "moe_sum_reduce(partial, out, self.routed_scaling_factor)", "moe_sum(partial, out)"
    )
    assert (
        trace(engine(**{"sglang/srt/layers/moe/layer.py": layer}), Scenario(quant="bf16", runner="triton")).verdict
        == "never"
    )


def test_assertion_that_refuses_the_flag_is_reported_with_its_place() -> None:
    guard = 'assert not apply_routed_scaling_factor_on_output, "not implemented"'
    found = trace(engine(guard=guard), Scenario(quant="nvfp4", runner="triton"))
    refusal = found.layers["hash"].refusal
    assert refusal is not None and refusal.file.endswith("hash_topk.py") and "not implemented" in refusal.message
    assert found.as_json()["routed"] == {"hash": None, "other": 1}
    assert found.verdict == "once", "the verdict speaks of the layers that can run"


def test_undecided_condition_is_cannot_tell_with_both_exponents() -> None:
    tree = engine(**{"sglang/srt/layers/moe/topk.py": TOPK.replace("if apply_routed", "if mystery() or apply_routed")})
    found = trace(tree, Scenario(quant="bf16", runner="triton"))
    assert found.layers["other"].routed == (1, 2)
    assert found.verdict == "cannot tell"
    assert any("[1, 2]" in text for text in found.layers["other"].unresolved)


def test_triton_kernel_body_is_read() -> None:
    kernel = """
import triton
import triton.language as tl

@triton.jit
def _reduce_kernel(x_ptr, out_ptr, scaling_factor, APPLY: tl.constexpr):
    total = tl.load(x_ptr)
    if APPLY:
        total = total * scaling_factor
    tl.store(out_ptr, total)
"""
    layer = LAYER.replace("{fuse}", "").replace("import torch\n", kernel + "\nimport torch\n", 1)
    layer = layer.replace(
        "moe_sum_reduce(partial, out, self.routed_scaling_factor)",
        "_reduce_kernel[(1,)](partial, out, self.routed_scaling_factor, APPLY={flag})",
    )
    for flag, verdict in (("True", "once"), ("False", "never")):
        tree = engine(**{"sglang/srt/layers/moe/layer.py": layer.replace("{flag}", flag)})
        assert trace(tree, Scenario(quant="bf16", runner="triton")).verdict == verdict


def test_scaled_add_of_the_shared_output_counts() -> None:
    model = MODEL.replace("out += shared", "out = shared.add_(out, alpha=self.routed_scaling_factor)")
    found = trace(engine(**{"sglang/srt/models/deepseek_v2.py": model}), Scenario(quant="bf16", runner="triton"))
    assert found.as_json()["routed"] == {"hash": 2, "other": 2}
    assert found.as_json()["shared"] == {"hash": 0, "other": 0}


def test_scaling_the_sum_scales_the_shared_part_too() -> None:
    model = MODEL.replace(
        "        out += shared\n", "        out += shared\n        out *= self.routed_scaling_factor\n"
    )
    found = trace(engine(**{"sglang/srt/models/deepseek_v2.py": model}), Scenario(quant="bf16", runner="triton"))
    assert found.as_json()["shared"] == {"hash": 1, "other": 1}


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ({"quant": "int3", "runner": "triton"}, ("int3", "nvfp4")),
        ({"quant": "bf16", "runner": "warp"}, ("warp", "marlin", "triton")),
        ({"quant": "bf16", "runner": "triton", "model": "deepseek_v9"}, ("deepseek_v9.py", "deepseek_v4")),
        ({"quant": "bf16", "runner": "triton", "platform": "tpu"}, ("tpu", "cuda")),
        ({"quant": "fp8", "runner": "triton"}, ("Fp8MoEMethod", "quantization")),
    ],
)  # fmt: skip
def test_unknown_things_are_named_with_what_would_be_right(scenario: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(SourceError) as caught:
        trace(engine(), Scenario(**scenario))
    for word in words:
        assert word in str(caught.value)


def test_syntax_error_names_file_and_line() -> None:
    tree = engine(**{"sglang/srt/models/deepseek_v2.py": "class X:\n    def broken(:\n"})
    with pytest.raises(SourceError, match=r"deepseek_v2\.py:2: syntax error"):
        trace(tree, Scenario(quant="bf16", runner="triton"))


def test_moved_model_file_says_what_was_looked_for() -> None:
    tree = engine(**{"sglang/srt/models/deepseek_v4.py": "x = 1\n"})
    with pytest.raises(SourceError, match="no class sets self"):
        trace(tree, Scenario(quant="bf16", runner="triton"))


def write_tree(folder: Path, tree: SourceTree) -> Path:
    for path in tree.paths():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(tree.text(path))
    return folder


def test_folder_wheel_and_package_folder_are_the_same_source(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "checkout" / "python", engine()).parent
    wheel = tmp_path / "sglang-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (folder / "python").rglob("*.py"):
            archive.write(path, path.relative_to(folder / "python"))
    for where in (folder, folder / "python", folder / "python" / "sglang", wheel):
        found = trace(open_source(str(where)), Scenario(quant="nvfp4", runner="marlin"))
        assert (found.verdict, found.version) == ("twice", "0.0.1")


def test_wheel_of_another_project_says_whose_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "other-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(SourceError, match="a wheel of other, not of sglang"):
        open_source(str(wheel))


def test_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    with pytest.raises(SourceError, match="not a zip archive"):
        open_source(str(tmp_path / "x.whl"))
    with pytest.raises(SourceError, match="not a version number"):
        open_source(str(tmp_path / "missing"))


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longrecall.results.main", "trace", "routed-scaling", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_command_prints_sites_counts_and_verdict(tmp_path: Path) -> None:
    folder = write_tree(tmp_path, engine())
    done = run_cli("--sglang", str(folder), "--quant", "nvfp4", "--runner", "marlin", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["verdict"] == "twice"
    assert {"file", "line", "where", "applies"} <= set(answer["sites"][0])
    assert (answer["routed"], answer["shared"]) == ({"hash": 2, "other": 2}, {"hash": 0, "other": 0})
    assert "verdict: twice" in run_cli("--sglang", str(folder), "--quant", "nvfp4", "--runner", "marlin").stdout


def test_command_reads_a_patch_before_it_is_served(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "tree", engine())
    lines = LAYER.replace("{fuse}", "").splitlines()
    at = next(i for i, line in enumerate(lines) if line == "        )")
    patch = tmp_path / "fix.patch"
    patch.write_text(
        "--- a/python/sglang/srt/layers/moe/layer.py\n+++ b/python/sglang/srt/layers/moe/layer.py\n"
        f"@@ -{at + 1},1 +{at + 1},1 @@\n-        )\n+        ) and not get_moe_runner_backend().is_marlin()\n"
    )
    done = run_cli("--sglang", str(folder), "--runner", "marlin", "--quant", "nvfp4", "--patch", str(patch), "--json")
    assert json.loads(done.stdout)["verdict"] == "once", done.stderr


def test_command_fails_with_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = run_cli("--sglang", str(tmp_path), "--quant", "nvfp4")
    assert done.returncode == 2
    assert done.stderr.startswith("longrecall: error:") and done.stderr.count("\n") == 1


def test_diff_shows_only_the_cells_that_changed(tmp_path: Path) -> None:
    old = write_tree(tmp_path / "old", engine())
    new = write_tree(tmp_path / "new", engine(fuse=" and not get_moe_runner_backend().is_marlin()"))
    changed = json.loads(run_cli("--diff", str(old), str(new), "--json").stdout)["changed"]
    assert set(changed) == {"nvfp4/marlin"}
    assert [changed["nvfp4/marlin"][side]["verdict"] for side in ("old", "new")] == ["twice", "once"]


WHEELS = ("0.5.12", "0.5.13", "0.5.14", "0.5.16", "0.5.17", "0.5.23")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SourceTree]:
    return {version: open_source(version) for version in WHEELS}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_known_answers_on_sglang_wheels(wheels: dict[str, SourceTree]) -> None:
    def routed(version: str, **scenario: object) -> dict[str, object]:
        found = trace(wheels[version], Scenario(**scenario)).as_json()  # type: ignore[arg-type]
        return {**found["routed"], "verdict": found["verdict"]}  # type: ignore[dict-item]

    marlin = dict(quant="nvfp4", runner="marlin")
    for version in ("0.5.12", "0.5.13"):
        refusal = trace(wheels[version], Scenario(**marlin)).layers["hash"].refusal
        assert refusal is not None and refusal.file.endswith("hash_topk.py") and "not implemented" in refusal.message
    assert routed("0.5.13", **marlin) == {"hash": None, "other": 2, "verdict": "twice"}
    for version in ("0.5.14", "0.5.16"):
        assert routed(version, **marlin) == {"hash": 2, "other": 2, "verdict": "twice"}
    for version in ("0.5.17", "0.5.23"):
        assert routed(version, **marlin) == {"hash": 1, "other": 1, "verdict": "once"}
    once = {"hash": 1, "other": 1, "verdict": "once"}
    for quant, runner in (
        ("bf16", "triton"), ("bf16", "flashinfer_cutlass"), ("fp8", "triton"), ("fp8", "deep_gemm"), ("fp8", "cutlass"),
        ("fp8", "flashinfer_trtllm"), ("fp8", "flashinfer_trtllm_routed"), ("nvfp4", "flashinfer_trtllm_routed"),
        ("nvfp4", "flashinfer_cutlass"), ("nvfp4", "flashinfer_cutedsl"), ("mxfp4", "marlin"),
        ("mxfp4", "flashinfer_mxfp4"), ("mxfp4", "flashinfer_cutlass"),
    ):  # fmt: skip
        assert routed("0.5.23", quant=quant, runner=runner) == once, (quant, runner)
    refused = trace(wheels["0.5.23"], Scenario(quant="nvfp4", runner="triton")).layers["other"].refusal
    assert refused is not None and "NVFP4" in refused.message
    # ROCm without AITER: the Triton runner and the model both multiply (open in sglang PR 40584)
    assert routed("0.5.23", quant="bf16", runner="triton", platform="hip")["verdict"] == "twice"
    # ROCm with AITER up to 0.5.17: nobody multiplies in the hash layers
    aiter = dict(quant="bf16", runner="triton", platform="hip", env={"SGLANG_USE_AITER": "1"})
    assert routed("0.5.16", **aiter) == {"hash": 0, "other": 1, "verdict": "mixed"}


REFERENCE_MOE = "longrecall/runners/reference/moe.py"


def reference_with(before: str, after: str, count: int = 1) -> SourceTree:
    tree = open_source("reference")
    text = tree.text(REFERENCE_MOE)
    assert before in text
    return tree.with_overrides({REFERENCE_MOE: text.replace(before, after, count)})


def test_reference_build_applies_the_factor_once() -> None:
    found = trace(open_source("reference"), Scenario())
    assert found.as_json()["routed"] == {"hash": 1, "other": 1}
    assert found.verdict == "once"


def test_reference_hash_topk_that_scales_as_well_is_twice_in_hash_layers_only() -> None:
    flag = "apply_routed_scaling_factor_on_output=False"
    found = trace(reference_with(flag, flag.replace("False", "True")), Scenario())
    assert found.as_json()["routed"] == {"hash": 2, "other": 1}


def test_reference_that_never_scales_is_never() -> None:
    call = "moe_sum_reduce(expert_out[rows], topk_weights[rows], self.routed_scaling_factor)"
    found = trace(reference_with(call, "moe_sum_reduce(expert_out[rows], topk_weights[rows], 1.0)"), Scenario())
    assert found.as_json()["routed"] == {"hash": 0, "other": 0}
