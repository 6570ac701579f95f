"""The campaign's own controls: base against base again, a build known to be bad, a patch that does nothing."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from longrecall.evals.cells import Floats
from longrecall.evals.compare import percent
from longrecall.evals.family import Family
from longrecall.evals.paired import holm, sign_flip_p
from longrecall.evals.schema import Comparison, ControlResult


def aa_control(family: Family, compared: list[list[Comparison]]) -> ControlResult:
    """Base against base again: no rung may differ at `aa_alpha` (Holm over rungs); the noise must fit the margin."""
    config, width = family.config, len(family.cells.rungs) + 1
    found = [i for i, b in enumerate(family.builds) if b.role == "aa"]
    if not found:
        return ControlResult(
            name="aa", build=None, passed=False, detail="the campaign has no second run of the base build"
        )
    i = found[0]
    rows = slice(family.offset(i), family.offset(i) + width - 1)
    n = family.evidence.n[rows]
    name = family.builds[i].build_id
    shown = tuple(compared[i])
    if (n < 2).any():
        rung = family.cells.rungs[int(np.argmax(n < 2))]
        detail = f"{name} has {int(n.min())} conversations at {rung} tokens; 2 are the least"
        return ControlResult(name="aa", build=name, passed=False, detail=detail, comparisons=shown)
    gate = family.unbalanced[i]
    if gate is not None:
        return ControlResult(name="aa", build=name, passed=False, detail=f"{name}: {gate}", comparisons=shown)
    adjusted = holm(np.maximum(family.evidence.p_two_sided[rows], _two_sided_flip(family, i)[: width - 1]))
    worst = int(np.nanargmin(adjusted))
    mean = family.evidence.mean[rows]
    if adjusted[worst] <= config.aa_alpha:
        detail = (
            f"the base build differs from itself by {percent(mean[worst], '+z.1f')} points "
            f"at {family.cells.rungs[worst]} tokens (p = {adjusted[worst]:.2g}): "
            "something besides the patch changed between builds"
        )
        return ControlResult(name="aa", build=name, passed=False, detail=detail, comparisons=shown)
    df = np.maximum(n - 1, 1)
    reach = np.abs(mean) + stats.t.ppf(1 - config.alpha / 2, df) * family.evidence.stderr[rows]
    widest = int(np.nanargmax(reach))
    part = family.parts[i]
    if reach[widest] > config.margin:
        detail = (
            f"base against itself is known only to ±{100 * reach[widest]:.1f} points "
            f"at {family.cells.rungs[widest]} tokens, more than the margin of "
            f"{100 * config.margin:.1f}: more conversations or a larger margin are needed"
        )
        return ControlResult(name="aa", build=name, passed=False, detail=detail, comparisons=shown)
    flips, total = int(part.lost[-1] + part.gained[-1]), int(part.n_probes[-1])
    agreement = (
        f"identical outcomes on {total} of {total} replies"
        if not flips
        else f"{flips} flip{'s' * (flips > 1)} in {total} replies"
    )
    detail = f"{agreement}; noise within ±{100 * reach[widest]:.1f} points at every rung"
    return ControlResult(name="aa", build=name, passed=True, detail=detail, comparisons=shown)


def _two_sided_flip(family: Family, i: int) -> Floats:
    d = family.parts[i].d
    return np.array([min(1.0, 2 * min(sign_flip_p(row), sign_flip_p(-row))) for row in d])


def positive_control(family: Family, compared: list[list[Comparison]]) -> ControlResult:
    """Every known-bad build must be convicted: a suite that cannot see a loss exonerates everyone."""
    found = [i for i, b in enumerate(family.builds) if b.role == "positive-control"]
    if not found:
        detail = 'the campaign has no build that is known to lose recall (a patch with role = "positive-control")'
        return ControlResult(name="positive", build=None, passed=False, detail=detail)
    shown = tuple(c for i in found for c in compared[i])
    missed = [i for i in found if not family.convicted(i)]
    i = (missed or found)[0]
    name = family.builds[i].build_id
    rows = family.evidence.mean[family.offset(i) : family.offset(i) + len(family.cells.rungs)]
    if missed:
        n = int(family.evidence.n[family.offset(i) : family.offset(i) + len(family.cells.rungs)].max(initial=0))
        detail = (
            f"{name}, known to lose recall, was not caught with {n} conversations{_largest_loss(compared[i])}: "
            "this suite cannot see a loss yet; more conversations would help, or a control known bad for this model"
        )
        return ControlResult(name="positive", build=name, passed=False, detail=detail, comparisons=shown)
    worst = int(np.nanargmin(rows))
    detail = f"{name} caught: {percent(rows[worst], '+z.1f')} points at {family.cells.rungs[worst]} tokens"
    return ControlResult(name="positive", build=name, passed=True, detail=detail, comparisons=shown)


def _largest_loss(compared: Sequence[Comparison]) -> str:
    """The rung at which a build lost most, with the interval; empty where nothing is known of it."""
    known = [(c.delta_recall, c) for c in compared if c.rung is not None and c.delta_recall is not None]
    if not known:
        return ""
    delta, most = min(known, key=lambda pair: pair[0])
    said = f"{percent(delta, '+z.1f')} points"
    if most.ci_low is not None and most.ci_high is not None:
        said += f" [{percent(most.ci_low, '+z.1f')}, {percent(most.ci_high, '+z.1f')}]"
    return f" ({said} at {most.rung} tokens)"


def negative_control(family: Family, compared: list[list[Comparison]]) -> ControlResult:
    """A patch that does nothing must not be convicted (at `aa_alpha`, Holm over its own cells)."""
    found = [i for i, b in enumerate(family.builds) if b.role == "negative-control"]
    if not found:
        detail = 'the campaign has no no-op patch (role = "negative-control")'
        return ControlResult(name="negative", build=None, passed=False, detail=detail)
    for i in found:
        p = holm(family.p_cell[i])
        if np.isfinite(p).any() and np.nanmin(p) <= family.config.aa_alpha:
            name, row = family.builds[i].build_id, int(np.nanargmin(p))
            detail = f"{name} does nothing and yet loses recall at {family.rung_name(row)} (p = {p[row]:.2g})"
            return ControlResult(
                name="negative", build=name, passed=False, detail=detail, comparisons=tuple(compared[i])
            )
    i = found[0]
    n = int(family.evidence.n[family.offset(i)])
    name = family.builds[i].build_id
    if n < 2:
        return ControlResult(
            name="negative", build=name, passed=False, detail=f"{name} has {n} conversations; 2 are the least"
        )
    return ControlResult(
        name="negative", build=name, passed=True, detail=f"{name} not convicted", comparisons=tuple(compared[i])
    )


def campaign_blocker(controls: Sequence[ControlResult]) -> str | None:
    """Why no verdict can be given, whatever the data say; None when the controls allow one (a no-op is optional)."""
    names = {"aa": "A/A", "positive": "positive", "negative": "negative"}
    return next((f"{names[c.name]} control: {c.detail}" for c in controls if c.blocks), None)
