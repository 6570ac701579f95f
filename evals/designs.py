"""Which builds to serve so that the guilty patch can be told from its neighbours, and what their recalls say.

  screen     base, all                        is there anything to look for?
  oat        base, all, each patch alone      right unless patches act together or hide each other
  oat+loo    oat and all but each patch       also sees "only together" and "masked by"
  factorial  every subset of 2 or 3 suspects  interactions and Shapley values
  bisect     the first k of an ordered stack  which commit or patch in a row began it, by Bayes' rule

One at a time misses what only two patches do together, leaving one out misses what another patch hides; the two
together are right in every simulated scenario, and each of their builds is one that people ship.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy import optimize, special

from longrecall.evals.cells import Cells, Floats
from longrecall.evals.curves import conversation_means
from longrecall.evals.paired import cluster_t, holm, sign_flip_p

Design = Literal["screen", "oat", "oat+loo", "factorial", "bisect"]
DESIGNS: dict[str, Design] = {d: d for d in get_args(Design)}
MAX_FACTORIAL = 3


class DesignError(ValueError):
    """A design that cannot be served: too many suspects, a repeated patch, two patches that do not apply together."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One build of a design: the base with these patches."""

    build_id: str
    patch_ids: tuple[str, ...]


def combination_id(patch_ids: Sequence[str], patches: Sequence[str]) -> str:
    """ "base", "all", "all-but-x", the patch itself, or "x_and_y", patches in the order of the stack."""
    chosen = [p for p in patches if p in set(patch_ids)]
    if not chosen:
        return "base"
    if len(chosen) == 1:
        return chosen[0]
    if len(chosen) == len(patches):
        return "all"
    if len(chosen) == len(patches) - 1 and len(patches) > 3:
        return f"all-but-{next(p for p in patches if p not in chosen)}"
    return "_and_".join(chosen)


