"""Charts as hand-written SVG: recall against context length, by part of a run and by arm, forest plot.

Why not altair + vl-convert: their SVG fixes its colours, so light and dark would need two copies of each chart, and it
carries no roles, titles or classes to style, focus or read aloud. These are 4-15 kB each, take their colours from the
page's CSS variables, name themselves to a screen reader and label their lines directly. vl-convert is kept for one
job: turning the same SVG into PNG (`png`).

Colour and marker both mean the verdict, everywhere: nothing is told by colour alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log2

LIGHT = {
    "paper": "#fdfcf9",
    "ink": "#1b1d21",
    "muted": "#5a6069",
    "rule": "#dcd8ce",
    "shade": "#ece8dd",
    "base": "#1b1d21",
    "quiet": "#686e77",
    "culprit": "#b5310b",
    "exonerated": "#00677a",
    "within": "#865700",
    "inconclusive": "#545a94",
    "control": "#7b3b8c",
}
DARK = {
    "paper": "#15171b",
    "ink": "#ebe9e3",
    "muted": "#a6abb3",
    "rule": "#363a42",
    "shade": "#24282f",
    "base": "#ebe9e3",
    "quiet": "#979da6",
    "culprit": "#ff8d69",
    "exonerated": "#5ccadb",
    "within": "#e8b653",
    "inconclusive": "#adb3f0",
    "control": "#d6a3e8",
}
TONES = ("base", "quiet", "culprit", "exonerated", "within", "inconclusive", "control")
VERDICT_TONE = {
    "culprit": "culprit",
    "exonerated": "exonerated",
    "within-margin": "within",
    "inconclusive": "inconclusive",
}

CHART_CSS = """
.chart text{font-family:var(--sans,system-ui,sans-serif);font-size:13px;fill:var(--ink)}
.chart text{font-variant-numeric:tabular-nums}
.chart .small{font-size:12px}.chart .muted{fill:var(--muted)}.chart .strong{font-weight:650}
.chart .grid{stroke:var(--rule);stroke-width:1;fill:none}.chart .axis{stroke:var(--muted);stroke-width:1;fill:none}
.chart .onset{stroke:var(--ink);stroke-width:1.25;stroke-dasharray:2 4;fill:none}
.chart .zone{fill:var(--shade)}.chart .zero{stroke:var(--ink);stroke-width:1.25}
.chart .line{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}.chart .thin{stroke-width:1.5}
.chart .dash{stroke-dasharray:7 5}.chart .band{opacity:.15;stroke:none}
.chart .lead{stroke-width:1;fill:none;opacity:.55}
.chart .mark{stroke:var(--paper);stroke-width:1.5}.chart .ci{stroke-width:2;fill:none}.chart .label{font-weight:600}
""" + "".join(f".chart .s-{t}{{stroke:var(--{t})}}.chart .f-{t}{{fill:var(--{t})}}" for t in TONES)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One estimate at one context length; recall and its interval are shares, None = not measured."""

    rung: int
    recall: float | None
    ci_low: float | None
    ci_high: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One build's line."""

    label: str
    tone: str
    points: tuple[Point, ...]
    dashed: bool = False
    band: bool = True


@dataclass(frozen=True, kw_only=True)
class ForestRow:
    """One difference with its interval, in shares; `bound` is the one-sided bound that an exoneration must clear."""

    label: str
    delta: float | None
    ci_low: float | None
    ci_high: float | None
    bound: float | None
    tone: str


@dataclass(frozen=True, kw_only=True)
class ForestGroup:
    """The rows of one patch."""

    label: str
    verdict: str
    tone: str
    rows: tuple[ForestRow, ...]


