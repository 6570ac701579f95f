"""report.html: one self-contained page, readable offline, without scripts, by keyboard and in the dark.

The template does the layout; this module turns records into the words, tables and charts that it places. Everything
that came from a model, a dataset or a patch file is escaped by the template engine and made visible beforehand
(flips.visible); a content security policy allows the page's own script by its hash and nothing else.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from longrecall.evals.schema import Score
from longrecall.results import charts
from longrecall.results.flips import BASE, Flip
from longrecall.results.panels import (
    DIFF_BYTES,
    ORDER_HEADS,
    Table,
    arm_shares,
    arm_table,
    cause_table,
    comparison_table,
    curve_table,
    heat_maps,
    length_table,
    missing_table,
    order_shares,
    order_table,
    outcome_rows,
    provenance,
    shift_table,
)
from longrecall.results.schema import Campaign, Report
from longrecall.results.words import (
    ROLE_WORDS,
    VERDICT_WORDS,
    anchor,
    commands,
    comparisons_of,
    engine_lacks,
    headline,
    interval,
    lede,
    ordered_verdicts,
    p_text,
    signed,
    tone_of,
    word_of,
)
from longrecall.runners.schema import Replay

FLIP_BYTES = 2_300_000
"""Room for flips in the page; the rest stays in flips.jsonl (exported pages with all data inline crash browsers)."""


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything the page shows."""

    report: Report
    campaign: Campaign
    scores: Sequence[Score]
    replays: Sequence[Replay]
    flips: Mapping[str, Sequence[Flip]]
    diffs: Mapping[str, str]
    """Patch file name → its text, where it could be read."""
    version: str


def series(report: Report, build_id: str, *, band: bool, tone: str | None = None) -> charts.Series:
    """One build's curve as the chart takes it."""
    return charts.Series(
        label=build_id,
        tone=tone or tone_of(report, build_id),
        dashed=(tone or tone_of(report, build_id)) in ("quiet", "control"),
        band=band,
        points=tuple(
            charts.Point(
                rung=p.rung,
                recall=p.recall,
                ci_low=p.ci_low,
                ci_high=p.ci_high,
                note=f"({p.n_probes:,} probes in {p.n_conversations:,} conversations)",
            )
            for p in sorted(report.curves, key=lambda p: p.rung)
            if p.build == build_id
        ),
    )


def chart_set(data: RunData) -> dict[str, str]:
    """Every chart of the page by name, as SVG that takes its colours from the page."""
    report = data.report
    found = {}
    ids = [b.build_id for b in report.builds]
    if report.curves:
        strong = {"base", "culprit", "within", "inconclusive"}
        # the base last, so that its line lies on top of those it coincides with
        drawn = sorted(ids, key=lambda b: (b == BASE, tone_of(report, b) == "culprit"))
        found["recall"] = charts.recall_chart(
            [series(report, b, band=tone_of(report, b) in strong) for b in drawn],
            report.rungs,
            key="recall",
            title="Recall against context length, every build",
            onset=report.onset_tokens,
        )
        for number, build in enumerate(b for b in ids if b != BASE):
            found[f"recall-{build}"] = charts.recall_chart(
                [series(report, BASE, band=True), series(report, build, band=True)],
                report.rungs,
                key=f"m{number}",
                title=f"Recall against context length, base and {build}",
                onset=report.onset_tokens,
                width=330,
                height=210,
                labels=False,
            )
    groups = tuple(
        charts.ForestGroup(
            label=b,
            verdict=word_of(report, b),
            tone=tone_of(report, b),
            rows=tuple(
                charts.ForestRow(
                    label="pooled" if c.rung is None else f"{c.rung:,}",
                    delta=c.delta_recall,
                    ci_low=c.ci_low,
                    ci_high=c.ci_high,
                    bound=min((v for v in (c.lower_bound_t, c.lower_bound_tango) if v is not None), default=None),
                    tone=tone_of(report, b),
                )
                for c in comparisons_of(report, b)
            ),
        )
        for b in ids
        if b != BASE and comparisons_of(report, b)
    )
    if groups:
        found["differences"] = charts.forest_chart(
            groups, report.verdict_config.margin, key="forest", title="Difference of recall, patch minus base"
        )
    parts = order_shares(report, data.scores, data.replays)
    if parts:
        found["order"] = charts.steps_chart(
            _steps(report, parts),
            ORDER_HEADS,
            key="order",
            title="Recall by order of sending, every build",
            axis="part of the requests, in order of sending",
        )
    arms, by_arm = arm_shares(report, data.scores)
    if len(arms) > 1:
        found["arms"] = charts.steps_chart(
            _steps(report, by_arm),
            arms,
            key="arms",
            title="Recall by arm of the prefix cache, every build",
            axis="how the prompt met the server's cache",
        )
    return found


