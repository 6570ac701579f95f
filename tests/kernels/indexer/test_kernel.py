"""The Triton path, run by Triton's interpreter on a CPU; `gpu` tests run the same on a device, with bf16.

The interpreter multiplies bf16 tiles as if they were integers, so bf16 keys are tested on a device alone.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

CHECK = """
import torch
from longrecall.kernels.indexer import indexer_logits_ref, kernel, select_topk

DEVICE = torch.device("{device}")
g = torch.Generator().manual_seed(0)


def compare(
    name, rows, heads, columns, dim, k, dtype, *, distinct=False, scaled=True, tie=False, nan=False, launch=None
):
    q = torch.randn(rows, heads, dim, generator=g)
    keys = torch.randn(*((rows, columns) if distinct else (columns,)), dim, generator=g)
    if tie:
        keys = keys.sign()
        q = q.sign()
    weights = torch.randn(rows, heads, generator=g).round(decimals=1) if tie else torch.randn(rows, heads, generator=g)
    visible = torch.randint(0, columns + 1, (rows,), generator=g, dtype=torch.int32)
    visible[0] = columns
    q, keys = q.to(dtype), keys.to(dtype)
    scale = (torch.rand(keys.shape[:-1], generator=g) + 0.5) if scaled else None
    if tie and scaled:
        scale = scale.round() + 1
    if nan:
        scale[..., ::7] = torch.nan
    q, keys, weights, visible = (x.to(DEVICE) for x in (q, keys, weights, visible))
    scale = scale.to(DEVICE) if scaled else None
    scores = indexer_logits_ref(q.float(), keys.float(), weights)
    if scaled:
        scores = scores * scale
    got = kernel.topk_triton(q, keys, weights, k, visible=visible, scale=scale, launch=launch)
    want = select_topk(scores.clone(), k, visible=visible)
    sizes = (want >= 0).sum(1)
    assert torch.equal((got >= 0).sum(1), sizes), (name, "sizes")
    for row in range(rows):
        mine, theirs = set(got[row, : sizes[row]].tolist()), set(want[row, : sizes[row]].tolist())
        assert len(mine) == int(sizes[row]), (name, "not unique")
        if mine != theirs:
            kth = scores[row][want[row, : sizes[row]].long()].min()
            gap = max(abs(float(scores[row, j] - kth)) for j in mine ^ theirs)
            # sums in another order: 2e-7 of terms near 100. A tensor core keeps 13 bits while it sums fp8 products:
            # .008 seen on scores that spread by 18; times 4
            assert gap < (3e-2 if dtype == torch.float8_e4m3fn and DEVICE.type == "cuda" else 1e-4), (name, row, gap)
    again = kernel.topk_triton(q, keys, weights, k, visible=visible, scale=scale, launch=launch)
    assert torch.equal(again, got), (name, "not repeatable")
    print("ok", name, flush=True)
"""

INTERPRETED = (
    CHECK.format(device="cpu")
    + """
FP32, FP8 = torch.float32, torch.float8_e4m3fn
small = kernel.Launch(queries=2, groups=1, keys=32, warps=4, stages=2, per_sm=1, tma=True)
pair = kernel.Launch(queries=2, groups=2, keys=32, warps=4, stages=2, per_sm=1, tma=False)
compare("fp32 shared", 3, 4, 1100, 32, 16, FP32, launch=small)
compare("fp32 groups of two", 5, 4, 1100, 32, 16, FP32, launch=pair)
compare("fp8 shared", 3, 4, 1100, 32, 16, FP8, launch=small)
compare("fp8 own keys", 2, 4, 1100, 32, 16, FP8, distinct=True)
compare("k that is no power of two", 2, 4, 700, 32, 11, FP32, launch=small)
compare("ties take the lower index", 2, 4, 600, 32, 24, FP32, tie=True, launch=small)
compare("nan is never taken", 2, 4, 600, 32, 24, FP32, nan=True, launch=small)
"""
)

SELECTION = """
import torch
from longrecall.kernels.indexer import kernel, select_topk