def combinations_of(
    design: Design, patches: Sequence[str], conflicts: Iterable[tuple[str, str]] = ()
) -> tuple[Combination, ...]:
    """The builds of a design, base first, each once.

    conflicts: pairs of patches that cannot be applied together (found from the diffs, before any server starts).
    Raises DesignError naming the pair when the design needs them together.
    """
    if len(set(patches)) != len(patches) or not patches:
        raise DesignError(f"a design needs patches, each named once; got {', '.join(patches) or 'none'}")
    if design == "factorial" and len(patches) > MAX_FACTORIAL:
        raise DesignError(
            f"factorial over {len(patches)} patches is {2 ** len(patches)} builds; name at most {MAX_FACTORIAL} "
            "suspects (find them with oat+loo first)"
        )
    everything = tuple(patches)
    singles = [(p,) for p in patches]
    sets: list[tuple[str, ...]] = {
        "screen": [(), everything],
        "oat": [(), everything, *singles],
        "oat+loo": [(), everything, *singles, *(tuple(q for q in patches if q != p) for p in patches)],
        "factorial": [c for n in range(len(patches) + 1) for c in itertools.combinations(patches, n)],
        "bisect": [(), everything],
    }[design]
    for pair in conflicts:
        for chosen in sets:
            if set(pair) <= set(chosen):
                raise DesignError(
                    f"patches {pair[0]} and {pair[1]} do not apply together, and design {design} needs "
                    f"{combination_id(chosen, patches)}: leave one out, or test them in two campaigns"
                )
    unique = dict.fromkeys(tuple(sorted(c, key=everything.index)) for c in sets)
    return tuple(Combination(build_id=combination_id(c, patches), patch_ids=c) for c in unique)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A linear contrast of recalls with the conversation as unit; negative is a loss."""

    estimate: float
    ci_low: float
    ci_high: float
    p_loss: float
    p_two_sided: float
    n_conversations: int


def contrast(values: Floats) -> Contrast | None:
    """Mean of one value per conversation; None with fewer than 2."""
    t = cluster_t(values[None], margin=0.0, alpha=0.05)
    if t.n[0] < 2:
        return None
    down, up = sign_flip_p(values), sign_flip_p(-values)
    return Contrast(
        estimate=float(t.mean[0]),
        ci_low=float(t.ci_low[0]),
        ci_high=float(t.ci_high[0]),
        p_loss=max(float(t.p_loss[0]), down),
        p_two_sided=max(float(t.p_two_sided[0]), min(1.0, 2 * min(down, up))),
        n_conversations=int(t.n[0]),
    )


Reading = Literal["no loss", "loses", "only together", "masked", "gains"]


@dataclass(frozen=True, kw_only=True)
class PatchEffect:
    """What one patch does alone and in the company of all the others."""

    patch: str
    alone: Contrast | None
    """patch - base."""
    in_company: Contrast | None
    """all - all but the patch; None without the leave-one-out build."""
    interaction: Contrast | None
    """in_company - alone."""
    reading: Reading
    partners: tuple[str, ...]
    """Patches it acts together with, or that hide it: the pairs to run as a 2 × 2."""
    sentence: str


def combination_recalls(cells: Cells, rung: int | None = None) -> dict[str, Floats]:
    """Per build one recall per conversation, at a rung or averaged over all of them."""
    made = {}
    for i, build in enumerate(cells.builds):
        means = conversation_means(cells, i)
        made[build] = means[cells.rungs.index(rung)] if rung is not None else means.mean(axis=0)
    return made


def patch_effects(
    recalls: dict[str, Floats], patches: Sequence[str], *, alpha: float = 0.05
) -> tuple[PatchEffect, ...]:
    """Read an oat or oat+loo campaign: who loses, who only together with whom, who is masked by whom.

    recalls: one value per conversation for "base", "all", each patch and, for leave-one-out, the builds that
    `combinations_of` names. Holm over the one-sided tests of all patches, alone and in company together.
    """
    base, everything = recalls["base"], recalls.get("all", recalls[patches[0]] if len(patches) == 1 else None)
    alone = {p: contrast(recalls[p] - base) if p in recalls else None for p in patches}
    without = {p: recalls.get(combination_id([q for q in patches if q != p], patches)) for p in patches}
    left_out = {
        p: everything - rest if everything is not None and rest is not None else None for p, rest in without.items()
    }
    company = {p: contrast(d) if d is not None else None for p, d in left_out.items()}
    tests = [c.p_loss if c is not None else math.nan for c in (*alone.values(), *company.values())]
    adjusted = holm(np.array(tests))
    loses_alone = {p: bool(adjusted[i] <= alpha) for i, p in enumerate(patches)}
    loses_company = {p: bool(adjusted[len(patches) + i] <= alpha) for i, p in enumerate(patches)}
    gains_in = {
        p: c is not None and c.estimate > 0 and c.p_two_sided <= alpha / len(patches) for p, c in company.items()
    }
    made = []
    for p in patches:
        a, c = alone[p], company[p]
        together = tuple(q for q in patches if q != p and loses_company[q] and not loses_alone[q])
        hiding = tuple(q for q in patches if q != p and gains_in[q])
        reading: Reading
        partners: tuple[str, ...] = ()
        if loses_alone[p] and (c is None or loses_company[p]):
            reading = "loses"
        elif loses_alone[p]:
            reading, partners = "masked", hiding
        elif loses_company[p]:
            reading, partners = "only together", together
        else:
            reading = "gains" if gains_in[p] else "no loss"
        both = None
        in_company = left_out[p]
        if a is not None and in_company is not None:
            both = contrast(in_company - (recalls[p] - base))
        made.append(
            PatchEffect(
                patch=p,
                alone=a,
                in_company=c,
                interaction=both,
                reading=reading,
                partners=partners,
                sentence=_effect_sentence(p, reading, partners, a, c),
            )
        )
    return tuple(made)


def _effect_sentence(
    patch: str, reading: Reading, partners: tuple[str, ...], alone: Contrast | None, company: Contrast | None
) -> str:
    def points(c: Contrast | None) -> str:
        return "?" if c is None else f"{100 * c.estimate:+.1f} [{100 * c.ci_low:+.1f}, {100 * c.ci_high:+.1f}]"

    shown = f"alone {points(alone)} points" + (f", with all the others {points(company)}" if company else "")
    whom = " and ".join(partners) if partners else "a patch not yet named"
    return {
        "loses": f"{patch} loses recall: {shown}",
        "only together": f"{patch} loses recall only together with {whom}: {shown}",
        "masked": f"{patch} loses recall alone but is masked by {whom}: {shown}",
        "gains": f"{patch} raises recall in the company of the others, so it may hide another's loss: {shown}",
        "no loss": f"{patch}: no loss seen ({shown})",
    }[reading]


def interaction_pairs(effects: Sequence[PatchEffect]) -> tuple[tuple[str, str], ...]:
    """Pairs worth a 2 × 2 of their own: those that a reading names."""
    pairs = {tuple(sorted((e.patch, q))) for e in effects for q in e.partners}
    return tuple((a, b) for a, b in sorted(pairs))


def shapley(values: dict[frozenset[str], Floats], patches: Sequence[str]) -> dict[str, Contrast | None]:
    """Each patch's share of the change from base to all, fair over all orders of applying them.

    values: one recall per conversation for every subset of the patches (a full factorial). Computed inside each
    conversation, so the intervals are paired.
    """
    k = len(patches)
    missing = [s for n in range(k + 1) for s in itertools.combinations(patches, n) if frozenset(s) not in values]
    if missing:
        raise DesignError(f"Shapley values need every subset; {'+'.join(missing[0]) or 'base'} was not served")
    made = {}
    for p in patches:
        total: Floats = np.zeros_like(values[frozenset()])
        others = [q for q in patches if q != p]
        for n in range(k):
            weight = math.factorial(n) * math.factorial(k - n - 1) / math.factorial(k)
            for s in itertools.combinations(others, n):
                total = total + weight * (values[frozenset((*s, p))] - values[frozenset(s)])
        made[p] = contrast(total)
    return made


@dataclass(frozen=True, kw_only=True)
class LossSplit:
    """How the loss of two patches together divides between them."""

    first: str
    second: str
    loss: Contrast
    share_first: float | None
    """Shapley share of `first` in the joint loss; None when no loss is shown."""
    share_ci_low: float | None
    share_ci_high: float | None
    interaction: Contrast | None
    """both - first - second + base; 0: the losses add up."""
    sentence: str


def split_loss(
    base: Floats,
    first: Floats,
    second: Floats,
    both: Floats,
    *,
    names: tuple[str, str],
    n_resamples: int = 2000,
    seed: int = 0,
) -> LossSplit:
    """The 2 × 2 of two suspects: who explains how much of the loss, with a conversation-bootstrap interval."""
    seen = np.isfinite(base) & np.isfinite(first) & np.isfinite(second) & np.isfinite(both)
    d1 = ((first - base) + (both - second))[seen] / 2
    d2 = ((second - base) + (both - first))[seen] / 2
    loss = contrast((both - base)[seen])
    if loss is None:
        raise DesignError(f"{names[0]} and {names[1]} share {int(seen.sum())} conversations; 2 are the least")
    mixed = contrast((both - first - second + base)[seen])
    share = low = high = None
    if loss.p_loss <= 0.05 and loss.estimate < 0:
        share = float(d1.mean() / (d1 + d2).mean())
        draws = np.random.default_rng(seed).multinomial(len(d1), np.full(len(d1), 1 / len(d1)), size=n_resamples)
        total = draws @ (d1 + d2)
        shares = (draws @ d1)[total < 0] / total[total < 0]
        low, high = (float(v) for v in np.quantile(shares, [0.025, 0.975]))
    said = (
        f"{names[0]} explains {share:.0%} [{low:.0%}, {high:.0%}] of the {-100 * loss.estimate:.1f} points "
        f"lost together with {names[1]}"
        if share is not None
        else f"no loss of {names[0]} and {names[1]} together is shown ({100 * loss.estimate:+.1f} points)"
    )
    if mixed is not None and mixed.p_two_sided <= 0.05:
        said += f"; they interact ({100 * mixed.estimate:+.1f} points beyond their sum)"
    return LossSplit(
        first=names[0],
        second=names[1],
        loss=loss,
        share_first=share,
        share_ci_low=low,
        share_ci_high=high,
        interaction=mixed,
        sentence=said,
    )


@dataclass(frozen=True, kw_only=True)
class LossModel:
    """Beta-binomial of the replies a build loses among those the base has right, conversation by conversation."""

    a: float
    b: float

    @classmethod
    def fit(cls, lost: Floats, right: Floats) -> "LossModel":
        """Maximum likelihood with a weak pull (one conversation's worth) towards a rate of 3 %."""
        pairs, counts = np.unique(np.stack([lost[right > 0], right[right > 0]]), axis=1, return_counts=True)

        def cost(theta: Floats) -> float:
            rate, size = special.expit(theta[0]), math.exp(theta[1])
            terms = _log_betabinom(pairs[0], pairs[1], rate * size, (1 - rate) * size)
            # a size between 1 and 60 replies' worth is the rule; the pull settles fits that the data leave open
            pull = 0.03 * math.log(rate) + 0.97 * math.log1p(-rate) - 0.5 * ((theta[1] - 2.0) / 1.5) ** 2
            return float(-(counts @ terms) - pull)

        mean = (pairs[0] @ counts + 0.03) / (pairs[1] @ counts + 1.0) if pairs.size else 0.03
        start = np.array([special.logit(np.clip(mean, 1e-4, 1 - 1e-4)), 2.0])
        found = optimize.minimize(cost, start, method="L-BFGS-B", bounds=[(-9, 9), (-1, 5)]).x
        rate, size = float(special.expit(found[0])), math.exp(float(found[1]))
        return cls(a=rate * size, b=(1 - rate) * size)

    def log_likelihood(self, lost: Floats, right: Floats) -> float:
        """Sum over conversations."""
        return float(np.sum(_log_betabinom(lost, right, self.a, self.b)))

    @property
    def rate(self) -> float:
        return self.a / (self.a + self.b)


def _log_betabinom(k: Floats, n: Floats, a: float, b: float) -> Floats:
    choose = -np.log1p(n) - special.betaln(n - k + 1, k + 1)
    return np.asarray(choose + special.betaln(k + a, n - k + b) - special.betaln(a, b))


class Bisect:
    """Which of K patches in a row began the loss, from noisy conversations.

    Query k is the build with the first k patches. Builds before the guilty patch lose replies like base against base,
    builds from it on like all against base; both models come from those two comparisons, which the screen has
    already paid for. Each query updates a posterior over the K patches.
    """

    def __init__(
        self, n_patches: int, *, good: LossModel, bad: LossModel, prior: Sequence[float] | None = None
    ) -> None:
        if n_patches < 1:
            raise DesignError(f"bisect over {n_patches} patches")
        if bad.rate <= good.rate:
            raise DesignError(
                f"all patches together lose {bad.rate:.1%} of the replies, base against base {good.rate:.1%}: "
                "there is no loss to bisect"
            )
        weights = np.ones(n_patches) if prior is None else np.asarray(prior, dtype=np.float64)
        if len(weights) != n_patches or (weights < 0).any() or weights.sum() <= 0:
            raise DesignError(f"a prior over {n_patches} patches has {len(weights)} weights, none negative, not all 0")
        with np.errstate(divide="ignore"):
            self._log = np.log(weights / weights.sum())
        self.good, self.bad = good, bad
        self.n_conversations = 0

    @property
    def posterior(self) -> Floats:
        """[K] probability that patch k (1-based: entry k-1) began the loss."""
        return np.asarray(np.exp(self._log - special.logsumexp(self._log)))

    def update(self, k: int, lost: Floats, right: Floats) -> None:
        """Conversations of the build with the first k patches: replies lost among those the base has right."""
        if not 1 <= k <= len(self._log):
            raise DesignError(f"query {k} of a stack of {len(self._log)}")
        good, bad = self.good.log_likelihood(lost, right), self.bad.log_likelihood(lost, right)
        first = np.arange(1, len(self._log) + 1)
        self._log = self._log + np.where(first <= k, bad, good)
        self._log = self._log - special.logsumexp(self._log)
        self.n_conversations += len(lost)

    def next_query(self) -> int:
        """The build whose answer is most uncertain: its probability of being bad is nearest to one half."""
        return int(np.argmin(np.abs(np.cumsum(self.posterior) - 0.5))) + 1

    def decided(self, certainty: float = 0.95) -> int | None:
        """The guilty patch (1-based) once its posterior reaches `certainty`."""
        best = int(np.argmax(self.posterior))
        return best + 1 if self.posterior[best] >= certainty else None
