"""trend.html: every line of builds over its commits, with noise bands, change points and what to do about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from longrecall.results import charts
from longrecall.results.history import Problem, Stored, called, short_commit
from longrecall.results.history_chart import SHOWN, change_text, history_chart, value_text
from longrecall.results.page import render
from longrecall.results.panels import Table
from longrecall.results.trend import Bridge, Paired, Trend, bisect_command
from longrecall.results.words import VERDICT_WORDS, anchor, interval, p_text, signed


@dataclass(frozen=True, kw_only=True)
class TrendData:
    """Everything the page shows."""

    trends: Sequence[Trend]
    paired: Sequence[Paired]
    bridges: Sequence[Bridge]
    problems: Sequence[Problem]
    baseline: str
    pinned: Stored | None
    store: str
    created: str
    version: str


def _section(trend: Trend, number: int, baseline: str) -> dict[str, Any]:
    shown = trend.entries[-SHOWN:]
    rows = [
        [
            called(stored),
            stored.entry.created[:16].replace("T", " "),
            *(value_text(one, one.values[len(trend.entries) - len(shown) + i]) for one in trend.series),
            stored.entry.verdict or "–",
        ]
        for i, stored in enumerate(shown)
    ]
    heads = ["Commit", "Time", *(one.label for one in trend.series), "Verdict"]
    changes = [
        {
            "what": one.label,
            "move": change_text(one, f),
            "tone": "culprit" if f.worse else "exonerated",
            "levels": f"{value_text(one, f.before)} → {value_text(one, f.after)}",
            "p": p_text(f.p_value) if f.p_value is not None else "by Otava",
            "range": f"{short_commit(f.last_good)} … {short_commit(f.first_bad)}",
            "when": f.created[:10],
            "tentative": f.tentative,
            "command": bisect_command(f, baseline) if f.worse else "",
        }
        for one in trend.series
        for f in reversed(one.found)
    ]
    return {
        "id": f"line-{number}-{anchor(trend.line)}",
        "line": trend.line,
        "suite": trend.suite_hash[:12],
        "count": len(trend.entries),
        "dropped": max(0, len(trend.entries) - SHOWN),
        "charts": [
            {"label": one.label, "svg": Markup(history_chart(one, trend.entries, key=f"h{number}-{i}"))}
            for i, one in enumerate(trend.series)
        ],
        "changes": changes,
        "table": Table(heads, rows, frozenset(range(2, len(heads) - 1))),
    }


def _curves(trend: Trend, pinned: Stored | None, key: str) -> Markup:
    """Recall against length: the newest point of a line over the pinned baseline, or over its own oldest."""
    newest = trend.entries[-1]
    base = pinned if pinned is not None and pinned.entry.suite_hash == trend.suite_hash else trend.entries[0]
    made = []
    first = "baseline" if base is pinned else "oldest"
    for stored, name, tone in ((base, first, "quiet"), (newest, "newest", "base")):
        entry = stored.entry
        made.append(
            charts.Series(
                label=f"{name} {called(stored, 10)}",
                tone=tone,
                dashed=tone == "quiet",
                points=tuple(
                    charts.Point(rung=p.rung, recall=p.recall, ci_low=p.ci_low, ci_high=p.ci_high) for p in entry.points
                ),
            )
        )
    rungs = sorted({p.rung for s in (base, newest) for p in s.entry.points})
    if not rungs:
        return Markup("")
    title = f"Recall against context length, line {trend.line}"
    return Markup(charts.recall_chart(made, rungs, key=key, title=title, onset=None, height=340))


def context(data: TrendData) -> dict[str, Any]:
    """Everything the template names."""
    sections = [_section(trend, i, data.baseline) for i, trend in enumerate(data.trends)]
    for i, (section, trend) in enumerate(zip(sections, data.trends, strict=True)):
        section["curve"] = _curves(trend, data.pinned, f"c{i}") if trend.entries else Markup("")
    headline = _headline(data)
    return {
        "title": f"{headline} · longrecall trend",
        "version": data.version,
        "created": data.created,
        "store": data.store,
        "headline": headline,
        "lede": _lede(data),
        "sections": sections,
        "paired": [
            {
                "line": p.line,
                "baseline": p.baseline,
                "candidate": p.candidate,
                "verdict": VERDICT_WORDS[p.verdict.verdict],
                "tone": charts.VERDICT_TONE[p.verdict.verdict],
                "reason": p.verdict.reason,
                "table": Table(
                    [
                        "Length",
                        "Baseline, %",
                        "Newest, %",
                        "Difference",
                        "95 % interval",
                        "p of a loss",
                        "lost",
                        "gained",
                    ],
                    [
                        [
                            "pooled" if c.rung is None else f"{c.rung:,}",
                            charts.points(c.recall_baseline),
                            charts.points(c.recall_candidate),
                            signed(c.delta_recall),
                            interval(c.ci_low, c.ci_high),
                            p_text(c.p_loss),
                            f"{c.lost:,}",
                            f"{c.gained:,}",
                        ]
                        for c in p.comparisons
                    ],
                    frozenset(range(8)),
                ),
            }
            for p in data.paired
        ],
        "bridges": [
            {
                "line": b.line,
                "commit": short_commit(b.commit),
                "suites": f"{b.before[:12]} → {b.after[:12]}",
                "offsets": ", ".join(f"{signed(v)} at {rung:,}" for rung, v in b.offsets.items()) or "no common length",
            }
            for b in data.bridges
        ],
        "problems": [p.message for p in data.problems],
        "baseline": data.baseline,
        "pinned": called(data.pinned) if data.pinned else "",
    }


def _headline(data: TrendData) -> str:
    """The paired test first, which sees a loss at once; then change points.

    A line whose last change is a fall has not recovered from it, however long ago that was.
    """
    if not data.trends:
        return "No run in this history yet"
    guilty = [p for p in data.paired if p.verdict.verdict == "culprit"]
    if len(guilty) == 1:
        lost = charts.points(-(guilty[0].verdict.delta_recall or 0.0))
        return f"Recall on {guilty[0].line} is {lost} points below the baseline"
    if guilty:
        return f"Recall is below the baseline on {' and '.join(p.line for p in guilty)}"
    newest_suite = {trend.line: trend.suite_hash for trend in reversed(data.trends)}
    fallen: dict[str, tuple[float, str]] = {}
    for trend in data.trends:
        for one in trend.series:
            last = one.found[-1] if one.found else None
            if last is not None and last.worse and one.rung is not None:
                fall = (last.after - last.before, short_commit(last.first_bad, 10))
                fallen[trend.line] = min(fall, fallen.get(trend.line, fall))
    if len(fallen) == 1:
        [(line, (move, commit))] = fallen.items()
        return f"Recall on {line} fell {charts.points(-move)} points at {commit}"
    if fallen:
        return f"Recall fell on {' and '.join(fallen) if len(fallen) == 2 else f'{len(fallen)} lines'}"
    if all(len(trend.entries) == 1 for trend in data.trends):
        return "One run so far"
    return f"Recall holds on {next(iter(newest_suite))}" if len(newest_suite) == 1 else "Recall holds on every line"


def _lede(data: TrendData) -> str:
    runs = len({s.entry.run_id for t in data.trends for s in t.entries})
    suites = len({t.suite_hash for t in data.trends})
    text = f"{runs:,} run{'s' * (runs != 1)} on {suites:,} suite{'s' * (suites != 1)}."
    pinned = f" Baseline {data.baseline} is {called(data.pinned)}." if data.pinned else ""
    return text + pinned


def trend_html(data: TrendData) -> str:
    """The whole trend.html."""
    return render("trend.html.jinja", context(data))
