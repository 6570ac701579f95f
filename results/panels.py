"""The tables of report.html: depth × length, outcomes, order, arms, provenance, numbers behind the charts."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, get_args

from longrecall.evals.attribute import STANDING, family_probabilities, loss_shown
from longrecall.evals.schema import MISSING, Comparison, CurvePoint, Observation, Outcome, Score
from longrecall.results import charts
from longrecall.results.flips import BASE, visible
from longrecall.results.schema import Campaign, Report
from longrecall.results.words import ROLE_WORDS, interval, p_text, short, signed
from longrecall.runners.schema import Arm, Build, Replay

DIFF_BYTES = 20_000


class Table(NamedTuple):
    """A plain table: heads, rows of text, and the columns that hold numbers."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int]


class Cell(NamedTuple):
    """A cell of a heat map or an outcome table."""

    text: str
    background: str = ""
    title: str = ""
    bar: float = 0.0


def heat_maps(report: Report, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Recall of the base by depth and length, and the difference of every other build."""
    counts: dict[str, dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for score in scores:
        if score.depth_pct is None or score.outcome in MISSING:
            continue
        cell = counts[score.build_id][min(4, int(score.depth_pct // 20)), score.rung]
        cell[0] += score.outcome == "ok"
        cell[1] += 1
    maps = []
    base = counts.get(BASE, {})
    bands = sorted({depth for depth, _ in base})
    for build in report.builds:
        own = counts.get(build.build_id, {})
        rows = []
        for depth in bands:
            cells = []
            for rung in report.rungs:
                right, n = own.get((depth, rung), (0, 0))
                base_right, base_n = base.get((depth, rung), (0, 0))
                where = f"{rung:,} tokens, depth {depth * 20}-{depth * 20 + 20} %"
                if not n or not base_n:
                    cells.append(Cell("·", "transparent", f"{where}: nothing planted here"))
                elif build.build_id == BASE:
                    share = right / n
                    cells.append(
                        Cell(f"{share * 100:.0f}", _tint("exonerated", share), f"{where}: {right} of {n} right")
                    )
                else:
                    change = right / n - base_right / base_n
                    tone = "culprit" if change < 0 else "exonerated"
                    cells.append(
                        Cell(
                            f"{change * 100:+.0f}".replace("-", "−") if round(change * 100) else "0",
                            _tint(tone, min(1.0, abs(change) * 1.4)),
                            f"{where}: {right} of {n} right, base {base_right} of {base_n}",
                        )
                    )
            rows.append({"head": f"{depth * 20}–{depth * 20 + 20} %", "cells": cells})
        title = "base, recall" if build.build_id == BASE else f"{build.build_id}, difference"
        maps.append({"title": title, "heads": [charts.tokens(r) for r in report.rungs], "rows": rows})
    return maps if bands else []


MAIN_SUSPECTS = ("index keys", "routed scaling")
"""Families that are listed however improbable they are."""


def cause_table(report: Report) -> Table:
    """Cause × (predicted, observed, in-process): of each patch that loses recall the families that still stand.

    A family's row shows its own probability, and name, probability and predictions of its likeliest cause.
    """
    rows = []
    for attribution in report.attributions:
        if not loss_shown(attribution.observations):
            continue
        seen = {o.feature: o for o in attribution.observations}
        families = family_probabilities(attribution.causes)
        shown = set()
        for fit in sorted(attribution.causes, key=lambda f: -f.probability):
            if fit.family in shown or (families[fit.family] < STANDING and fit.family not in MAIN_SUSPECTS):
                continue
            shown.add(fit.family)
            says = {name: level for name, level in fit.predicted.items() if level != "any"}
            rows.append(
                [
                    visible(attribution.patch, 60),
                    fit.family,
                    f"{families[fit.family]:.2f}",
                    fit.cause,
                    f"{fit.probability:.2f}",
                    ", ".join(f"{name} {level}" for name, level in says.items()) or "–",
                    _measured(seen[name] for name in says if seen[name].source == "served"),
                    _measured(seen[name] for name in says if seen[name].source == "in-process"),
                    ", ".join(fit.contradicted_by) or "–",
                ]
            )
    heads = ["Patch", "Family", "Probability of family", "Likeliest cause in it", "Probability of cause"]
    return Table([*heads, "Predicted", "Observed", "In-process", "Ruled out by"], rows, frozenset({2, 4}))


def _measured(observations: Iterable[Observation]) -> str:
    told = [f"{o.feature} {o.estimate:+.2f} ± {1.96 * o.stderr:.2f}" for o in observations]
    return ", ".join(told).replace("-", "−") or "–"


def _tint(tone: str, share: float) -> str:
    # at most 42 % of the tone over paper keeps ink on it above 4.5:1 in both themes (tests/results/test_report.py)
    return f"color-mix(in srgb, var(--{tone}) {round(42 * share)}%, var(--paper))"


def outcome_rows(report: Report, scores: Sequence[Score]) -> tuple[list[str], list[dict[str, Any]]]:
    """Counts of each outcome class that occurs, per build."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for score in scores:
        counts[score.build_id][score.outcome] += 1
    names = [name for name in get_args(Outcome) if any(c[name] for c in counts.values())]
    top = max((c[name] for c in counts.values() for name in names if name != "ok"), default=0) or 1
    rows = []
    for build in report.builds:
        cells = []
        for name in names:
            n = counts[build.build_id][name]
            bar = round(3.5 * n / top, 2) if name != "ok" and n else 0.0
            cells.append(Cell(f"{n:,}" if n else "–", bar=bar))
        rows.append({"build": build.build_id, "cells": cells})
    return names, rows


ORDER_HEADS = ("first fifth", "second", "third", "fourth", "last")


def order_shares(
    report: Report, scores: Sequence[Score], replays: Sequence[Replay]
) -> dict[str, tuple[float | None, ...]]:
    """Recall of each build in the first, second, … fifth part of the requests it was sent."""
    place = {(r.build_id, r.conversation_id, r.probe_id, r.rung, r.arm, r.repeat): r.send_order for r in replays}
    shares = {}
    for build in report.builds:
        own = sorted(
            (place[key], score.outcome == "ok")
            for score in scores
            if score.build_id == build.build_id and score.outcome not in MISSING
            for key in [(score.build_id, score.conversation_id, score.probe_id, score.rung, score.arm, score.repeat)]
            if key in place
        )
        if own:
            parts = [own[len(own) * i // 5 : len(own) * (i + 1) // 5] for i in range(5)]
            shares[build.build_id] = tuple(sum(ok for _, ok in p) / len(p) if p else None for p in parts)
    return shares


def order_table(shares: Mapping[str, Sequence[float | None]]) -> Table:
    """The same as a table."""
    rows = [[build, *map(charts.points, own)] for build, own in shares.items()]
    return Table(["Build", *ORDER_HEADS], rows, frozenset(range(1, 6)))


def arm_shares(report: Report, scores: Sequence[Score]) -> tuple[list[str], dict[str, tuple[float | None, ...]]]:
    """Arms in the order of their definition, and each build's recall in them over the lengths that every arm has."""
    held: dict[str, set[int]] = defaultdict(set)
    for score in scores:
        held[score.arm].add(score.rung)
    arms = [arm for arm in get_args(Arm) if arm in held]
    common = set.intersection(*held.values()) if held else set()
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for score in scores:
        if score.outcome not in MISSING and score.rung in common:
            cell = counts[score.build_id, score.arm]
            cell[0] += score.outcome == "ok"
            cell[1] += 1
    shares = {
        build.build_id: tuple(
            counts[build.build_id, arm][0] / n if (n := counts[build.build_id, arm][1]) else None for arm in arms
        )
        for build in report.builds
    }
    return arms, shares


def arm_table(report: Report, scores: Sequence[Score], replays: Sequence[Replay] = ()) -> Table:
    """Recall and the share of prompt tokens served from the prefix cache, by build, arm and length.

    "Cache as wanted": replies that took at least as much from it as the arm wants, of those where that is known.
    """
    cells: dict[tuple[str, str, int], list[Score]] = defaultdict(list)
    for score in scores:
        cells[score.build_id, score.arm, score.rung].append(score)
    wanted: dict[tuple[str, str, int], list[bool]] = defaultdict(list)
    for replay in replays:
        response = replay.response
        if response.cached_at_least is not None and response.cached_tokens is not None:
            enough = response.cached_tokens >= response.cached_at_least
            wanted[replay.build_id, replay.arm, replay.rung].append(enough)
    order = {b.build_id: i for i, b in enumerate(report.builds)}
    rows = []
    for place, group in sorted(cells.items(), key=lambda item: (order.get(item[0][0], 99), *item[0][1:])):
        build, arm, rung = place
        kept = [s for s in group if s.outcome not in MISSING]
        cached = [s.cached_tokens / s.context_tokens for s in group if s.cached_tokens is not None and s.context_tokens]
        met = wanted.get(place)
        rows.append(
            [
                build,
                arm,
                f"{rung:,}",
                f"{len(kept):,}",
                charts.points(sum(s.outcome == "ok" for s in kept) / len(kept)) if kept else "–",
                charts.points(sum(cached) / len(cached)) if cached else "not reported",
                f"{sum(met):,} of {len(met):,}" if met else "–",
            ]
        )
    heads = ["Build", "Arm", "Length", "Replies", "Recall, %", "From cache, %", "Cache as wanted"]
    return Table(heads, rows, frozenset({2, 3, 4, 5, 6}))


def flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as dotted names."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from flatten(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(data, list | tuple):
        yield prefix, shlex.join(str(item) for item in data)
    elif data is not None:
        yield prefix, str(data)


def manifest_of(build: Build) -> dict[str, str]:
    """A build's manifest as flat names and values."""
    return dict(flatten(asdict(build.manifest))) if build.manifest else {}


def provenance(report: Report, campaign: Campaign, diffs: Mapping[str, str]) -> tuple[list[dict[str, Any]], Table]:
    """What each build changes against the base, and what they all share."""
    flat = {b.build_id: manifest_of(b) for b in report.builds}
    base = flat.get(BASE, {})
    patches = {p.patch_id: p for p in campaign.patchset.patches}
    rows = []
    for build in report.builds:
        own = flat[build.build_id]
        changes = [
            {"field": name, "before": short(base.get(name, "")), "after": short(own.get(name, "absent"))}
            for name in sorted(set(base) | set(own))
            if build.build_id != BASE and base.get(name) != own.get(name)
        ]
        nothing = "–" if build.build_id == BASE else "nothing" if own else "no manifest was recorded"
        used = [p for name in build.patch_ids if name in patches for p in patches[name].diffs]
        rows.append(
            {
                "build": build.build_id,
                "role": ROLE_WORDS[build.role],
                "changes": changes,
                "nothing": nothing,
                "diffs": [(name, visible(diffs[name], DIFF_BYTES)) for name in used if name in diffs],
            }
        )
    common = [
        [name, visible(value, 400)]
        for name, value in sorted(base.items())
        if all(other.get(name) == value for other in flat.values() if other)
    ]
    return rows, Table(["Field", "Value"], common, frozenset())


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Every comparison with all its numbers."""
    heads = ["Patch", "Length", "Base, %", "Patch, %", "Difference", "95 % interval", "Bound (t)", "Bound (Tango)"]
    heads += ["p", "p, Holm", "p, sign-flip", "lost", "gained", "Conversations", "Probes", "Missing"]
    rows = [
        [
            c.candidate,
            "pooled" if c.rung is None else f"{c.rung:,}",
            charts.points(c.recall_baseline),
            charts.points(c.recall_candidate),
            signed(c.delta_recall),
            interval(c.ci_low, c.ci_high),
            signed(c.lower_bound_t),
            signed(c.lower_bound_tango),
            p_text(c.p_loss),
            p_text(c.p_loss_holm),
            p_text(c.p_loss_signflip),
            f"{c.lost:,}",
            f"{c.gained:,}",
            f"{c.n_conversations:,}",
            f"{c.n_probes:,}",
            f"{c.n_missing:,}",
        ]
        for c in comparisons
    ]
    return Table(heads, rows, frozenset(range(1, 16)))


def curve_table(curves: Sequence[CurvePoint]) -> Table:
    """Recall of each build at each rung."""
    rows = [
        [
            p.build,
            f"{p.rung:,}",
            charts.points(p.recall),
            interval(p.ci_low, p.ci_high, signed=False),
            f"{p.n_conversations:,}",
            f"{p.n_probes:,}",
        ]
        for p in curves
    ]
    return Table(
        ["Build", "Length", "Recall, %", "95 % interval", "Conversations", "Probes"], rows, frozenset(range(1, 6))
    )


def length_table(report: Report) -> Table:
    """L50 and the length at a threshold of every build; "beyond" where it lies outside the rungs."""

    def length(tokens: float | None, beyond: str | None) -> str:
        return f"{tokens:,.0f}" if tokens is not None else f"{beyond} than asked" if beyond else "–"

    def span(low: float | None, high: float | None) -> str:
        return f"[{low:,.0f}, {high:,.0f}]" if low is not None and high is not None else "–"

    rows = [
        [
            f.build,
            length(f.l50_tokens, f.l50_beyond),
            span(f.l50_ci_low, f.l50_ci_high),
            f"{f.threshold * 100:.1f}",
            length(f.threshold_tokens, f.threshold_beyond),
            span(f.threshold_ci_low, f.threshold_ci_high),
            f"{f.octaves:+.2f}".replace("-", "−") if f.octaves is not None else "–",
        ]
        for f in report.length_fits
    ]
    heads = [
        "Build",
        "L50, tokens",
        "95 % interval",
        "Threshold, %",
        "Length there",
        "95 % interval",
        "Octaves to base",
    ]
    return Table(heads, rows, frozenset(range(1, 7)))


def shift_table(report: Report) -> Table:
    """How much less likely the right answer became, and how many replies changed: secondary, never a verdict."""
    shifts = {(s.candidate, s.rung): s for s in report.logprob_shifts}
    rows = []
    for f in report.flips:
        s = shifts.get((f.candidate, f.rung))
        moved = f"{s.shift_nats:+.3f} [{s.ci_low:+.3f}, {s.ci_high:+.3f}]".replace("-", "−") if s else "not measured"
        rows.append(
            [
                f.candidate,
                f"{f.rung:,}",
                f"{f.lost:,}",
                f"{f.gained:,}",
                f"{f.n_identical:,} of {f.n_probes:,}",
                p_text(f.p_more_flips),
                moved,
                p_text(s.p_lower) if s else "–",
            ]
        )
    heads = [
        "Build",
        "Length",
        "lost",
        "gained",
        "same outcome",
        "p, more flips than A/A",
        "log P(gold), nats",
        "p, lower",
    ]
    return Table(heads, rows, frozenset(range(1, 8)))


def missing_table(report: Report) -> Table:
    """Planned, asked and missing replies per build."""
    names = sorted({name for m in report.missing for name in m.by_outcome})
    rows = [
        [m.build, f"{m.n_planned:,}", f"{m.n_asked:,}", *(f"{m.by_outcome.get(name, 0):,}" for name in names)]
        for m in report.missing
    ]
    return Table(["Build", "Planned", "Asked", *names], rows, frozenset(range(1, 3 + len(names))))
