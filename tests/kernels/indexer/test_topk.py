"""Invariants first, then the reference, then edges (style: kernel tests in order)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.kernels.indexer import (
    dequantize,
    index_topk,
    indexer_logits_ref,
    quantize,
    select_topk,
    select_topk_arbitrary,
    select_topk_truncating,
)
from longrecall.kernels.indexer.measures import near_tie_misses, set_recall
from longrecall.kernels.indexer.topk import ShapeError, coarse_bin


def brute_force(scores: torch.Tensor, k: int, visible: torch.Tensor) -> list[list[int]]:
    """The contract in plain Python: higher score, then lower index, NaN and -inf never."""
    picks = []
    for row, limit in zip(scores.tolist(), visible.tolist(), strict=True):
        alive = [j for j in range(limit) if row[j] == row[j] and row[j] != float("-inf")]
        picks.append(sorted(sorted(alive, key=lambda j: (-row[j], j))[:k]))
    return picks


def as_lists(selection: torch.Tensor) -> list[list[int]]:
    rows = selection.tolist()
    for row in rows:
        kept = [j for j in row if j >= 0]
        assert row == kept + [-1] * (len(row) - len(kept)), "-1 comes last"
    return [[j for j in row if j >= 0] for row in rows]


@settings(max_examples=60)
@given(data=st.data(), k=st.integers(1, 12), columns=st.integers(1, 30))
def test_select_topk_is_the_brute_force_with_ties_nan_and_masks(data: st.DataObject, k: int, columns: int) -> None:
    value = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -3.0, float("nan"), float("-inf"), float("inf")])
    rows = data.draw(st.lists(st.lists(value, min_size=columns, max_size=columns), min_size=1, max_size=4))
    visible = torch.tensor(data.draw(st.lists(st.integers(0, columns), min_size=len(rows), max_size=len(rows))))
    scores = torch.tensor(rows)
    assert as_lists(select_topk(scores.clone(), k, visible=visible)) == brute_force(scores, k, visible)


@pytest.mark.parametrize(("rows", "heads", "columns", "k"), [(1, 64, 5000, 512), (37, 8, 1500, 100), (5, 4, 513, 512)])
def test_index_topk_is_exact_in_fp32(rows: int, heads: int, columns: int, k: int) -> None:
    g = torch.Generator().manual_seed(columns)
    q, keys, w = (torch.randn(*s, generator=g) for s in ((rows, heads, 128), (columns, 128), (rows, heads)))
    visible = torch.randint(0, columns + 1, (rows,), generator=g)
    got = index_topk(q, keys, w, k, visible=visible)
    exact = indexer_logits_ref(q, keys, w, dtype=torch.float64)
    want = select_topk(exact.clone(), k, visible=visible)
    assert [len(row) for row in as_lists(got)] == [min(k, int(v)) for v in visible]
    # fp32 dots of 128 Gaussian products differ from fp64 by 2e-6 of a score near 60, measured; times 10
    assert float(near_tie_misses(got, want, exact, 1e-3).sum()) == 0


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "fp8_ue8m0", "fp8_fnuz", "fp4", "fp4_ties_down", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 6])
def test_packed_keys_score_as_their_dequantised_values(fmt: str, rows: int) -> None:
    g = torch.Generator().manual_seed(7)
    q, keys, w = (torch.randn(*s, generator=g) for s in ((rows, 16, 128), (3000, 128), (rows, 16)))
    q = q.bfloat16().float()
    packed = quantize(keys, fmt)
    got = index_topk(q, packed, w, 64)
    scores = indexer_logits_ref(q, dequantize(packed), w)
    want = select_topk(scores.clone(), 64)
    # dots are rounded to bf16 on a CPU: 2^-9 of each of 16 dots near 11 with weights near 1 is 0.1 at most, .03 typical
    assert float(near_tie_misses(got, want, scores.nan_to_num(), 0.15 * (0.5 if fmt == "fp8_fnuz" else 1)).sum()) == 0
    assert float(set_recall(got, want).mean()) > 0.95


def test_packed_queries_fold_their_scale_into_the_weights() -> None:
    g = torch.Generator().manual_seed(8)
    q, keys, w = (torch.randn(*s, generator=g) for s in ((4, 16, 128), (2000, 128), (4, 16)))
    q8, k8 = quantize(q, "fp8"), quantize(keys, "fp8")
    scores = indexer_logits_ref(dequantize(q8), dequantize(k8), w)
    got, want = index_topk(q8, k8, w, 50), select_topk(scores.clone(), 50)
    assert float(near_tie_misses(got, want, scores, 0.15).sum()) == 0


def test_keys_of_each_query_and_shared_keys_agree() -> None:
    g = torch.Generator().manual_seed(9)
    q, keys, w = (torch.randn(*s, generator=g) for s in ((3, 8, 128), (700, 128), (3, 8)))
    own = keys.expand(3, -1, -1).contiguous()
    visible = torch.tensor([700, 20, 650])
    assert torch.equal(index_topk(q, own, w, 64, visible=visible), index_topk(q, keys, w, 64, visible=visible))


def test_no_score_is_read_while_every_key_is_selected() -> None:
    q, keys = torch.full((2, 8, 128), torch.nan), torch.full((100, 128), torch.nan)
    got = index_topk(q, keys, torch.ones(2, 8), 512, visible=torch.tensor([100, 3]))
    assert as_lists(got) == [list(range(100)), [0, 1, 2]]


def test_all_equal_scores_take_the_lowest_indices() -> None:
    got = index_topk(torch.zeros(2, 8, 128), torch.randn(900, 128), torch.ones(2, 8), 64)
    assert as_lists(got) == [list(range(64))] * 2


def test_twenty_repeats_are_bitwise_equal() -> None:
    g = torch.Generator().manual_seed(10)
    args = [torch.randn(*s, generator=g) for s in ((3, 8, 128), (1000, 128), (3, 8))]
    first = index_topk(*args, 64)
    assert all(torch.equal(index_topk(*args, 64), first) for _ in range(20))


def test_shapes_that_do_not_belong_together_are_named() -> None:
    q, keys, w = torch.zeros(2, 8, 128), torch.zeros(9, 128), torch.zeros(2, 8)
    with pytest.raises(ShapeError, match=r"q must be \[T, H, D\], not \[8, 128\]"):
        index_topk(q[0], keys, w, 4)
    with pytest.raises(ShapeError, match=r"\[S, 128\].*not \[9, 64\]"):
        index_topk(q, keys[:, :64], w, 4)
    with pytest.raises(ShapeError, match=r"weights must be \[2, 8\]"):
        index_topk(q, keys, w[:1], 4)
    with pytest.raises(ShapeError, match=r"visible must be \[2\]"):
        index_topk(q, keys, w, 4, visible=torch.tensor([1]))
    with pytest.raises(ShapeError, match="k must be at least 1"):
        index_topk(q, keys, w, 0)


def test_memory_stays_small_beside_the_inputs() -> None:
    import resource

    g = torch.Generator().manual_seed(11)
    q, keys, w = torch.randn(64, 8, 128, generator=g), torch.randn(60_000, 128, generator=g), torch.ones(64, 8)
    index_topk(q[:1], keys, w[:1], 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index_topk(q, keys, w, 512)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_arbitrary_ties_keep_everything_above_the_tie_and_vary_inside_it() -> None:
    scores = torch.tensor([[5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 0.0]])
    seen = set()
    for seed in range(40):
        picks = as_lists(select_topk_arbitrary(scores.clone(), 4, generator=torch.Generator().manual_seed(seed)))[0]
        assert {0, 6} < set(picks) and 7 not in picks and len(picks) == 4
        seen.add(tuple(picks))
    assert len(seen) > 5


def test_coarse_bins_keep_the_order_of_scores() -> None:
    x = torch.linspace(-200, 200, 4001)
    bins = coarse_bin(x.unsqueeze(0), 12)[0]
    assert bool((bins[1:] >= bins[:-1]).all()) and int(bins.max()) < 4096


def test_truncating_topk_is_exact_until_its_bin_overflows() -> None:
    g = torch.Generator().manual_seed(12)
    spread = torch.randn(2, 4000, generator=g)
    assert torch.equal(select_topk_truncating(spread.clone(), 64), select_topk(spread.clone(), 64))
    crowded = 1000 + torch.rand(1, 4000, generator=g)  # one fp16 bin of 12 bits spans 960..976.. all of these
    exact = select_topk(crowded.clone(), 64)
    assert torch.equal(select_topk_truncating(crowded.clone(), 64, buffer=4000), exact)
    cut = select_topk_truncating(crowded.clone(), 64, buffer=1000)
    assert int(cut.max()) < 1000, "members are kept in order of arrival"
    assert 0.05 < float(set_recall(cut, exact)) < 0.6
    runs = [
        select_topk_truncating(crowded.clone(), 64, buffer=1000, generator=torch.Generator().manual_seed(s))
        for s in (0, 1)
    ]
    assert not torch.equal(*runs)
