import pytest
import torch

from longrecall.kernels.indexer import measures as m


def test_set_recall_counts_members_whatever_their_order() -> None:
    selection = torch.tensor([[3, 1, -1], [0, 1, 2]])
    reference = torch.tensor([[1, 2, 3], [2, 1, 0]])
    assert m.set_recall(selection, reference).tolist() == [pytest.approx(2 / 3), 1.0]
    with pytest.raises(m.MeasureError, match="empty"):
        m.set_recall(selection, torch.full((2, 3), -1))


def test_a_needle_is_hit_only_with_all_its_keys() -> None:
    selection = torch.tensor([[0, 4, 7], [0, 4, -1]])
    needles = torch.tensor([[4, 7], [4, 7]])
    assert m.needle_hit(selection, needles).tolist() == [1.0, 0.0]
    assert m.needle_hit(selection, torch.tensor([[4, -1], [0, -1]])).tolist() == [1.0, 1.0]


def test_rank_and_margins_by_hand() -> None:
    scores = torch.tensor([[9.0, 5.0, 7.0, 1.0, 100.0]])
    visible, needles = torch.tensor([4]), torch.tensor([[1, 2]])
    assert m.needle_rank(scores, needles, visible).tolist() == [3.0]
    assert m.kth_score(scores, 2, visible).tolist() == [7.0]
    assert m.boundary_margin(scores, 2, visible).tolist() == [2.0]
    assert m.needle_margin(scores, needles, 2, visible, torch.tensor([0.5])).tolist() == [-4.0]
    assert m.kth_score(scores, 9, visible).tolist() == [-torch.inf]


def test_noise_ignores_a_common_factor() -> None:
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(2, 5000, generator=g)
    noisy = 0.5 * (exact + 0.1 * torch.randn(2, 5000, generator=g))
    visible = torch.tensor([5000, 5000])
    assert m.score_noise(noisy, exact, visible).tolist() == pytest.approx([0.1, 0.1], rel=0.06)
    assert float(m.score_noise(exact / 2, exact, visible).max()) < 1e-6


def test_mass_recall_weighs_by_attention() -> None:
    attention = torch.tensor([[0.7, 0.2, 0.1]])
    assert m.mass_recall(torch.tensor([[0]]), torch.tensor([[0, 1]]), attention).tolist() == [pytest.approx(0.7 / 0.9)]


def test_near_ties_are_not_misses_and_wrong_picks_are() -> None:
    scores = torch.tensor([[1.0, 0.5, 0.4999, 0.1]])
    reference, near, wrong = torch.tensor([[0, 1]]), torch.tensor([[0, 2]]), torch.tensor([[0, 3]])
    assert m.near_tie_misses(near, reference, scores, 0.001).tolist() == [0.0]
    assert m.near_tie_misses(wrong, reference, scores, 0.001).tolist() == [1.0]


def test_predicted_critical_length_is_where_the_needle_leaves_the_selection() -> None:
    g = torch.Generator().manual_seed(1)
    k, total = 64, 200_000
    background = torch.randn(1, total, generator=g)
    level = 2.5  # one background key in 161 is above: 64 of them in about 10,300
    background[0, 7] = level
    needles = torch.tensor([[7]])
    left = next(n for n in range(2000, total, 200) if m.needle_rank(background[:, :n], needles, torch.tensor([n])) > k)
    short = background[:, :4000]
    predicted = float(m.critical_candidates(short, needles, k, torch.tensor([4000])))
    assert predicted == pytest.approx(left, rel=0.35)  # 25 exceedances in 4000: one standard error is 20 %
    noisy = float(m.critical_candidates(short, needles, k, torch.tensor([4000]), torch.tensor([0.5])))
    assert noisy < predicted


def test_tail_extrapolation_reaches_beyond_the_background() -> None:
    g = torch.Generator().manual_seed(2)
    background = torch.randn(1, 20_000, generator=g)
    background[0, 3] = 4.5
    predicted = float(m.critical_candidates(background, torch.tensor([[3]]), 512, torch.tensor([20_000])))
    # exact: 512 / 3.4e-6 = 1.5e8; an exponential tail is a lower bound for a Gaussian one
    assert 3e6 < predicted < 1.5e8
    with pytest.raises(m.MeasureError, match="at least 100"):
        m.critical_candidates(background[:, :50], torch.tensor([[3]]), 8, torch.tensor([50]))