def _steps(report: Report, shares: Mapping[str, Sequence[float | None]]) -> list[charts.Steps]:
    tones = {build: tone_of(report, build) for build in shares}
    return [
        charts.Steps(label=build, tone=tones[build], shares=tuple(own), dashed=tones[build] in ("quiet", "control"))
        for build, own in shares.items()
    ]


def pick_flips(flips: Mapping[str, Sequence[Flip]], room: int) -> tuple[dict[str, list[Flip]], int, int]:
    """As many flips as fit in `room` bytes, taken from every build in turn; with the numbers shown and found."""
    left = {build: list(own) for build, own in flips.items()}
    shown: dict[str, list[Flip]] = {build: [] for build in flips}
    total = sum(len(own) for own in flips.values())
    used = 0
    while any(left.values()):
        for build, own in left.items():
            if not own:
                continue
            # measured on the template: the markup adds about 380 bytes to a flip and 310 to each reply row
            text = str(escape(json.dumps(asdict(own[0]), ensure_ascii=False)))
            cost = len(text.encode()) + 380 + 310 * len(own[0].replies)
            if used + cost > room:
                return shown, sum(len(s) for s in shown.values()), total
            used += cost
            shown[build].append(own.pop(0))
    return shown, total, total


def flip_groups(data: RunData, shown: Mapping[str, Sequence[Flip]]) -> list[dict[str, Any]]:
    """The flips section: a group per build."""
    groups = []
    for build in sorted(data.report.builds, key=lambda build: build.role != "suspect"):
        if build.build_id == BASE:
            continue
        own = data.flips.get(build.build_id, ())
        replies = [reply for flip in own for reply in flip.replies]
        lost = sum(r.direction == "lost" for r in replies)
        summary = (
            f"{lost:,} lost and {len(replies) - lost:,} gained, on {len(own):,} probe{'s' * (len(own) > 1)}."
            if replies
            else "No flip: right and wrong on exactly the same probes."
        )
        listed = shown.get(build.build_id, ())
        if len(listed) < len(own):
            summary += f" {len(listed):,} probes shown here, all of them in flips.jsonl."
        groups.append(
            {
                "build": build.build_id,
                "anchor": anchor(build.build_id),
                "tone": tone_of(data.report, build.build_id),
                "verdict": word_of(data.report, build.build_id),
                "summary": summary,
                "outcomes": sorted({o for r in replies for o in (r.base_outcome, r.candidate_outcome)} - {"ok"}),
                "flips": [_flip_view(flip) for flip in listed],
            }
        )
    return groups


def _flip_view(flip: Flip) -> dict[str, Any]:
    directions = sorted({r.direction for r in flip.replies}, reverse=True)
    rungs = sorted({r.rung for r in flip.replies})
    last = flip.replies[-1]
    depth = f", depth {last.depth_pct:.0f} %" if last.depth_pct is not None else ""
    return {
        **{name: getattr(flip, name) for name in ("flip_id", "conversation_id", "probe_id", "window", "fact_turn")},
        "question": flip.question or flip.probe_id,
        "gold": flip.gold,
        "answer_prefix": flip.answer_prefix,
        "directions": " ".join(directions),
        "rungs": " ".join(str(r) for r in rungs),
        "outcomes": " ".join(sorted({o for r in flip.replies for o in (r.base_outcome, r.candidate_outcome)})),
        "at": f"{' and '.join(directions)} at {', '.join(f'{r:,}' for r in rungs)}{depth}",
        "replies": [
            {
                **asdict(r),
                "where": f"{r.rung:,}"
                + (f" · {r.arm}" if len({x.arm for x in flip.replies}) > 1 else "")
                + (f" · repeat {r.repeat}" if len({x.repeat for x in flip.replies}) > 1 else ""),
            }
            for r in flip.replies
        ],
    }


