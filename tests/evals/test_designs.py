"""Designs find the guilty patch alone, together, masked, in a stack; and refuse what cannot be served."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from longrecall.evals.designs import (
    Bisect,
    DesignError,
    LossModel,
    combination_recalls,
    combinations_of,
    contrast,
    interaction_pairs,
    patch_effects,
    shapley,
    split_loss,
)
from longrecall.evals.simulate import QUIET, cells_of, draw_builds

pytestmark = pytest.mark.filterwarnings("error")
PATCHES = ["p1", "p2", "p3", "p4", "p5", "p6"]


def serve(design, truth, *, patches=PATCHES, conversations=40, base=0.9, seed=0):
    """Simulated recalls of a design's builds; truth: set of patches → loss."""
    builds = combinations_of(design, patches)
    recalls = [base - truth(set(b.patch_ids)) for b in builds]
    right = draw_builds(
        np.random.default_rng(seed),
        reps=1,
        conversations=conversations,
        probes=10,
        base_recall=base,
        recalls=recalls,
        icc=0.2,
        engine=QUIET,
    )[0][:, None]
    names = [b.build_id for b in builds]
    return combination_recalls(cells_of(right, builds=names, rungs=[2048]))


def test_oat_and_loo_share_base_and_all():
    builds = combinations_of("oat+loo", PATCHES)
    assert len(builds) == 14 and builds[0].build_id == "base" and builds[1].build_id == "all"
    assert {b.build_id for b in builds} >= {"p3", "all-but-p3"}
    assert [b.build_id for b in combinations_of("screen", PATCHES)] == ["base", "all"]
    assert [b.build_id for b in combinations_of("factorial", PATCHES[:2])] == ["base", "p1", "p2", "all"]
    assert len(combinations_of("oat+loo", ["p1", "p2"])) == 4  # leaving one out of two is the other alone
    assert len({b.build_id for b in combinations_of("oat+loo", PATCHES[:3])}) == 8


@pytest.mark.parametrize(
    ("truth", "expected", "pairs"),
    [
        (lambda s: 0.3 * ("p2" in s), {"p2": "loses"}, ()),
        (lambda s: 0.3 * ("p2" in s) + 0.2 * ("p5" in s), {"p2": "loses", "p5": "loses"}, ()),
        (
            lambda s: 0.3 * ({"p2", "p5"} <= s),
            {"p2": "only together", "p5": "only together"},
            (("p2", "p5"),),
        ),
        (
            lambda s: 0.3 * ("p2" in s and "p5" not in s),
            {"p2": "masked", "p5": "gains"},
            (("p2", "p5"),),
        ),
        (lambda s: 0.0, {}, ()),
    ],
    ids=["single", "two", "together", "masked", "none"],
)
def test_oat_and_loo_read_every_scenario_rightly(truth, expected, pairs):
    effects = patch_effects(serve("oat+loo", truth), PATCHES)
    assert {e.patch: e.reading for e in effects if e.reading != "no loss"} == expected
    assert interaction_pairs(effects) == pairs
    for e in effects:
        assert e.patch in e.sentence
        if e.partners:
            assert e.partners[0] in e.sentence


def test_one_at_a_time_alone_cannot_see_a_pair_and_says_nothing_false():
    effects = patch_effects(serve("oat", lambda s: 0.3 * ({"p2", "p5"} <= s)), PATCHES)
    assert {e.reading for e in effects} == {"no loss"} and all(e.in_company is None for e in effects)


def test_shapley_equals_the_average_over_all_orders():
    rng = np.random.default_rng(0)
    names = ["a", "b", "c"]
    values = {frozenset(s): rng.normal(size=7) for n in range(4) for s in itertools.combinations(names, n)}
    got = shapley(values, names)
    for name in names:
        orders = []
        for order in itertools.permutations(names):
            before = frozenset(order[: order.index(name)])
            orders.append(values[before | {name}] - values[before])
        assert got[name].estimate == pytest.approx(np.mean(orders))
    total = sum(c.estimate for c in got.values())
    assert total == pytest.approx((values[frozenset(names)] - values[frozenset()]).mean())