def tokens(n: int) -> str:
    """A context length as people write it: 448, 1K, 2.5K, 128K, 1M."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if n >= unit and n % (unit // 2) == 0:
            return f"{n / unit:g}{name}"
    return f"{n:,}"


def points(share: float | None, *, signed: bool = False) -> str:
    """A share in percentage points: 93.8, or with a true minus sign −12.5; an en dash when unknown."""
    if share is None:
        return "–"
    value = round(share * 100, 1) + 0.0  # + 0.0: no "-0.0"
    return f"{value:{'+' if signed and value else ''}.1f}".replace("-", "−")


def mark(x: float, y: float, tone: str, size: float = 4.6, title: str = "") -> str:
    """A data marker; its shape tells the tone: diamond culprit, square within margin, triangle inconclusive."""
    s = size
    d = s * 1.35
    shapes = {
        "culprit": f"M{x:.1f} {y - d:.1f}l{d:.1f} {d:.1f}l{-d:.1f} {d:.1f}l{-d:.1f} {-d:.1f}z",
        "within": f"M{x - s:.1f} {y - s:.1f}h{2 * s:.1f}v{2 * s:.1f}h{-2 * s:.1f}z",
        "inconclusive": f"M{x:.1f} {y - s * 1.2:.1f}l{s * 1.2:.1f} {s * 2.1:.1f}h{-s * 2.4:.1f}z",
    }
    inner = f"<title>{escape(title)}</title>" if title else ""
    if tone in shapes:
        return f'<path class="mark f-{tone}" d="{shapes[tone]}">{inner}</path>'
    return f'<circle class="mark f-{tone}" cx="{x:.1f}" cy="{y:.1f}" r="{s}">{inner}</circle>'


def text(x: float, y: float, words: str, style: str = "small", anchor: str = "start") -> str:
    """A text element; `style` names classes of CHART_CSS."""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{place}>{escape(words)}</text>'


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Label heights nearest to `wanted` in least squares that keep `gap` between neighbours, inside [low, high]."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, int]] = []  # (mean of wanted minus the room used so far, number of labels)
    for place, i in enumerate(order):
        mean, count = wanted[i] - place * gap, 1
        while blocks and blocks[-1][0] > mean:  # pool adjacent violators
            other, n = blocks.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        blocks.append((mean, count))
    placed = [mean for mean, count in blocks for _ in range(count)]
    room = high - low - (len(order) - 1) * gap
    result = [0.0] * len(wanted)
    for place, i in enumerate(order):
        result[i] = min(max(placed[place], low), low + max(room, 0.0)) + place * gap
    return result


def frame(width: int, height: int, title: str, description: str, body: Sequence[str], key: str) -> str:
    """The SVG element with its name and description for screen readers; `key` keeps ids unique in a page."""
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' aria-labelledby="{key}-t {key}-d" preserveAspectRatio="xMidYMid meet">'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>'
        f"{''.join(body)}</svg>"
    )


class Axes:
    """Context length on a log scale across, recall 0-100 % up, in a box of the given size."""

    def __init__(self, rungs: Sequence[int], *, width: int, height: int, labels: bool) -> None:
        left, right, top, bottom = (58, 214, 34, 52) if labels else (44, 16, 22, 42)
        self.labels = labels
        self.rungs = rungs
        self.x0, self.x1, self.y0, self.y1 = left, width - right, height - bottom, top
        self._low, high = log2(min(rungs)), log2(max(rungs))
        self._span = high - self._low
        self._pad = 14 if labels else 10

    def x(self, rung: float) -> float:
        if not self._span:
            return (self.x0 + self.x1) / 2
        return self.x0 + self._pad + (log2(rung) - self._low) / self._span * (self.x1 - self.x0 - 2 * self._pad)

    def y(self, share: float) -> float:
        return self.y0 + (self.y1 - self.y0) * share

    def grid(self) -> list[str]:
        """Lines and labels of recall."""
        out = []
        for step in (0, 0.25, 0.5, 0.75, 1) if self.labels else (0, 0.5, 1):
            out.append(f'<path class="{"grid" if step else "axis"}" d="M{self.x0} {self.y(step):.1f}H{self.x1}"/>')
            out.append(text(self.x0 - 8, self.y(step) + 4, f"{step:.0%}", "small muted", "end"))
        if self.labels:
            out.append(text(self.x0, self.y1 - 16, "recall", "small muted"))
        return out

    def draw(self, onset: int | None) -> list[str]:
        """Grid, ticks and the onset line."""
        out = self.grid()
        last = -99.0
        for rung in self.rungs:
            out.append(f'<path class="axis" d="M{self.x(rung):.1f} {self.y0}v5"/>')
            if self.x(rung) - last > 34:  # closer labels would touch
                out.append(text(self.x(rung), self.y0 + 20, tokens(rung), anchor="middle"))
                last = self.x(rung)
        if self.labels:
            out.append(text((self.x0 + self.x1) / 2, self.y0 + 42, "context length, tokens", "small muted", "middle"))
        if onset is not None and min(self.rungs) <= onset <= max(self.rungs):
            out.append(f'<path class="onset" d="M{self.x(onset):.1f} {self.y0}V{self.y1 - 8}"/>')
            if self.labels:
                told = f"selection begins: past {onset:,} tokens the top-k leaves some out"
                after = self.x(onset) + 6 < (self.x0 + self.x1) / 2
                out.append(
                    text(self.x(onset) + (6 if after else -6), self.y1 - 16, told, anchor="start" if after else "end")
                )
        return out


def _band(axes: Axes, one: Series) -> str:
    ranged = [(p.rung, p.ci_low, p.ci_high) for p in one.points if p.ci_low is not None and p.ci_high is not None]
    if not one.band or not ranged:
        return ""
    if len(ranged) == 1:
        rung, low, high = ranged[0]
        return f'<path class="ci s-{one.tone}" d="M{axes.x(rung):.1f} {axes.y(low):.1f}V{axes.y(high):.1f}"/>'
    upper = " ".join(f"{axes.x(rung):.1f},{axes.y(high):.1f}" for rung, _, high in ranged)
    lower = " ".join(f"{axes.x(rung):.1f},{axes.y(low):.1f}" for rung, low, _ in reversed(ranged))
    return f'<polygon class="band f-{one.tone}" points="{upper} {lower}"/>'


def recall_chart(
    series: Sequence[Series],
    rungs: Sequence[int],
    *,
    key: str,
    title: str,
    onset: int | None,
    width: int = 960,
    height: int = 430,
    labels: bool = True,
) -> str:
    """Recall (0-100 %) against context length on a log scale, bands for intervals, the onset of selection marked."""
    axes = Axes(rungs, width=width, height=height, labels=labels)
    bands, lines, marks, ends = [], [], [], []
    for one in series:
        known = [(p.rung, p.recall, p) for p in one.points if p.recall is not None]
        if not known:
            continue
        bands.append(_band(axes, one))
        path = "L".join(f"{axes.x(rung):.1f} {axes.y(recall):.1f}" for rung, recall, _ in known)
        lines.append(f'<path class="line{" dash" if one.dashed else ""} s-{one.tone}" d="M{path}"/>')
        for rung, recall, p in known:
            told = f"{one.label}, {rung:,} tokens: recall {points(recall)} %"
            told += f" [{points(p.ci_low)}, {points(p.ci_high)}] {p.note}"
            marks.append(mark(axes.x(rung), axes.y(recall), one.tone, 4.6 if labels else 3.6, told))
        ends.append((one, axes.x(known[-1][0]), axes.y(known[-1][1])))
    out = [*axes.draw(onset), *bands, *lines, *marks]
    if labels:
        out += end_labels(axes, ends)
    told = "; ".join(
        f"{one.label}: " + ", ".join(f"{points(p.recall)} % at {p.rung:,}" for p in one.points) for one in series
    )
    return frame(width, height, title, told, out, key)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One build's recall at each of a few named places; None = not measured."""

    label: str
    tone: str
    shares: tuple[float | None, ...]
    dashed: bool = False