def verdict_rows(data: RunData) -> list[dict[str, Any]]:
    """The verdict table: suspects first, culprits on top, controls below."""
    report = data.report
    patches = {p.patch_id: p for p in data.campaign.patchset.patches}
    rows = []
    roles = {b.build_id: b.role for b in report.builds}
    for v in ordered_verdicts(report):
        patch = patches.get(v.patch)
        role = roles.get(v.patch, "suspect")
        replies = [reply for flip in data.flips.get(v.patch, ()) for reply in flip.replies]
        title = patch.title if patch else ""
        if role in ("positive-control", "negative-control"):
            title = f"{title + ' · ' if title else ''}control, {ROLE_WORDS[role]}"
        expected = f"known answer: {patch.expect}" if patch and patch.expect else ""
        more = f", {v.more_conversations_needed:,} more would settle it" if v.more_conversations_needed else ""
        rows.append(
            {
                "patch": v.patch,
                "anchor": anchor(v.patch),
                "title": title,
                "reason": v.reason[:1].upper() + v.reason[1:],
                "tone": charts.VERDICT_TONE[v.verdict],
                "verdict": VERDICT_WORDS[v.verdict],
                "expected": expected,
                "delta": signed(v.delta_recall),
                "interval": interval(v.ci_low, v.ci_high),
                "p": p_text(v.p_value),
                "rung": "all" if v.rung is None else f"{v.rung:,}",
                "evidence": f"{v.n_conversations:,} conversations, {v.n_probes:,} probes{more}",
                "flips": f"{len(replies):,} flip{'s' * (len(replies) > 1)}" if replies else "",
            }
        )
    return rows


CONTROL_WORDS = {
    "aa": ("The base against itself", "The same build served twice must show no difference."),
    "positive": ("A known-bad build", "Without catching it, an exoneration would mean nothing."),
    "negative": ("A known-harmless patch", "A change that cannot matter must not be convicted."),
}


def context(data: RunData) -> dict[str, Any]:
    """Everything the template names."""
    report, campaign = data.report, data.campaign
    found = chart_set(data)
    shown, n_shown, n_flips = pick_flips(data.flips, FLIP_BYTES)
    names, rows = outcome_rows(report, data.scores)
    builds, common = provenance(report, campaign, data.diffs)
    planned = sum(m.n_planned for m in report.missing)
    asked = sum(m.n_asked for m in report.missing)
    n_probes = len({(s.conversation_id, s.probe_id) for s in data.scores})
    controls = [
        {
            "name": CONTROL_WORDS.get(name, (name, ""))[0],
            "what": CONTROL_WORDS.get(name, (name, ""))[1],
            "state": control.state,
            "detail": control.detail
            if not control.build or control.build in control.detail
            else f"{control.build}: {control.detail}",
        }
        for name, control in report.controls.items()
    ]
    missing_notes = [
        f"{m.build}: {', '.join(f'{n:,} {kind}' for kind, n in m.by_outcome.items() if n)}."
        for m in report.missing
        if any(m.by_outcome.values())
    ]
    facts = [
        ("Suite", report.suite_hash[:12]),
        ("Engine", campaign.patchset.engine),
        ("Builds", f"{len(report.builds)}"),
        ("Lengths", ", ".join(charts.tokens(r) for r in report.rungs)),
        ("Conversations", f"{campaign.n_conversations:,}"),
        ("Probes", f"{n_probes:,}"),
        ("Replies", f"{asked:,} of {planned:,}"),
        ("Margin", f"{report.verdict_config.margin * 100:g} points"),
    ]
    run_rows = [
        ["run", report.run_id],
        ["suite hash", report.suite_hash],
        ["patchset", f"{campaign.patchset.name} ({campaign.patchset.path})"],
        ["engine", f"{campaign.patchset.engine}. {engine_lacks(campaign)}".strip()],
        ["recipe", campaign.recipe],
        ["seed", str(campaign.seed)],
        ["longrecall", f"{campaign.longrecall_version} {campaign.longrecall_commit or ''}"],
        ["analysis", report.analysis_version],
        ["asked on", campaign.created],
        *(["verdict rule: " + k.replace("_", " "), f"{v:g}"] for k, v in asdict(report.verdict_config).items()),
        *([f"timing: {k}", f"{v:,.1f}"] for k, v in report.timing.items() if v is not None),
    ]
    return {
        "title": f"{headline(report)} · longrecall {report.run_id}",
        "report": report,
        "version": data.version,
        "headline": headline(report),
        "lede": lede(report),
        "partial_note": f"{asked:,} of {planned:,} replies are in; run the same command again to go on."
        " Verdicts can still change.",
        "names": [b.build_id for b in report.builds if b.role not in ("base", "aa")],
        "facts": facts,
        "sections": [
            ("controls", "Controls"),
            ("verdicts", "Verdicts"),
            ("curves", "Recall by length"),
            ("differences", "Differences"),
            *([("causes", "Causes")] if report.attributions else []),
            ("depth", "Depth"),
            ("outcomes", "Replies"),
            ("flips", "Flips"),
            ("builds", "Builds"),
            ("reproduce", "Reproduce"),
        ],
        "controls": controls,
        "control_table": comparison_table([c for control in report.controls.values() for c in control.comparisons]),
        "missing_table": missing_table(report),
        "missing_notes": missing_notes,
        "margin": f"{report.verdict_config.margin * 100:g}",
        "verdicts": verdict_rows(data),
        "overview": Markup(found.get("recall", "")),
        "multiples": [
            {
                "label": b.build_id,
                "tone": tone_of(report, b.build_id),
                "verdict": word_of(report, b.build_id),
                "svg": Markup(found[f"recall-{b.build_id}"]),
            }
            for b in report.builds
            if f"recall-{b.build_id}" in found
        ],
        "forest": Markup(found.get("differences", "")),
        "curve_table": curve_table(report.curves),
        "comparison_table": comparison_table(report.comparisons),
        "length_table": length_table(report),
        "cause_table": cause_table(report),
        "cause_sentences": [a.sentence for a in report.attributions],
        "shift_table": shift_table(report),
        "maps": heat_maps(report, data.scores),
        "outcome_names": names,
        "outcome_rows": rows,
        "order_chart": Markup(found.get("order", "")),
        "order_table": order_table(order_shares(report, data.scores, data.replays)),
        "arm_chart": Markup(found.get("arms", "")),
        "arm_table": arm_table(report, data.scores, data.replays),
        "flips": flip_groups(data, shown),
        "flips_note": "" if n_shown == n_flips else f"{n_shown:,} of {n_flips:,} probes fit here; flips.jsonl has all.",
        "provenance": builds,
        "common_table": common,
        "commands": commands(campaign, report),
        "run_table": Table(["Field", "Value"], run_rows, frozenset()),
    }


