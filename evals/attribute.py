"""From what a patch was seen to do to why: the causes that fit, those that are ruled out, and what to measure next.

Served evidence comes from the stored scores: loss on both sides of the onset of top-k selection, and arms served under
an intervention, which are builds named "<patch>--<arm>" and "base--<arm>" (ARMS). In-process evidence (selection,
needle hits, divergence of prefill and decode) comes as observations in a JSON file. Every cause gives every
observation a density; their product, with equal priors for the families, ranks the causes, and an observation that a
cause all but excludes is named as its contradiction.
"""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from longrecall.evals.causes import CAUSES, FAMILIES, FEATURES, LEVELS, Cause, level_log_density
from longrecall.evals.cells import Cells, Floats
from longrecall.evals.compare import differences, percent
from longrecall.evals.paired import cluster_t
from longrecall.evals.replies import Replies, observe_replies, same_under
from longrecall.evals.schema import Attribution, CauseFit, NextArm, Observation
from longrecall.evals.scores_file import ScoresError

ARMS: dict[str, str] = {
    "topk-x2": "topk_recovers",
    "scaling-1": "scaling_recovers",
    "scaling-sqrt": "scaling_recovers",
    "scaling-squared": "scaling_recovers",
    "decode-backend": "decode_recovers",
    "cache-off": "cache_off_recovers",
    "concat": "concat_recovers",
    "chunk": "chunk_recovers",
}
"""Suffix of an intervention build → the feature it measures.

scaling-1 leaves no power of the factor in the model, whoever applies it and how often; √f undoes a factor applied
twice in every layer, and f² one applied half as often as it should be."""
REPAIRS = frozenset({"scaling-sqrt", "scaling-squared"})
"""Arms that would make the patched build right, and hurt the base: held against the base as it is."""
AGAIN = "again"
"""Suffix of a second run of a patched build."""
CONTRADICTION = math.log(0.01)
LEAST_BASE_RECALL = 0.05
LEAST_LOSS = 0.02
"""A smaller loss leaves nothing to recover."""
LEAST_KEPT = 0.5
"""An intervention under which the base loses more than this of its recall cannot show that a patch's loss is gone."""
CERTAIN = 0.95
STANDING = 0.02
"""A cause or a family of causes more probable than this is still to be reckoned with."""


def is_arm(build_id: str) -> bool:
    """Whether a build is an intervention of attribution and not a patch under suspicion."""
    _, dash, suffix = build_id.rpartition("--")
    return bool(dash) and (suffix in ARMS or suffix == AGAIN)


def observe(
    cells: Cells, baseline: str, patch: str, *, onset: int | None, replies: Replies | None = None
) -> list[Observation]:
    """Everything the scores of one arm say of one patch; features without data are left out.

    replies: the same rows, for what `cells` does not hold (equal texts, reuse, residues, order).
    """
    part = differences(cells, baseline, patch)
    found = []
    sides: dict[str, tuple[list[int], Floats]] = {}
    for name, wanted in (("short", True), ("long", False)):
        rows = [i for i, rung in enumerate(cells.rungs) if onset is not None and (rung <= onset) == wanted]
        share = _lost_share(part.d, part.base, rows)
        if share is not None:
            sides[name] = (rows, share)
            rungs = ", ".join(str(cells.rungs[i]) for i in rows)
            found.append(_observation(patch, name, share, f"share of the base's recall lost at {rungs} tokens"))
    if len(sides) == 2:
        growth = sides["long"][1] - sides["short"][1]
        found.append(_observation(patch, "growth", growth, "share lost beyond the onset less share lost up to it"))
    found += _arms(cells, baseline, patch, onset, replies)
    if replies is not None:
        found += observe_replies(replies, baseline, patch)
    again = f"{patch}--{AGAIN}"
    if again in cells.builds:
        excess = _excess_flips(cells, baseline, patch, again)
        if excess is not None:
            found.append(_observation(patch, "unrepeatable", excess, "flips against itself beyond the base's own"))
    return [o for o in found if o is not None]


