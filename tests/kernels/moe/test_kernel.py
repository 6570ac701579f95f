"""The Triton expert path against the fp64 reference: interpreted without a GPU, compiled with one."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels' module is imported

from longrecall.kernels.moe.kernel import (
    Tile,
    Tiles,
    make_plan,
    moe_experts_triton,
    moe_sum_reduce_triton,
)
from longrecall.kernels.moe.reference import moe_experts_ref, moe_sum_reduce_ref
from longrecall.kernels.moe.routing import TopK, topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(T: int, E: int, K: int, C: int, F: int, dtype: torch.dtype, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, C, generator=g).to(DEVICE, dtype)
    w13 = (torch.randn(E, 2 * F, C, generator=g) * C**-0.5).to(DEVICE, dtype)
    w2 = (torch.randn(E, C, F, generator=g) * F**-0.5).to(DEVICE, dtype)
    chosen = topk(torch.randn(T, E, generator=g), None, K)
    return x, w13, w2, TopK(chosen.weights.to(DEVICE), chosen.idx.to(DEVICE))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    "T, E, K", [(1, 4, 1), (1, 6, 6), (7, 5, 3), (90, 3, 1), (600, 7, 2)], ids=["T1K1", "T1", "T7", "T90", "sorted"]
)
def test_plan_is_a_permutation_grouped_by_expert(T: int, E: int, K: int, block_m: int) -> None:
    idx = torch.randint(0, E, (T, K), generator=torch.Generator().manual_seed(T)).to(DEVICE)
    plan = make_plan(idx, E, block_m)
    order, offsets, blocks = plan.order.tolist(), plan.offsets.tolist(), plan.blocks.tolist()
    assert sorted(order) == list(range(T * K))
    assert offsets[0] == 0 and offsets[-1] == T * K
    total = 0
    for expert in range(E):
        rows = order[offsets[expert] : offsets[expert + 1]]
        assert rows == sorted(rows) and all(idx.reshape(-1)[r] == expert for r in rows)
        total += -(-len(rows) // block_m)
        assert blocks[expert] == total
    assert total <= plan.max_blocks


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    "T, E, K, C, F",
    [(1, 4, 2, 32, 16), (5, 8, 2, 48, 40), (40, 6, 3, 64, 32), (33, 2, 2, 80, 24)],
    ids=["T1", "odd-F", "two-blocks", "odd-C"],
)
def test_matches_fp64(T: int, E: int, K: int, C: int, F: int, tma: bool) -> None:
    x, w13, w2, chosen = problem(T, E, K, C, F, torch.float32)
    tiles = Tiles(Tile(16, 16, 16, 4, 2, tma), Tile(16, 32, 16, 4, 2, tma))
    got = moe_experts_triton(x, w13, w2, chosen, swiglu_limit=0.8, tiles=tiles)
    assert relative_error(got, moe_experts_ref(x, w13, w2, chosen, swiglu_limit=0.8)) < 1e-6


def test_unweighted_rows_leave_the_weights_to_the_reduce() -> None:
    x, w13, w2, chosen = problem(6, 4, 2, 32, 16, torch.float32)
    tiles = Tiles(Tile(16, 16, 16, 4, 2), Tile(16, 16, 16, 4, 2))
    plain = moe_experts_triton(x, w13, w2, chosen, weighted=False, tiles=tiles)
    weighted = moe_experts_triton(x, w13, w2, chosen, weighted=True, tiles=tiles)
    torch.testing.assert_close(plain * chosen.weights[..., None], weighted, rtol=1e-5, atol=1e-6)


def test_all_tokens_on_one_expert_and_the_others_empty() -> None:
    x, w13, w2, _ = problem(20, 5, 1, 32, 16, torch.float32)
    chosen = TopK(torch.ones(20, 1, device=DEVICE), torch.full((20, 1), 3, device=DEVICE))
    tiles = Tiles(Tile(16, 16, 32, 4, 2), Tile(16, 32, 16, 4, 2))
    got = moe_experts_triton(x, w13, w2, chosen, tiles=tiles)
    assert relative_error(got, moe_experts_ref(x, w13, w2, chosen)) < 1e-6


def test_rows_the_copy_engine_cannot_address_take_the_other_path() -> None:
    x, w13, w2, chosen = problem(5, 4, 2, 30, 18, torch.float32)  # 120 and 72 bytes a row
    tiles = Tiles(Tile(16, 16, 16, 4, 2, True), Tile(16, 16, 16, 4, 2, True))
    got = moe_experts_triton(x, w13, w2, chosen, tiles=tiles)
    assert relative_error(got, moe_experts_ref(x, w13, w2, chosen)) < 1e-6


def test_no_tokens() -> None:
    x, w13, w2, _ = problem(1, 4, 2, 32, 16, torch.float32)
    empty = TopK(torch.zeros(0, 2, device=DEVICE), torch.zeros(0, 2, dtype=torch.long, device=DEVICE))
    assert moe_experts_triton(x[:0], w13, w2, empty).shape == (0, 2, 32)


def test_mixed_dtypes_are_refused_by_name() -> None:
    x, w13, w2, chosen = problem(2, 4, 2, 32, 16, torch.float32)
    with pytest.raises(ValueError, match=r"w13 torch\.float16"):
        moe_experts_triton(x, w13.half(), w2, chosen)


def test_row_blocks_of_the_two_gemms_must_agree() -> None:
    x, w13, w2, chosen = problem(2, 4, 2, 32, 16, torch.float32)
    with pytest.raises(ValueError, match="16 and 32 rows"):
        moe_experts_triton(x, w13, w2, chosen, tiles=Tiles(Tile(16, 16, 16, 4, 2), Tile(32, 16, 16, 4, 2)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("T, K, C", [(1, 6, 16), (5, 3, 100), (2, 2, 1025)])
# the interpreter rounds bf16 stores as the GPU does; its bf16 tl.dot is broken, so the GEMMs are tested in fp32 there
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_sum_reduce_matches_fp64(T: int, K: int, C: int, weighted: bool, dtype: torch.dtype, limit: float) -> None:
    g = torch.Generator().manual_seed(C)
    y = torch.randn(T, K, C, generator=g).to(DEVICE, dtype)
    weights = torch.rand(T, K, generator=g).to(DEVICE) if weighted else None
    assert relative_error(moe_sum_reduce_triton(y, weights, 2.5), moe_sum_reduce_ref(y, weights, 2.5)) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("T", [1, 16, 200, 2000])
def test_gpu_matches_fp64_with_the_shipped_tiles(T: int, dtype: torch.dtype, limit: float) -> None:
    E, K, C, F = 16, 4, 512, 320
    x, w13, w2, chosen = problem(T, E, K, C, F, dtype)
    got = moe_experts_triton(x, w13, w2, chosen, swiglu_limit=1.0)
    few = slice(0, 16)
    want = moe_experts_ref(x[few], w13, w2, TopK(chosen.weights[few], chosen.idx[few]), swiglu_limit=1.0)
    assert relative_error(got[few], want) < limit and bool(got.isfinite().all())
    for _ in range(20):
        assert torch.equal(got, moe_experts_triton(x, w13, w2, chosen, swiglu_limit=1.0)), "two runs differ"