DEVICE = torch.device("{device}")
g = torch.Generator().manual_seed(1)
for name, rows, columns, k, make in [
    ("small", 3, 700, 33, torch.randn),
    ("streamed", 2, {columns}, 16, torch.randn),
    ("one value, so the repair pass", 2, {columns}, 16, lambda *s, generator: torch.ones(*s)),
    ("few values, so ties", 2, {columns}, 16, lambda *s, generator: torch.randn(*s, generator=generator).round()),
]:
    scores = make(rows, columns, generator=g)
    scores[0, ::50] = torch.nan
    scores[0, 1::50] = -torch.inf
    visible = torch.tensor([columns, columns // 2, 5][:rows], dtype=torch.int32)
    scores, visible = scores.to(DEVICE), visible.to(DEVICE)
    want = select_topk(scores.clone(), k, visible=visible)
    got = kernel.select_triton(scores, k, visible=visible)
    assert torch.equal(kernel.select_triton(scores, k, visible=visible), got), (name, "not repeatable")
    assert torch.equal(got.sort(1).values, want.sort(1).values), name
    assert not ((got[:, :-1] < 0) & (got[:, 1:] >= 0)).any(), (name, "-1 comes last")
    print("ok", name, flush=True)
"""


def run(script: str, *, interpret: bool) -> str:
    """A process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / ".ns"), PYTHONSAFEPATH="1", OMP_NUM_THREADS="1")
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@needs_triton
def test_fused_score_and_select_matches_the_reference_when_interpreted() -> None:
    assert run(INTERPRETED, interpret=True).count("ok ") == 7


@needs_triton
def test_selection_alone_matches_the_reference_when_interpreted() -> None:
    assert run(SELECTION.format(device="cpu", columns=9000), interpret=True).count("ok ") == 4


COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    \"\"\"A driver without a device: kernels are compiled for it and not launched.\"\"\"
    get_current_device = get_current_stream = lambda self, *given: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_active_torch_device = lambda self: torch.device("cpu")


driver.set_active(Hopper())
run = JITFunction.run


def compile_gluon(self, *given, grid, warmup, **more):
    name = self.fn.__name__
    if name.startswith("collect"):
        compiled = run(self, *given, grid=grid, warmup=True, **more)
        assert len(compiled.asm["cubin"]) > 1000
        print("ok", name, flush=True)


JITFunction.run = compile_gluon
from longrecall.kernels.indexer import kernel

kernel.multiprocessors = lambda device: 132
kernel.has_hopper = lambda device: True
kernel._programmatic = lambda rows, device: {"PDL": True, "launch_pdl": True}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
for dtype, heads, rows, keys in (
    (BF16, 64, 64, (20_000, 128)), (FP8, 64, 64, (20_000, 128)), (BF16, 64, 2, (2, 20_000, 128)),
    (FP8, 64, 2, (2, 20_000, 128)), (FP8, 8, 256, (20_000, 32)), (FP8, 128, 1, (20_000, 128)),
    (FP8, 128, 64, (20_000, 128)),  # takes the plain path
):
    q, k = torch.empty(rows, heads, keys[-1], dtype=dtype), torch.empty(keys, dtype=dtype)
    visible = torch.full((rows,), 20_000, dtype=torch.int32)
    scale = torch.ones(keys[:-1]) if dtype == FP8 else None
    kernel.topk_triton(q, k, torch.empty(rows, heads), 512, visible=visible, scale=scale)
"""


@needs_triton
def test_the_hopper_kernels_compile_with_the_installed_triton() -> None:
    """Gluon's names move between versions of Triton; the compiler comes with it and needs no GPU."""
    if not list(Path(str(importlib.util.find_spec("triton").origin)).parent.glob("backends/nvidia/bin/ptxas")):  # type: ignore[union-attr]
        pytest.skip("this triton comes without ptxas")
    assert run(COMPILED, interpret=False).count("ok collect") == 6