def _arms(
    cells: Cells, baseline: str, patch: str, onset: int | None, replies: Replies | None
) -> list[Observation | None]:
    """One observation for each intervention served; of several arms of one feature the one that helps most."""
    best: dict[str, Observation] = {}
    for suffix, feature in ARMS.items():
        if f"{patch}--{suffix}" not in cells.builds:
            continue
        seen = _arm(cells, baseline, patch, suffix, onset, replies)
        if seen is not None and (feature not in best or seen.estimate > best[feature].estimate):
            best[feature] = seen
    return list(best.values())


def _arm(
    cells: Cells, baseline: str, patch: str, suffix: str, onset: int | None, replies: Replies | None
) -> Observation | None:
    """What one intervention takes away of the loss: all of it where it makes the replies equal, else by recall."""
    feature = ARMS[suffix]
    twins = f"{baseline}--{suffix}" in cells.builds and suffix not in REPAIRS
    same = same_under(replies, baseline, patch, suffix) if replies is not None and twins else None
    if same is not None and (same[0] or suffix == "scaling-1"):
        # at a factor of 1 the base itself recalls next to nothing, so that recall could not tell the two apart
        return Observation(
            patch=patch,
            feature=feature,
            estimate=float(same[0]),
            stderr=0.02,
            n=len(cells.conversations),
            source="served",
            detail=same[1],
        )
    if suffix == "scaling-1":
        return None
    recovered = _recovered(cells, baseline, patch, suffix, onset)
    if recovered is None:
        return None
    made = _observation(patch, feature, recovered, f"share of the loss that {suffix} takes away")
    # an intervention under which even more is lost takes nothing away
    return None if made is None else replace(made, estimate=max(made.estimate, 0.0))


def _lost_share(d: Floats, base: Floats, rows: list[int]) -> Floats | None:
    """[U] loss of each conversation at these rungs over the baseline's mean recall there; None where it has none."""
    if not rows:
        return None
    level = base[rows][np.isfinite(base[rows])]
    if not level.size or level.mean() < LEAST_BASE_RECALL:
        return None
    return np.asarray(-d[rows].mean(axis=0) / level.mean())


def _recovered(cells: Cells, baseline: str, patch: str, suffix: str, onset: int | None) -> Floats | None:
    """[U] share of the patch's loss that is gone under the intervention, over the rungs that both were asked."""
    plain = differences(cells, baseline, patch)
    twin = f"{baseline}--{suffix}"
    base_there = twin if twin in cells.builds and suffix not in REPAIRS else baseline
    there = differences(cells, base_there, f"{patch}--{suffix}")
    rows = [i for i in range(len(cells.rungs)) if np.isfinite(there.d[i]).any() and np.isfinite(plain.d[i]).any()]
    if suffix == "topk-x2" and onset is not None:  # only between the old and the new onset is the prediction sharp
        inside = [i for i in rows if onset < cells.rungs[i] <= 2 * onset]
        rows = inside or [i for i in rows if cells.rungs[i] > onset]
    if not rows:
        return None
    asked = np.isfinite(there.d[rows]).all(axis=0)  # an arm may have been asked fewer conversations
    loss = -float(np.nanmean(plain.d[rows]))
    kept, level = np.nanmean(there.base[rows]), np.nanmean(plain.base[rows])
    if loss < LEAST_LOSS or not kept >= LEAST_KEPT * level:
        return None
    gone = (there.d[rows].mean(axis=0) - plain.d[rows].mean(axis=0)) / loss
    return np.asarray(np.where(asked, gone, np.nan))


CACHE_ARMS: dict[str, str] = {"cold": "cache_off_recovers", "concat": "concat_recovers"}
"""Arm of the client, asked of the same builds → the feature that holding it against the warm arm measures."""