def steps_chart(
    series: Sequence[Steps], heads: Sequence[str], *, key: str, title: str, axis: str, width: int = 960
) -> str:
    """Recall (0-100 %) at named places side by side: parts of a run, arms of the cache."""
    height = max(300, 90 + 17 * len(series))
    axes = Axes([1], width=width, height=height, labels=True)
    across = (axes.x1 - axes.x0) / len(heads)

    def x(place: int) -> float:
        return axes.x0 + (place + 0.5) * across

    out = axes.grid()
    for place, head in enumerate(heads):
        out.append(f'<path class="axis" d="M{x(place):.1f} {axes.y0}v5"/>')
        out.append(text(x(place), axes.y0 + 20, head, anchor="middle"))
    out.append(text((axes.x0 + axes.x1) / 2, axes.y0 + 42, axis, "small muted", "middle"))
    lines, marks, ends = [], [], []
    for one in series:
        known = [(x(place), axes.y(share), share, heads[place])
                 for place, share in enumerate(one.shares) if share is not None]  # fmt: skip
        if not known:
            continue
        path = "L".join(f"{at:.1f} {up:.1f}" for at, up, _, _ in known)
        lines.append(f'<path class="line thin{" dash" if one.dashed else ""} s-{one.tone}" d="M{path}"/>')
        marks += [
            mark(at, up, one.tone, 4.2, f"{one.label}, {head}: {points(share)} %") for at, up, share, head in known
        ]
        ends.append((one, known[-1][0], known[-1][1]))
    out += [*lines, *marks, *end_labels(axes, ends)]
    told = "; ".join(
        f"{one.label}: " + ", ".join(f"{points(share)} % {head}" for head, share in zip(heads, one.shares, strict=True))
        for one in series
    )
    return frame(width, height, title, told, out, key)


def end_labels(axes: Axes, ends: Sequence[tuple[Series | Steps, float, float]]) -> list[str]:
    """The name of each line at its end, none on another."""
    out = []
    for (one, x, y), at in zip(ends, spread([end[2] for end in ends], 17, axes.y1, axes.y0), strict=True):
        out.append(f'<path class="lead s-{one.tone}" d="M{x + 8:.1f} {y:.1f}L{axes.x1 + 8} {at:.1f}"/>')
        out.append(text(axes.x1 + 12, at + 4, one.label, f"label small f-{one.tone}"))
    return out


