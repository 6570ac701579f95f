"""Reports as Markdown: report.md, and the verdict table that the gate posts on a pull request.

Cell text comes from patch files and models, so pipes, backticks, angle brackets and line breaks in it are made
harmless; GitHub renders the rest as a table.
"""

import re
from collections.abc import Iterable, Sequence

from longrecall.results import charts
from longrecall.results.flips import visible
from longrecall.results.panels import cause_table
from longrecall.results.schema import Campaign, Report
from longrecall.results.words import (
    CONTROL_SIGNS,
    ROLE_WORDS,
    VERDICT_WORDS,
    commands,
    engine_lacks,
    headline,
    interval,
    lede,
    ordered_verdicts,
    p_text,
    signed,
)

SIGNS = {"culprit": "❌", "exonerated": "✅", "within-margin": "🟡", "inconclusive": "❔"}


def cell(text: str, limit: int = 400) -> str:
    """Text that cannot break out of a table cell or start Markdown or HTML."""
    plain = " ".join(visible(text, limit).split())
    for character in "\\`*_[]|#<>":
        plain = plain.replace(character, f"\\{character}" if character not in "<>" else f"&#{ord(character)};")
    # line@commit is no name of somebody and no address, and stays readable in the source
    return re.sub(r"(?<![A-Za-z0-9])@|@(?![0-9a-f]{7,40}\+?(?![\w.+-]))", "&#64;", plain)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A GitHub table."""
    rule = ["--:" if i in right else "---" for i in range(len(heads))]
    lines = [f"| {' | '.join(row)} |" for row in (heads, rule, *rows)]
    return "\n".join(lines)


def verdict_table(report: Report) -> str:
    """One row per patch."""
    roles = {b.build_id: b.role for b in report.builds}
    rows = []
    for v in ordered_verdicts(report):
        role = roles.get(v.patch, "suspect")
        note = f" ({ROLE_WORDS[role]})" if role != "suspect" else ""
        more = (
            f"; {v.more_conversations_needed:,} more conversations would settle it"
            if v.more_conversations_needed
            else ""
        )
        rows.append(
            [
                cell(v.patch) + note,
                f"{SIGNS[v.verdict]} {VERDICT_WORDS[v.verdict]}",
                f"{signed(v.delta_recall)} {interval(v.ci_low, v.ci_high)}",
                p_text(v.p_value),
                "all" if v.rung is None else f"{v.rung:,}",
                cell(v.reason) + more,
            ]
        )
    return table(["Patch", "Verdict", "Difference, points", "p", "At", "Why"], rows, right=[2, 3, 4])


def control_list(report: Report) -> str:
    """One line per control."""
    return "\n".join(
        f"- {CONTROL_SIGNS[control.state]} **{name}**{f' ({cell(control.build)})' if control.build else ''}:"
        f" {cell(control.detail)}"
        for name, control in report.controls.items()
    )


def recall_table(report: Report) -> str:
    """Recall in percent, a row per build, a column per length."""
    by = {(p.build, p.rung): p for p in report.curves}
    rows = []
    for build in report.builds:
        cells = []
        for rung in report.rungs:
            point = by.get((build.build_id, rung))
            known = point is not None and point.recall is not None
            cells.append(
                f"{charts.points(point.recall)} {interval(point.ci_low, point.ci_high, signed=False)}"
                if known and point is not None
                else "–"
            )
        rows.append([cell(build.build_id), *cells])
    heads = ["Build", *(f"{rung:,}" for rung in report.rungs)]
    return table(heads, rows, right=range(1, len(heads)))


def cause_parts(report: Report) -> list[str]:
    """The sentence of every patch and the table of causes; nothing where the onset is not known."""
    if not report.attributions:
        return []
    causes = cause_table(report)
    told = "\n".join(f"- {cell(a.sentence, 1500)}" for a in report.attributions)
    rows = [[cell(text) for text in row] for row in causes.rows]
    return ["## Why recall is lost", told, *([table(causes.heads, rows, right=sorted(causes.numeric))] if rows else [])]


def report_markdown(report: Report, campaign: Campaign) -> str:
    """report.md."""
    asked, planned = (sum(getattr(m, name) for m in report.missing) for name in ("n_asked", "n_planned"))
    parts = [f"# {cell(headline(report))}", cell(lede(report))]
    if report.partial:
        parts.append(f"**This run is not finished:** {asked:,} of {planned:,} replies are in.")
    parts += [
        f"Run `{report.run_id}`, suite `{report.suite_hash[:12]}`, engine {cell(campaign.patchset.engine)},"
        f" {campaign.n_conversations:,} conversations, margin {report.verdict_config.margin * 100:g} points."
        + (f" Up to {report.onset_tokens:,} tokens the top-k selects everything." if report.onset_tokens else ""),
        cell(engine_lacks(campaign)),
        "## Controls",
        control_list(report),
        "## Verdicts",
        verdict_table(report),
        "## Recall against context length",
        "Percent, with the 95 % interval over conversations.",
        recall_table(report),
        *cause_parts(report),
        "## Reproduce",
        f"```sh\n{commands(campaign, report)}\n```",
        "The same with charts and every flipped reply: report.html.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