def observe_client_arm(warm: Cells, other: Cells, baseline: str, patch: str) -> Observation | None:
    """What asking the other way (without prefix reuse, or all facts in one turn) takes away of the warm arm's loss.

    None when the two arms did not ask the same conversations, or when there is no loss in the warm arm to take away.
    """
    if warm.conversations != other.conversations or not {baseline, patch} <= set(other.builds):
        return None
    before, after = differences(warm, baseline, patch), differences(other, baseline, patch)
    rows = [i for i in range(len(warm.rungs)) if np.isfinite(before.d[i]).any() and np.isfinite(after.d[i]).any()]
    if not rows:
        return None
    loss = -float(np.nanmean(before.d[rows]))
    if loss < LEAST_LOSS:
        return None
    recovered = (after.d[rows].mean(axis=0) - before.d[rows].mean(axis=0)) / loss
    feature = CACHE_ARMS[other.arm]
    return _observation(patch, feature, recovered, f"share of the warm arm's loss that the {other.arm} arm lacks")


def _excess_flips(cells: Cells, baseline: str, patch: str, again: str) -> Floats | None:
    """[U] flips of the patch against itself less those of the base; None without an A/A build to hold them against."""
    repeat = f"{baseline}-again"
    if repeat not in cells.builds:
        return None
    own, base = differences(cells, patch, again), differences(cells, baseline, repeat)
    excess = own.lost_share + own.gained_share - base.lost_share - base.gained_share
    return np.asarray(excess[:-1].mean(axis=0))


def _observation(patch: str, feature: str, values: Floats, detail: str) -> Observation | None:
    t = cluster_t(values[None], margin=0.0, alpha=0.05)
    if t.n[0] < 2:
        return None
    # without spread the error is that of one conversation out of n showing everything
    stderr = float(t.stderr[0]) if t.stderr[0] > 0 else 1.0 / float(t.n[0]) ** 1.5
    return Observation(
        patch=patch,
        feature=feature,
        estimate=float(t.mean[0]),
        stderr=stderr,
        n=int(t.n[0]),
        source="served",
        detail=detail,
    )