def palette_css(palette: Mapping[str, str]) -> str:
    """CSS custom properties of a palette."""
    return ";".join(f"--{name}:{colour}" for name, colour in palette.items())


@cache
def environment() -> jinja2.Environment:
    """The template engine: escapes everything, refuses unknown names."""
    folder = Path(__file__).parent / "templates"
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["nobreak"] = nobreak
    return made


def nobreak(text: str, names: Sequence[str]) -> Markup:
    """The text with each name kept on one line; a browser would break it at its hyphens."""
    if not names:
        return escape(text)
    pattern = re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))
    out, at = Markup(), 0
    for found in pattern.finditer(text):
        out += escape(text[at : found.start()]) + Markup('<span class="nb">{}</span>').format(found.group())
        at = found.end()
    return out + escape(text[at:])


def render(template: str, values: Mapping[str, Any]) -> str:
    """A page of ours with its style and script inlined."""
    folder = Path(__file__).parent / "templates"
    script = (folder / "page.js").read_text(encoding="utf-8")
    style = (folder / "page.css").read_text(encoding="utf-8")
    css = (
        f":root{{{palette_css(charts.LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{palette_css(charts.DARK)}}}}}{style}{charts.CHART_CSS}"
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    marks = {tone: Markup(charts.mark(0, 0, tone, 5)) for tone in charts.TONES}
    return (
        environment()
        .get_template(template)
        .render(css=Markup(css), script=Markup(script), script_hash=f"sha256-{digest}", marks=marks, **values)
    )


def report_html(data: RunData) -> str:
    """The whole report.html."""
    return render("report.html.jinja", context(data))


def find_diffs(campaign: Campaign, run_dir: Path) -> dict[str, str]:
    """The text of each patch file, from the run folder or beside the patchset, where it is still there and not huge."""
    found = {}
    for patch in campaign.patchset.patches:
        for name in patch.diffs:
            for folder in (run_dir, Path(campaign.patchset.path).parent):
                path = folder / name
                if path.is_file() and path.stat().st_size <= DIFF_BYTES:
                    found[name] = path.read_text(encoding="utf-8", errors="replace")
                    break
    return found