def test_split_of_a_joint_loss_finds_the_shares_and_the_interaction():
    truth = {(): 0.0, ("keys",): 0.1, ("scale",): 0.3, ("keys", "scale"): 0.4}
    covered = 0
    for seed in range(30):
        recalls = serve("factorial", lambda s: truth[tuple(sorted(s))], patches=["keys", "scale"], seed=seed)
        split = split_loss(recalls["base"], recalls["keys"], recalls["scale"], recalls["all"], names=("keys", "scale"))
        assert split.share_first == pytest.approx(0.25, abs=0.15) and "keys explains" in split.sentence
        covered += split.share_ci_low < 0.25 < split.share_ci_high
    assert covered >= 25
    none = split_loss(recalls["base"], recalls["base"], recalls["base"], recalls["base"], names=("keys", "scale"))
    assert none.share_first is None and "no loss" in none.sentence


def test_contrast_needs_two_conversations():
    assert contrast(np.array([0.5])) is None
    assert contrast(np.array([-0.5, np.nan, -0.25])).n_conversations == 2


@pytest.mark.parametrize(
    ("design", "patches", "conflicts", "message"),
    [
        ("factorial", PATCHES, (), "at most 3 suspects"),
        ("oat", [], (), "each named once; got none"),
        ("oat", ["p1", "p1"], (), "each named once"),
        ("oat", ["p1", "p2"], [("p1", "p2")], "p1 and p2 do not apply together, and design oat needs all"),
    ],
)
def test_designs_that_cannot_be_served_are_refused_before_any_server(design, patches, conflicts, message):
    with pytest.raises(DesignError, match=message):
        combinations_of(design, patches, conflicts)


def _stack_losses(rng, conversations, recall, base_right, rho=0.05):
    keep = recall
    rate = np.clip(rng.beta((1 - keep) * (1 / rho - 1), keep * (1 / rho - 1), conversations), 0, 1)
    return rng.binomial(base_right, rate)


def test_beta_binomial_fit_finds_rate_and_likelihood_is_scipys():
    rng = np.random.default_rng(0)
    right = np.full(400, 9)
    lost = _stack_losses(rng, 400, 0.8, right)
    model = LossModel.fit(lost.astype(float), right.astype(float))
    assert model.rate == pytest.approx(0.2, abs=0.03)
    assert model.log_likelihood(np.array([2.0]), np.array([9.0])) == pytest.approx(
        math.log(stats.betabinom.pmf(2, 9, model.a, model.b))
    )


@pytest.mark.parametrize(("n_patches", "limit"), [(8, 70), (32, 110)])
def test_bisect_finds_the_guilty_patch_with_few_conversations(n_patches, limit):
    rng = np.random.default_rng(n_patches)
    right, used = 0, []
    screen_right = np.full(40, 9)
    for _ in range(40):
        good = LossModel.fit(_stack_losses(rng, 40, 0.985, screen_right).astype(float), screen_right.astype(float))
        bad = LossModel.fit(_stack_losses(rng, 40, 0.83, screen_right).astype(float), screen_right.astype(float))
        guilty = int(rng.integers(1, n_patches + 1))
        search = Bisect(n_patches, good=good, bad=bad)
        while search.decided(0.98) is None and search.n_conversations < 400:
            k = search.next_query()
            base_right = np.full(10, 9)
            lost = _stack_losses(rng, 10, 0.83 if k >= guilty else 0.985, base_right)
            search.update(k, lost.astype(float), base_right.astype(float))
        right += search.decided(0.98) == guilty
        used.append(search.n_conversations)
    assert right >= 38 and np.mean(used) <= limit


def test_bisect_refuses_when_there_is_nothing_to_find():
    model = LossModel(a=0.3, b=9.7)
    with pytest.raises(DesignError, match="no loss to bisect"):
        Bisect(4, good=model, bad=model)
    with pytest.raises(DesignError, match="prior over 4"):
        Bisect(4, good=model, bad=LossModel(a=2, b=8), prior=[1, 1])
    with pytest.raises(DesignError, match="query 9"):
        Bisect(4, good=model, bad=LossModel(a=2, b=8)).update(9, np.zeros(1), np.ones(1))


def test_prior_knowledge_about_a_patch_is_used():
    search = Bisect(4, good=LossModel(a=0.3, b=9.7), bad=LossModel(a=2, b=8), prior=[0, 0, 0, 1])
    assert search.decided() == 4
