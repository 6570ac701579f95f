"""Trend of recall against context length: a series per suite, build line and length, and one for L50.

Series come from manifests alone. Beside change points stands the paired test of the newest point against the pinned
baseline, which needs probe rows and sees less than one series of means can. The A/A differences of the same history
are the noise floor: a move inside it is nothing.
"""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log2
from pathlib import Path

import numpy as np

from longrecall.evals.schema import Comparison, Verdict
from longrecall.needles.collection import no_collection
from longrecall.results.changes import Change, change_points
from longrecall.results.history import Stored
from longrecall.results.otava import OtavaSeries, analyze, series_name
from longrecall.results.thresholds import Thresholds

L50_MAGNITUDE_OCTAVES = 0.25
"""Smallest move of L50 that is a point: a quarter octave, about what 40 conversations can tell."""
NOISE_QUANTILE = 0.95


@dataclass(frozen=True, kw_only=True)
class Found:
    """A change point in words a person can act on."""

    index: int
    """Place in the series; the change is between the point before it and this one."""
    before: float
    after: float
    p_value: float | None
    """None when Otava found it."""
    n_after: int
    last_good: str
    first_bad: str
    """Commits (or run ids) on the two sides: the range to look in is (last_good, first_bad]."""
    created: str
    worse: bool
    by: str

    @property
    def tentative(self) -> bool:
        """Rests on one measurement: run it again before anyone is called."""
        return self.n_after == 1


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the entries of a trend. Recall in shares, L50 in log2 tokens; None = not measured."""

    metric: str
    label: str
    rung: int | None
    values: tuple[float | None, ...]
    lows: tuple[float | None, ...]
    highs: tuple[float | None, ...]
    noise: float | None
    """Largest |A/A difference| to expect (95th percentile of the history); None without A/A runs."""
    found: tuple[Found, ...]


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One line of builds on one suite."""

    suite_hash: str
    line: str
    entries: tuple[Stored, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """Both suites measured on one commit: what changing the suite did to the numbers."""

    line: str
    commit: str
    before: str
    after: str
    offsets: dict[int, float]
    """Rung → recall on the newer suite minus the older."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """The newest point of a line against the pinned baseline, by probe."""

    line: str
    baseline: str
    candidate: str
    verdict: Verdict
    comparisons: tuple[Comparison, ...]


def where(stored: Stored) -> str:
    """The commit of an entry, or its run where no commit is known."""
    return stored.entry.commit or stored.entry.run_id


def group(entries: Sequence[Stored]) -> dict[tuple[str, str], list[Stored]]:
    """Entries by (suite, line), each in time order; one point per run, the first written where two claim it."""
    groups: dict[tuple[str, str], list[Stored]] = defaultdict(list)
    seen = set()
    for stored in entries:
        key = (stored.entry.run_id, stored.entry.build_id)
        if key not in seen:
            seen.add(key)
            groups[stored.entry.suite_hash, stored.entry.line].append(stored)
    return groups


def trends(
    entries: Sequence[Stored], thresholds: Thresholds, *, last: int = 2000, otava: Path | None = None
) -> list[Trend]:
    """A trend per suite and line, those of base builds first, then the longest.

    last: newest entries that are looked at.
    otava: its executable, to find the change points instead of results/changes.py.
    """
    with no_collection():
        made = [
            Trend(
                suite_hash=suite, line=line, entries=tuple(own[-last:]), series=tuple(_series(own[-last:], thresholds))
            )
            for (suite, line), own in group(entries).items()
        ]
    made.sort(key=lambda trend: (trend.entries[-1].entry.role != "base", -len(trend.entries), trend.line))
    return [_by_otava(trend, otava, thresholds) for trend in made] if otava else made


def _series(own: Sequence[Stored], thresholds: Thresholds) -> list[Series]:
    made = []
    by_rung = [{p.rung: p for p in s.entry.points} for s in own]
    noise_at: dict[int, list[float]] = defaultdict(list)
    for s in own:
        for aa in s.entry.noise:
            if aa.delta is not None:
                noise_at[aa.rung].append(abs(aa.delta))
    for rung in sorted(set().union(*by_rung)):
        points = [by.get(rung) for by in by_rung]
        noise = noise_at[rung]
        values = tuple(p.recall if p else None for p in points)
        made.append(
            Series(
                metric=f"recall_{rung}",
                label=f"{rung:,} tokens",
                rung=rung,
                values=values,
                lows=tuple(p.ci_low if p else None for p in points),
                highs=tuple(p.ci_high if p else None for p in points),
                noise=float(np.quantile(noise, NOISE_QUANTILE)) if noise else None,
                found=_found(own, values, thresholds, thresholds.min_magnitude),
            )
        )
    lengths = [(s.entry.l50_tokens, s.entry.l50_low, s.entry.l50_high) for s in own]
    if any(length for length, _, _ in lengths):
        values, lows, highs = (tuple(log2(v) if v else None for v in column) for column in zip(*lengths, strict=True))
        made.append(
            Series(
                metric="log2_l50",
                label="L50",
                rung=None,
                values=values,
                lows=lows,
                highs=highs,
                noise=None,
                found=_found(own, values, thresholds, L50_MAGNITUDE_OCTAVES),
            )
        )
    return made


def _found(
    own: Sequence[Stored], values: Sequence[float | None], thresholds: Thresholds, min_magnitude: float
) -> tuple[Found, ...]:
    changes = change_points(
        values,
        window_len=thresholds.window_len,
        max_pvalue=thresholds.max_pvalue,
        min_magnitude=min_magnitude,
    )
    return tuple(_describe(own, values, c, by="changes") for c in changes)


def _describe(own: Sequence[Stored], values: Sequence[float | None], change: Change, *, by: str) -> Found:
    before = max(i for i in range(change.index) if values[i] is not None)
    return Found(
        index=change.index,
        before=change.mean_before,
        after=change.mean_after,
        p_value=change.p_value if by == "changes" else None,
        n_after=change.n_after,
        last_good=where(own[before]),
        first_bad=where(own[change.index]),
        created=own[change.index].entry.created,
        worse=change.mean_after < change.mean_before,
        by=by,
    )


def otava_series(trend: Trend) -> list[OtavaSeries]:
    """The trend as Otava takes it."""
    return [
        OtavaSeries(
            name=series_name(one.metric, trend.line, trend.suite_hash),
            times=tuple(s.entry.created for s in trend.entries),
            commits=tuple(where(s) for s in trend.entries),
            values=one.values,
        )
        for one in trend.series
    ]


def _by_otava(trend: Trend, executable: Path, thresholds: Thresholds) -> Trend:
    given = otava_series(trend)
    answer = analyze(executable, given, max_pvalue=thresholds.max_pvalue, window_len=thresholds.window_len)
    made = []
    for one, name in zip(trend.series, (g.name for g in given), strict=True):
        edges = [0, *answer[name], len(one.values)]
        found = []
        for a, at, b in zip(edges, edges[1:], edges[2:], strict=False):
            left = [v for v in one.values[a:at] if v is not None]
            right = [v for v in one.values[at:b] if v is not None]
            change = Change(
                index=at,
                mean_before=float(np.mean(left)),
                mean_after=float(np.mean(right)),
                p_value=0.0,
                n_before=len(left),
                n_after=len(right),
            )
            least = thresholds.min_magnitude if one.rung is not None else L50_MAGNITUDE_OCTAVES
            if change.magnitude >= least:
                found.append(_describe(trend.entries, one.values, change, by="otava"))
        made.append(replace(one, found=tuple(found)))
    return replace(trend, series=tuple(made))


def bridges(entries: Sequence[Stored]) -> list[Bridge]:
    """Commits of one line that were measured on two suites."""
    by_commit: dict[tuple[str, str], list[Stored]] = defaultdict(list)
    for stored in entries:
        if stored.entry.commit:
            by_commit[stored.entry.line, stored.entry.commit].append(stored)
    first_seen: dict[str, int] = {}
    for i, stored in enumerate(entries):
        first_seen.setdefault(stored.entry.suite_hash, i)
    found = []
    for (line, commit), own in by_commit.items():
        suites = sorted({s.entry.suite_hash for s in own}, key=lambda suite: first_seen[suite])
        for before, after in pairwise(suites):
            old, new = (
                {p.rung: p.recall for s in own if s.entry.suite_hash == suite for p in s.entry.points}
                for suite in (before, after)
            )
            offsets = {
                rung: b - a
                for rung in sorted(set(old) & set(new))
                for a, b in [(old[rung], new[rung])]
                if a is not None and b is not None
            }
            found.append(Bridge(line=line, commit=commit, before=before, after=after, offsets=offsets))
    return found


def bisect_command(found: Found, baseline: str) -> str:
    """What to type to find the commit inside the range; exit codes 2-4 of the gate mean "cannot tell" to git."""
    gate = f"longrecall gate --baseline {shlex.quote(baseline)} --fail-on culprit"
    body = f"longrecall eval PATCHSET; {gate}; c=$?; [ $c -le 1 ] && exit $c || exit 125"
    bounds = " ".join(shlex.quote(commit.removesuffix("+")) for commit in (found.first_bad, found.last_good))
    return f"git bisect start {bounds} && git bisect run sh -c {shlex.quote(body)}"