def nice_step(span: float, wanted: int = 8) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts `span` into about `wanted` parts."""
    step = 0.01
    while span / step > wanted:
        step *= 2 if f"{step:.0e}"[0] in "15" else 2.5
    return step


def forest_chart(groups: Sequence[ForestGroup], margin: float, *, key: str, title: str, width: int = 960) -> str:
    """Difference of recall per patch and rung with its 95 % interval, margin shaded, bracket at the one-sided bound."""
    rows = [row for group in groups for row in group.rows]
    ends = [v for row in rows for v in (row.ci_low, row.ci_high, row.delta, row.bound) if v is not None]
    reach_low = min([-margin * 1.6, *ends]) - 0.01
    reach_high = max([margin * 1.6, *ends]) + 0.01
    left, right, top, row_height, head = 196, 232, 44, 24, 32
    height = top + sum(head + row_height * len(group.rows) + 8 for group in groups) + 50
    x0, x1, bottom = left, width - right, height - 46

    def x(share: float) -> float:
        return x0 + (share - reach_low) / (reach_high - reach_low) * (x1 - x0)

    zone = f'x="{x(-margin):.1f}" y="{top - 14}" width="{x(margin) - x(-margin):.1f}" height="{bottom - top + 14}"'
    out = [f'<rect class="zone" {zone}/>']
    step = nice_step(reach_high - reach_low)
    for n in range(-int(-reach_low / step), int(reach_high / step) + 1):
        percent = round(n * step * 100)
        out.append(f'<path class="grid" d="M{x(n * step):.1f} {bottom}v6"/>')
        label = f"{percent:+d}".replace("-", "−") if percent else "0"
        out.append(text(x(n * step), bottom + 20, label, "small muted", "middle"))
    out += [
        f'<path class="axis" d="M{x0} {bottom}H{x1}"/><path class="zero" d="M{x(0):.1f} {bottom}V{top - 14}"/>',
        text(x(0) - 10, bottom + 40, "← loses recall (points)", "small muted", "end"),
        text(x(0) + 10, bottom + 40, "gains recall →", "small muted"),
        text(x(0), top - 22, f"margin ±{margin * 100:g}", "small muted", "middle"),
        text(x1 + 16, top - 22, "difference, 95 % interval", "small muted"),
    ]
    at: float = top
    for group in groups:
        out.append(mark(10, at + 14, group.tone, 5))
        out.append(text(22, at + 19, group.label, "strong"))
        out.append(text(x1 + 16, at + 19, group.verdict, f"small strong f-{group.tone}"))
        at += head
        for row in group.rows:
            y = at + row_height / 2
            out.append(text(x0 - 18, y + 4, row.label, anchor="end"))
            if row.ci_low is not None and row.ci_high is not None:
                out.append(f'<path class="ci s-{row.tone}" d="M{x(row.ci_low):.1f} {y:.1f}H{x(row.ci_high):.1f}"/>')
            if row.bound is not None:
                out.append(f'<path class="ci s-{row.tone}" d="M{x(row.bound) + 4:.1f} {y - 6:.1f}h-4v12h4"/>')
            value = points(row.delta, signed=True)
            if row.delta is not None:
                out.append(mark(x(row.delta), y, row.tone, 4.4, f"{group.label}, {row.label}: {value} points"))
            span = f"[{points(row.ci_low, signed=True)}, {points(row.ci_high, signed=True)}]"
            out.append(text(x1 + 16, y + 4, f"{value}  {span if row.ci_low is not None else ''}"))
            at += row_height
        at += 8
    told = "; ".join(
        f"{g.label} ({g.verdict}): " + ", ".join(f"{points(r.delta, signed=True)} points at {r.label}" for r in g.rows)
        for g in groups
    )
    return frame(width, height, title, told, out, key)


def standalone(svg: str, palette: dict[str, str] | None = None) -> str:
    """The same chart as a file of its own: colours written out, paper behind it."""
    colours = LIGHT if palette is None else palette
    css = CHART_CSS
    for name, colour in colours.items():
        css = css.replace(f"var(--{name})", colour)
    css = css.replace("var(--sans,system-ui,sans-serif)", "Inter,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif")
    head, rest = svg.split(">", 1)
    return f'{head}><style>{css}</style><rect width="100%" height="100%" fill="{colours["paper"]}"/>{rest}\n'


def png(svg: str, scale: float = 2.0) -> bytes:
    """A standalone chart as PNG."""
    import vl_convert

    return bytes(vl_convert.svg_to_png(svg, scale=scale))
