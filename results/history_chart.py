"""Chart of one series over its commits: points, levels with their noise band, change points."""

from collections.abc import Sequence
from itertools import pairwise

from longrecall.results import charts
from longrecall.results.history import Stored, called, short_commit
from longrecall.results.trend import Found, Series
from longrecall.results.words import signed

SHOWN = 160
"""Newest points drawn: at 960 pixels more of them would touch."""


def value_text(one: Series, value: float | None) -> str:
    """A point as people read it: recall in percent, L50 in tokens."""
    if value is None:
        return "–"
    return charts.points(value) + " %" if one.rung is not None else f"{2**value:,.0f} tokens"


def change_text(one: Series, found: Found) -> str:
    """How large the move is."""
    move = found.after - found.before
    return f"{signed(move)} points" if one.rung is not None else f"{move:+.2f} octaves".replace("-", "−")


class _Plane:
    """Commits across at equal steps, the value up over a range that keeps a flat series flat."""

    def __init__(self, one: Series, values: Sequence[float | None], width: int, height: int) -> None:
        known = [v for v in values if v is not None]
        noise = one.noise or 0.0
        least = 0.12 if one.rung is not None else 1.0
        low, high = min(known) - noise, max(known) + noise
        pad = max(0.0, least - (high - low)) / 2 + 0.02 * (high - low)
        low, high = low - pad, high + pad
        if one.rung is not None:
            low, high = max(0.0, low), min(1.0, high)
        self.low, self.high, self.count = low, high, len(values)
        self.x0, self.x1, self.y0, self.y1 = 58, width - 118, height - 44, 26

    def x(self, i: float) -> float:
        if self.count < 2:
            return (self.x0 + self.x1) / 2
        return self.x0 + 8 + (self.x1 - self.x0 - 16) * i / (self.count - 1)

    def y(self, value: float) -> float:
        inside = min(self.high, max(self.low, value))
        return self.y0 + (self.y1 - self.y0) * (inside - self.low) / (self.high - self.low)


def _grid(one: Series, plane: _Plane) -> list[str]:
    out = []
    octaves = 0.5 if plane.high - plane.low < 3 else 1.0
    step = charts.nice_step(plane.high - plane.low, 5) if one.rung is not None else octaves
    n = int(plane.low / step) + 1
    while n * step <= plane.high:
        label = f"{n * step:.0%}" if one.rung is not None else charts.tokens(round(2 ** (n * step)))
        out.append(f'<path class="grid" d="M{plane.x0} {plane.y(n * step):.1f}H{plane.x1}"/>')
        out.append(charts.text(plane.x0 - 8, plane.y(n * step) + 4, label, "small muted", "end"))
        n += 1
    out.append(f'<path class="axis" d="M{plane.x0} {plane.y0}H{plane.x1}"/>')
    return out


def _levels(one: Series, values: Sequence[float | None], plane: _Plane, first: int) -> list[str]:
    out = []
    for a, b in pairwise([0, *(f.index - first for f in one.found if f.index > first), len(values)]):
        inside = [v for v in values[a:b] if v is not None]
        if not inside:
            continue
        level = sum(inside) / len(inside)
        left, right = plane.x(a) - 4, plane.x(b - 1) + 4
        if one.noise:
            top, bottom = plane.y(level + one.noise), plane.y(level - one.noise)
            box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
            out.append(f'<rect class="zone" {box}/>')
        out.append(f'<path class="ci s-quiet" d="M{left:.1f} {plane.y(level):.1f}H{right:.1f}"/>')
    return out


def _change_marks(one: Series, values: Sequence[float | None], plane: _Plane, first: int) -> list[str]:
    out = []
    for found in one.found:
        i = found.index - first
        value = values[i] if i >= 0 else None
        if value is None:
            continue
        tone = "culprit" if found.worse else "exonerated"
        words = (
            f"{change_text(one, found)} at {short_commit(found.first_bad, 10)}{', one run' if found.tentative else ''}"
        )
        fits = plane.x(i) < plane.x1 - 220
        out.append(f'<path class="onset" d="M{plane.x(i):.1f} {plane.y0}V{plane.y1}"/>')
        out.append(charts.mark(plane.x(i), plane.y(value), tone, 5, words))
        place, anchor = (plane.x(i) + 6, "start") if fits else (plane.x(i) - 6, "end")
        out.append(charts.text(place, plane.y1 - 8, words, f"small strong f-{tone}", anchor))
    return out


def history_chart(one: Series, entries: Sequence[Stored], *, key: str, width: int = 960, height: int = 250) -> str:
    """The newest `SHOWN` points of a series; "" when none was measured."""
    first = max(0, len(entries) - SHOWN)
    values = one.values[first:]
    drawn = [(i, v) for i, v in enumerate(values) if v is not None]
    if not drawn:
        return ""
    plane = _Plane(one, values, width, height)
    out = [*_grid(one, plane), *_levels(one, values, plane, first)]
    path = "L".join(f"{plane.x(i):.1f} {plane.y(v):.1f}" for i, v in drawn)
    out.append(f'<path class="line thin s-base" d="M{path}"/>')
    changed = {f.index - first for f in one.found}
    for i, v in drawn:
        if i not in changed:
            stored = entries[first + i]
            told = f"{called(stored)}, {stored.entry.created[:10]}: {value_text(one, v)}"
            out.append(charts.mark(plane.x(i), plane.y(v), "base", 2.6, told))
    out += _change_marks(one, values, plane, first)
    for i, align in ((0, "start"), (len(values) - 1, "end")):
        entry = entries[first + i].entry
        words = f"{entry.created[:10]}  {short_commit(entry.commit or '', 10)}"
        out.append(charts.text(plane.x(i), plane.y0 + 18, words, "small muted", align))
        if len(values) == 1:
            break
    newest = drawn[-1][1]
    out.append(charts.text(plane.x1 + 6, plane.y(newest) + 4, value_text(one, newest), "label small"))
    if one.noise:
        out.append(charts.text(plane.x1 + 6, plane.y(newest) + 20, f"noise ±{one.noise * 100:.1f}", "small muted"))
    told = f"{one.label}: newest {value_text(one, newest)}"
    told += "".join(f"; {change_text(one, f)} at {short_commit(f.first_bad)}" for f in one.found)
    return charts.frame(width, height, f"History of {one.label}", told, out, key)