ON_DEVICE = {
    f"{dtype} {part}": f"dtype = torch.{dtype}\n{calls}"
    for dtype in ("bfloat16", "float8_e4m3fn", "float32")
    for part, calls in {
        "shared keys": """
for heads in (8, 32, 64):
    compare(f"{dtype} {heads} heads", 37, heads, 20_000, 128, 512, dtype)
""",
        "own, one, few": """
compare(f"{dtype} own keys", 5, 64, 20_000, 128, 512, dtype, distinct=True)
compare(f"{dtype} one query", 1, 64, 70_000, 128, 2048, dtype)
compare(f"{dtype} few keys", 3, 64, 600, 128, 512, dtype)
""",
    }.items()
} | {
    "fp8 own keys": """
for heads in (8, 32):
    compare(f"{heads} heads, own keys", 70, heads, 20_000, 128, 512, torch.float8_e4m3fn, distinct=True)
""",
    "fp8 own keys, many and few": """
compare("more queries than programs, own keys", 600, 32, 9_000, 128, 512, torch.float8_e4m3fn, distinct=True)
compare("few own keys", 3, 64, 600, 128, 512, torch.float8_e4m3fn, distinct=True)
""",
    "ties and nan": """
for distinct in (True, False):
    compare(f"ties {distinct}", 9, 64, 20_000, 128, 512, torch.bfloat16, tie=True, distinct=distinct)
    compare(f"nan {distinct}", 9, 64, 20_000, 128, 512, torch.bfloat16, nan=True, distinct=distinct)
""",
}
"""Some 80 kernels are compiled for these, a second or two each, so they run side by side."""


@pytest.fixture(scope="module")
def on_device() -> Iterator[dict[str, Future[str]]]:
    """Every script of `ON_DEVICE`, as many at a time as there are cores."""
    with ThreadPoolExecutor(max_workers=min(len(ON_DEVICE), os.cpu_count() or 1)) as pool:
        yield {
            name: pool.submit(run, CHECK.format(device="cuda") + script, interpret=False)
            for name, script in ON_DEVICE.items()
        }


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", ON_DEVICE)
def test_fused_score_and_select_matches_the_reference_on_a_device(on_device: dict[str, Future[str]], name: str) -> None:
    assert on_device[name].result().count("ok ") == 4 if name == "ties and nan" else 2 if name.startswith("fp8") else 3


@pytest.mark.gpu
@needs_triton
def test_selection_alone_matches_the_reference_on_a_device() -> None:
    assert run(SELECTION.format(device="cuda", columns=60_000), interpret=False).count("ok ") == 4


@needs_triton
def test_the_gpu_path_names_what_it_cannot_run() -> None:
    from longrecall.kernels.indexer.kernel import topk_triton

    q, keys, weights, visible = torch.zeros(1, 6, 128), torch.zeros(9, 128), torch.zeros(1, 6), torch.tensor([9])
    with pytest.raises(ValueError, match="powers of two"):
        topk_triton(q, keys, weights, 4, visible=visible)
    narrow = [torch.zeros(1, 4, 16).to(torch.float8_e4m3fn), torch.zeros(9, 16).to(torch.float8_e4m3fn)]
    with pytest.raises(ValueError, match="D >= 32, not H 4, D 16"):
        topk_triton(*narrow, weights[:, :4], 4, visible=visible)
    with pytest.raises(ValueError, match="one dtype"):
        topk_triton(q[:, :4], keys.bfloat16(), weights[:, :4], 4, visible=visible)


@needs_triton
@pytest.mark.parametrize(("blocks", "columns", "k"), [(1, 1 << 20, 512), (1024, 131_072, 512), (64, 4096, 2048)])
def test_plans_cover_every_key_and_bound_their_memory(blocks: int, columns: int, k: int) -> None:
    from longrecall.kernels.indexer.kernel import make_plan

    plan = make_plan(blocks, columns, k, width=128, slots=264)
    assert plan.tasks == blocks * plan.splits >= plan.programs
    assert plan.dense <= max(16 * k, 8192), "O(queries * k)"
    assert plan.keep_all >= k
    if plan.sample:
        mean = k * plan.sample / columns
        assert (mean + 5 * mean**0.5 + 6) / plan.sample * columns < plan.dense, "the expected survivors fit"
