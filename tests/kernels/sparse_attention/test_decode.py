"""Sparse decode: torch and Triton paths against fp64, split merge, sink, window union."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel's module is imported

from longrecall.kernels.sparse_attention import attend_splits, merge_splits, sparse_decode, union_decode
from longrecall.kernels.sparse_attention.kernel import attend_splits_triton
from longrecall.kernels.sparse_attention.reference import sparse_decode_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(B: int, H: int, D: int, DV: int, S: int, K: int, seed: int = 0, *, per_row: bool = False):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, D, generator=g)
    k = torch.randn(*((B, S) if per_row else (S,)), D, generator=g)
    v = torch.randn(*k.shape[:-1], DV, generator=g)
    indices = torch.stack([torch.randperm(S, generator=g)[:K] for _ in range(B)]).int()
    return q, k, v, indices


@pytest.mark.parametrize(
    "backend, split_size",
    # one program per key is slow in the interpreter
    [("torch", None), ("torch", 1), ("torch", 10), ("torch", 64), ("triton", None), ("triton", 10), ("triton", 64)],
)
@pytest.mark.parametrize(
    "B, H, D, DV, S, K",
    [(2, 4, 64, 32, 100, 37), (1, 20, 80, 64, 70, 64), (1, 4, 576, 512, 50, 33)],
    ids=["small", "odd-head-dim", "mla"],
)
def test_matches_fp64(B: int, H: int, D: int, DV: int, S: int, K: int, split_size: int | None, backend: str) -> None:
    q, k, v, indices = (t.to(DEVICE) for t in problem(B, H, D, DV, S, K))
    indices[0, 5:] = -1
    sink = torch.randn(H, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want = sparse_decode_ref(q, k, v, indices, scale=D**-0.5, sink=sink)
    got = sparse_decode(q, k, v, indices, scale=D**-0.5, sink=sink, split_size=split_size, backend=backend)
    torch.testing.assert_close(got.out.double(), want.out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_keys_of_their_own_per_sequence(backend: str) -> None:
    q, k, v, indices = (t.to(DEVICE) for t in problem(3, 4, 32, 32, 40, 16, per_row=True))
    want = sparse_decode_ref(q, k, v, indices, scale=0.2)
    got = sparse_decode(q, k, v, indices, scale=0.2, split_size=8, backend=backend)
    torch.testing.assert_close(got.out.double(), want.out, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_valid_entry_gives_zero_and_infinite_lse(backend: str) -> None:
    q, k, v, indices = (t.to(DEVICE) for t in problem(2, 2, 16, 16, 20, 8))
    indices[1] = -1
    sink = torch.zeros(2, device=DEVICE)
    got = sparse_decode(q, k, v, indices, scale=1.0, sink=sink, split_size=4, backend=backend)
    assert got.out[1].eq(0).all() and got.lse[1].isposinf().all() and got.lse[0].isfinite().all()
    empty = sparse_decode(q, k, v, indices[:, :0], scale=1.0, backend="torch")
    assert empty.out.eq(0).all() and empty.lse.isposinf().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_nan_in_entries_that_are_not_selected_is_harmless(backend: str) -> None:
    q, k, v, indices = (t.to(DEVICE) for t in problem(1, 2, 16, 16, 20, 8))
    indices = indices.clamp_min(1)
    indices[0, 6:] = -1
    k[0], v[0] = float("nan"), float("nan")
    assert sparse_decode(q, k, v, indices, scale=1.0, backend=backend).out.isfinite().all()


@given(seed=st.integers(0, 2**31), branches=st.integers(2, 6), split_size=st.sampled_from([None, 5, 16]))
@settings(max_examples=25)
def test_branches_of_one_history_attend_as_each_alone(seed: int, branches: int, split_size: int | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((branches, 4, 32), (12, 32), (12, 32)))
    indices = torch.randint(-1, 12, (branches, 24), generator=generator)  # more than the entries: read once for all
    together = attend_splits(q, k, v, indices, scale=0.2, split_size=split_size)
    for n in range(branches):
        own = k[None], v[None], indices[n : n + 1]
        alone = attend_splits(q[n : n + 1], *own, scale=0.2, split_size=split_size)
        torch.testing.assert_close(together.out[:, n], alone.out[:, 0])
        torch.testing.assert_close(together.lse[:, n], alone.lse[:, 0])


def test_an_entry_of_one_branch_that_is_not_finite_does_not_reach_another() -> None:
    q, k, v = torch.randn(3, 2, 16), torch.randn(8, 16), torch.randn(8, 16)
    v[7] = float("inf")
    indices = torch.arange(7).repeat(3, 2)
    indices[2, 0] = 7
    out = attend_splits(q, k, v, indices, scale=0.2).out
    assert out[0, :2].isfinite().all() and not out[0, 2].isfinite().all()


def test_the_interpreter_and_torch_split_alike() -> None:
    q, k, v, indices = (t.to(DEVICE) for t in problem(2, 4, 32, 16, 64, 40))
    a = attend_splits(q, k, v, indices, scale=0.3, split_size=16)
    b = attend_splits_triton(q, k, v, indices, scale=0.3, split_size=16)
    torch.testing.assert_close(a.out, b.out, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-5, atol=2e-6)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 2**31), st.floats(0.1, 30))
def test_merge_does_not_depend_on_the_split(splits: int, seed: int, sharpness: float) -> None:
    q, k, v, indices = problem(1, 2, 16, 8, 48, 48, seed)
    whole = sparse_decode(q, k, v, indices, scale=sharpness / 4, backend="torch")
    cut = sparse_decode(q, k, v, indices, scale=sharpness / 4, split_size=-(-48 // splits), backend="torch")
    torch.testing.assert_close(whole.out, cut.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.lse, cut.lse, rtol=1e-5, atol=1e-5)


def test_empty_splits_add_nothing_even_when_their_output_is_nan() -> None:
    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(2, 3, 4, generator=g), torch.randn(2, 3, generator=g)
    nan, inf = torch.full((1, 3, 4), float("nan")), torch.full((1, 3), float("inf"))
    plain = merge_splits(outs, lses)
    for empty in (inf, -inf):
        padded = merge_splits(torch.cat([nan, outs]), torch.cat([empty, lses]))
        assert torch.equal(plain.out, padded.out) and torch.equal(plain.lse, padded.lse)


def test_a_sink_far_below_changes_nothing_and_one_far_above_takes_everything() -> None:
    q, k, v, indices = problem(1, 2, 16, 8, 20, 20)
    plain = sparse_decode(q, k, v, indices, scale=0.25, backend="torch")
    low = sparse_decode(q, k, v, indices, scale=0.25, sink=torch.full((2,), -1e4), backend="torch")
    high = sparse_decode(q, k, v, indices, scale=0.25, sink=torch.full((2,), 1e4), backend="torch")
    assert torch.equal(plain.out, low.out) and high.out.abs().max() == 0
    assert torch.equal(plain.lse, high.lse), "the returned lse is without the sink"


def test_window_union_is_one_softmax_over_both() -> None:
    g = torch.Generator().manual_seed(0)
    q, window, entries = (torch.randn(2, n, 16, generator=g) for n in (4, 8, 30))
    indices = torch.randperm(30, generator=g)[:12].expand(2, -1).int()
    sink = torch.randn(4, generator=g)
    got = union_decode(q, window, torch.tensor([20, 3]), entries, indices, scale=0.25, sink=sink, split_size=5)
    for b, seen in enumerate((8, 3)):
        both = torch.cat([window[b, :seen], entries[b, indices[b].long()]])
        every = torch.arange(len(both))[None]
        want = sparse_decode_ref(q[b : b + 1], both, both, every, scale=0.25, sink=sink)
        torch.testing.assert_close(got.out[b].double(), want.out[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v, i: (q, k[:, :8], v, i), "do not fit together"),
        (lambda q, k, v, i: (q, k, v, i[:1]), "q has 2 rows"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_decode(*change(*problem(2, 2, 16, 16, 20, 8)), scale=1.0, backend="torch")


def test_bad_split_size_and_backend() -> None:
    q, k, v, indices = problem(1, 2, 16, 16, 20, 8)
    with pytest.raises(ValueError, match="split_size is 0"):
        sparse_decode(q, k, v, indices, scale=1.0, split_size=0, backend="torch")
    with pytest.raises(ValueError, match="'cuda'; known: auto, torch, triton"):
        sparse_decode(q, k, v, indices, scale=1.0, backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("D, DV", [(576, 512), (512, 512), (256, 256)])
def test_gpu_bf16_matches_fp64_and_repeats_bitwise(D: int, DV: int) -> None:
    q, k, v, indices = problem(4, 64, D, DV, 4096, 512)
    q, k, v, indices = q.cuda().bfloat16(), k.cuda().bfloat16(), v.cuda().bfloat16(), indices.cuda()
    want = sparse_decode_ref(q, k, v, indices, scale=D**-0.5)
    first = sparse_decode(q, k, v, indices, scale=D**-0.5, split_size=128)
    assert float((first.out.double() - want.out).norm() / want.out.norm()) < 1e-2
    torch.testing.assert_close(first.lse.double(), want.lse, rtol=1e-3, atol=1e-3)
    for _ in range(20):
        assert torch.equal(first.out, sparse_decode(q, k, v, indices, scale=D**-0.5, split_size=128).out)