def load_observations(path: Path) -> list[Observation]:
    """Observations made elsewhere (in-process): a JSON list of objects with the fields of `Observation`."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ScoresError(f"{path}: no such evidence file") from None
    except (OSError, ValueError) as error:
        raise ScoresError(f"{path}: not JSON ({error})") from None
    made = []
    for i, row in enumerate(rows if isinstance(rows, list) else [None]):
        try:
            made.append(Observation(**row))
        except TypeError as error:
            raise ScoresError(f"{path}: entry {i} is not an observation ({error})") from None
        if made[-1].feature not in FEATURES:
            raise ScoresError(f"{path}: entry {i} has feature {made[-1].feature!r}; known: {', '.join(FEATURES)}")
        if not (math.isfinite(made[-1].estimate) and made[-1].stderr >= 0):
            raise ScoresError(f"{path}: entry {i} has estimate {made[-1].estimate} ± {made[-1].stderr}")
    return made


def fit_causes(observations: Sequence[Observation]) -> tuple[CauseFit, ...]:
    """All causes, most probable first; those that an observation contradicts last."""
    log_weight, contradictions = {}, {}
    for cause in CAUSES:
        total = -math.log(sum(c.family == cause.family for c in CAUSES))
        against = []
        for o in observations:
            level = cause.signature.get(o.feature, "any")
            density = level_log_density(level, o.estimate, o.stderr)
            total += density
            best = max(level_log_density(other, o.estimate, o.stderr) for other in LEVELS)
            if density - best < CONTRADICTION:
                against.append(o.feature)
        log_weight[cause.name], contradictions[cause.name] = total, tuple(against)
    top = max(log_weight.values())
    weights = {name: math.exp(value - top) for name, value in log_weight.items()}
    scale = sum(weights.values())
    fits = [
        CauseFit(
            cause=cause.name,
            family=cause.family,
            probability=weights[cause.name] / scale,
            contradicted_by=contradictions[cause.name],
            predicted={o.feature: cause.signature.get(o.feature, "any") for o in observations},
        )
        for cause in CAUSES
    ]
    return tuple(sorted(fits, key=lambda f: (bool(f.contradicted_by), -f.probability)))


def family_probabilities(fits: Iterable[CauseFit]) -> dict[str, float]:
    """Posterior of each family of causes."""
    totals = dict.fromkeys(FAMILIES, 0.0)
    for fit in fits:
        totals[fit.family] += fit.probability
    return totals


def _level_table(cause: Cause, feature: str) -> Floats:
    """P(the feature turns out none, small, some, large | cause)."""
    edges = [-1.0, 0.02, 0.12, 0.4, 2.0]
    level = cause.signature.get(feature, "any")
    low, high = LEVELS[level]
    inside = np.array([max(0.0, min(high, b) - max(low, a)) for a, b in itertools.pairwise(edges)])
    inside /= inside.sum()
    return (inside + np.array([1.0, 0.0, 0.0, 0.0])) / 2 if level == "any" else inside


def next_arm(fits: Sequence[CauseFit], measured: Iterable[str], *, unavailable: Iterable[str] = ()) -> NextArm | None:
    """The measurement with the most expected bits about the family per cost; None when the family is settled.

    unavailable: features the engine cannot give (no return_indexer_topk, say).
    """
    families = family_probabilities(fits)
    if max(families.values()) >= CERTAIN:
        return None
    by_name = {c.name: c for c in CAUSES}
    skip = {*measured, *unavailable}
    best: NextArm | None = None
    for feature in FEATURES.values():
        if feature.name in skip or feature.cost == 0:
            continue
        joint = np.zeros((len(FAMILIES), 4))
        for fit in fits:
            joint[FAMILIES.index(fit.family)] += fit.probability * _level_table(by_name[fit.cause], feature.name)
        bits = _mutual_information(joint)
        if bits > 0.01 and (best is None or bits / feature.cost > best.bits / best.cost):
            standing = [f for f in FAMILIES if families[f] >= STANDING]
            best = NextArm(
                feature=feature.name,
                question=feature.question,
                how=feature.how,
                cost=feature.cost,
                bits=bits,
                separates=tuple(standing),
            )
    return best


def _mutual_information(joint: Floats) -> float:
    p = joint / joint.sum()
    rows, columns = p.sum(axis=1, keepdims=True), p.sum(axis=0, keepdims=True)
    seen = p > 1e-12  # products of much smaller ones underflow
    return float(np.sum(p[seen] * np.log2(p[seen] / (rows * columns)[seen])))


def length_dependent_share(
    cells: Cells, baseline: str, patch: str, *, onset: int | None, n_resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float] | None:
    """How much of the share lost beyond the onset is absent up to it, with a conversation-bootstrap interval.

    1: all of the loss needs a context longer than the onset, as index keys do; 0: it is lost at every length, as a
    wrong routed scaling factor does. None without rungs on both sides or without a loss beyond the onset.
    """
    part = differences(cells, baseline, patch)
    rows = {
        side: [i for i, rung in enumerate(cells.rungs) if onset is not None and (rung <= onset) == side]
        for side in (True, False)
    }
    short, long = _lost_share(part.d, part.base, rows[True]), _lost_share(part.d, part.base, rows[False])
    if short is None or long is None:
        return None
    seen = np.isfinite(short) & np.isfinite(long)
    short, long = short[seen], long[seen]
    t = cluster_t(-long[None], margin=0.0, alpha=0.05)
    if t.n[0] < 2 or not t.p_loss[0] <= 0.05:
        return None
    draws = np.random.default_rng(seed).multinomial(len(long), np.full(len(long), 1 / len(long)), size=n_resamples)
    total = draws @ long
    shares = 1 - (draws @ short)[total > 0] / total[total > 0]
    low, high = (float(np.clip(v, 0, 1)) for v in np.quantile(shares, [0.025, 0.975]))
    return float(np.clip(1 - short.mean() / long.mean(), 0, 1)), low, high


def attribute(
    cells: Cells,
    baseline: str,
    patch: str,
    *,
    onset: int | None,
    replies: Replies | None = None,
    more: Sequence[Observation] = (),
    without: Iterable[str] = (),
    unavailable: Iterable[str] = (),
) -> Attribution:
    """Everything known of one patch, fitted.

    more: observations made elsewhere; those of other patches are ignored. without: features not to take from these
    scores, because `more` has them better. unavailable: features that cannot be measured next.
    """
    skip = set(without)
    own = [o for o in observe(cells, baseline, patch, onset=onset, replies=replies) if o.feature not in skip]
    observations = [*own, *(o for o in more if o.patch == patch)]
    fits = fit_causes(observations)
    share = length_dependent_share(cells, baseline, patch, onset=onset)
    arm = None
    if loss_shown(observations):
        arm = next_arm(fits, [o.feature for o in observations], unavailable=unavailable)
    return Attribution(
        patch=patch,
        causes=fits,
        observations=tuple(observations),
        families=family_probabilities(fits),
        length_dependent_share=share[0] if share else None,
        share_ci_low=share[1] if share else None,
        share_ci_high=share[2] if share else None,
        next_arm=arm,
        sentence=_sentence(patch, observations, fits, share, arm),
    )


def loss_shown(observations: Iterable[Observation]) -> bool:
    """Whether recall is lost on either side of the onset, beyond its 95 % interval."""
    return any(o.feature in ("short", "long") and o.estimate - 1.96 * o.stderr > 0 for o in observations)


def _sentence(
    patch: str,
    observations: Sequence[Observation],
    fits: Sequence[CauseFit],
    share: tuple[float, float, float] | None,
    arm: NextArm | None,
) -> str:
    seen = {o.feature: o for o in observations}
    if "long" not in seen and "short" not in seen:
        return f"{patch}: nothing was measured that could tell one cause from another"
    told = []
    for side, where in (("short", "up to the onset"), ("long", "beyond it")):
        if side in seen:
            o = seen[side]
            told.append(f"{percent(o.estimate)} % ± {196 * o.stderr:.0f} of recall is lost {where}")
    said = f"{patch}: {' and '.join(told)}"
    said += f"; {_split(seen, share)}"
    if not loss_shown(observations):
        return said + "; no loss to explain"
    families = family_probabilities(fits)
    standing = [f for f in sorted(families, key=lambda f: -families[f]) if families[f] >= STANDING]
    said += f"; compatible with {', '.join(f'{f} ({percent(families[f])} %)' for f in standing)}"
    for name in ("index keys", "routed scaling"):
        against = sorted({x for f in fits if f.family == name for x in f.contradicted_by})
        if families[name] < STANDING and against:
            said += f"; {name} ruled out by {', '.join(against)}"
    if arm is not None:
        said += f"; next: {arm.how}"
    return said


def _split(seen: dict[str, Observation], share: tuple[float, float, float] | None) -> str:
    """How the loss divides between the two sides of the onset: no cause in the index keys acts up to it."""
    if share is not None:
        only = f"{percent(share[0])} % [{percent(share[1])}, {percent(share[2])}]"
        always = f"{percent(1 - share[0])} % [{percent(1 - share[2])}, {percent(1 - share[1])}]"
        return (
            f"{only} of the loss beyond the onset begins there, the most that index keys can account for, "
            f"and {always} is lost at every length, as by routed scaling"
        )
    if "growth" in seen:
        low, high = (seen["growth"].estimate + s * 1.96 * seen["growth"].stderr for s in (-1, 1))
        return (
            f"{percent(max(low, 0))} to {percent(max(high, 0))} % of recall is lost beyond the onset only, "
            "the most that index keys can account for"
        )
    return "without rungs on both sides of the onset, index keys and routed scaling cannot be told apart"
