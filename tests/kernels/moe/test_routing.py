"""Gates, StandardTopK and HashTopK: invariants, a literal reference, ties, and the factor on their output."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.kernels.moe import gate_scores, hash_topk, topk
from longrecall.kernels.moe.presets import PRESETS, preset


def literal_topk(logits, bias, k, scoring, groups=1, kept=1, group_score="top2", renormalize=True, eps=1e-20):
    """The definition, one token and one expert at a time, fp64."""
    out = []
    for z in logits.double():
        if scoring == "sigmoid":
            s = 1 / (1 + (-z).exp())
        elif scoring == "softmax":
            s = (z - z.max()).exp() / (z - z.max()).exp().sum()
        else:
            s = (1 + z.exp()).log().sqrt()
        choice = (s if bias is None else s + bias.double()).tolist()
        size = len(choice) // groups
        best = 1 if group_score == "max" else 2
        score = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
        open_groups = sorted(range(groups), key=lambda g: (-score[g], g))[:kept]
        eligible = [e for e in range(len(choice)) if e // size in open_groups]
        selected = sorted(eligible, key=lambda e: (-choice[e], e))[:k]
        w = s[selected]
        out.append((selected, w / (w.sum() + eps) if renormalize else w))
    return torch.tensor([o[0] for o in out]), torch.stack([o[1] for o in out])


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "sqrtsoftplus"])
@pytest.mark.parametrize("experts", [16, 96], ids=["sort", "topk"])
@pytest.mark.parametrize("groups, kept, group_score", [(1, 1, "top2"), (8, 4, "top2"), (8, 3, "max")])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_the_definition(scoring, experts, groups, kept, group_score, with_bias) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(20, experts, generator=g)
    bias = torch.randn(experts, generator=g) * 0.2 if with_bias else None
    want_idx, want = literal_topk(logits, bias, 6, scoring, groups, kept, group_score)
    got = topk(logits, bias, 6, scoring, num_groups=groups, topk_groups=kept, group_score=group_score)
    assert torch.equal(got.idx, want_idx)
    torch.testing.assert_close(got.weights.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("experts", [10, 100])
@pytest.mark.parametrize("distinct", [1, 2, 3], ids=["all-equal", "two-values", "three-values"])
def test_equal_scores_go_to_the_lower_index(experts: int, distinct: int) -> None:
    logits = torch.randint(0, distinct, (50, experts), generator=torch.Generator().manual_seed(1)).float()
    want, _ = literal_topk(logits, None, 4, "sigmoid")
    assert torch.equal(topk(logits, None, 4, "sigmoid").idx, want)


@settings(max_examples=50)
@given(
    st.integers(0, 2**31), st.integers(1, 12), st.sampled_from(["sigmoid", "softmax", "sqrtsoftplus"]), st.floats(0, 20)
)
def test_selections_are_unique_and_weights_sum_to_the_factor(seed: int, k: int, scoring: str, spread: float) -> None:
    logits = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed)) * spread
    got = topk(
        logits, None, k, scoring, routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True  # type: ignore[arg-type]
    )  # fmt: skip
    assert all(len(set(row)) == k for row in got.idx.tolist())
    torch.testing.assert_close(got.weights.sum(-1), torch.full((8,), 2.5), rtol=1e-5, atol=0)


def test_the_bias_selects_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    got = topk(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), 2, "sigmoid")
    assert got.idx.tolist() == [[3, 0]]
    s = logits.sigmoid()[0, [3, 0]]
    torch.testing.assert_close(got.weights[0], s / s.sum())


def test_sqrtsoftplus_is_exact_far_out() -> None:
    z = torch.tensor([[-80.0, -20.0, 0.0, 20.0, 400.0]])
    want = torch.nn.functional.softplus(z.double(), threshold=1e9).sqrt()
    torch.testing.assert_close(gate_scores(z, "sqrtsoftplus").double(), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-3])
def test_renormalisation_epsilon(eps: float) -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    want = literal_topk(logits, None, 3, "sigmoid", eps=eps)[1]
    torch.testing.assert_close(topk(logits, None, 3, "sigmoid", eps=eps).weights.double(), want, rtol=1e-5, atol=0)


def test_hash_layer_takes_the_table_and_weighs_by_the_gate() -> None:
    g = torch.Generator().manual_seed(0)
    logits, table = torch.randn(5, 8, generator=g), torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(30)])
    tokens = torch.tensor([0, 7, 29, 7, 1])
    got = hash_topk(logits, tokens, table)
    assert torch.equal(got.idx, table[tokens])
    s = gate_scores(logits, "sqrtsoftplus").gather(1, table[tokens])
    torch.testing.assert_close(got.weights, s / s.sum(-1, keepdim=True))
    doubled = hash_topk(logits, tokens, table, routed_scaling_factor=1.5, apply_routed_scaling_factor_on_output=True)
    torch.testing.assert_close(doubled.weights, got.weights * 1.5)
    softmax = hash_topk(logits, tokens, table, scoring="softmax", renormalize=False)
    torch.testing.assert_close(softmax.weights, logits.softmax(-1).gather(1, table[tokens]))


@pytest.mark.parametrize("on_output, slot", [(False, 1 / 2.5), (True, 1.0)])
def test_fused_shared_slot_weighs_one_after_a_later_multiply(on_output: bool, slot: float) -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    got = topk(
        logits,
        None,
        3,
        "sigmoid",
        routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=on_output,
        num_fused_shared_experts=1,
    )
    assert got.idx[:, 3].tolist() == [8] * 4
    torch.testing.assert_close(got.weights[:, 3], torch.full((4,), slot))


def test_presets_route_within_their_groups() -> None:
    for name in PRESETS:
        p = preset(name)
        logits = torch.randn(16, p.num_experts, generator=torch.Generator().manual_seed(0))
        got = topk(
            logits, None, p.num_topk, p.scoring, num_groups=p.num_groups, topk_groups=p.topk_groups,
            group_score=p.group_score, renormalize=p.renormalize,
        )  # fmt: skip
        groups = got.idx // (p.num_experts // p.num_groups)
        assert max(len(set(row)) for row in groups.tolist()) <= p.topk_groups


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda z: topk(z, None, 9), "num_topk is 9; it must be between 1 and the 8"),
        (lambda z: topk(z, None, 2, num_groups=3), "1 of 3 groups do not fit 8"),
        (lambda z: topk(z, None, 5, num_groups=4, topk_groups=2), "fewer than num_topk = 5"),
        (lambda z: topk(z, None, 2, "tanh"), "'tanh'; known: sigmoid"),
        (lambda z: hash_topk(z, torch.tensor([0, 30]), torch.zeros(30, 2).long()), "token id 30 is outside the 30"),
        (lambda z: hash_topk(z, torch.tensor([0]), torch.zeros(30, 2).long()), "has 2 rows"),
        (lambda z: hash_topk(z, torch.tensor([0, 1]), torch.full((30, 2), 8)), r"outside 0\.\.7"),
        (lambda z: preset("v5"), "no MoE preset 'v5'; known: v2"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 8))
