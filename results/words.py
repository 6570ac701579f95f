"""The words a report uses, shared by the page, Markdown and the terminal: headline, numbers, verdict names, tones."""

import json
import re
import shlex
from collections import Counter

from longrecall.evals.schema import Comparison, Verdict
from longrecall.results import charts
from longrecall.results.flips import BASE, visible
from longrecall.results.schema import Campaign, Report
from longrecall.runners.engines import ENGINES
from longrecall.runners.schema import Build

VERDICT_WORDS = {
    "culprit": "culprit",
    "exonerated": "exonerated",
    "within-margin": "within margin",
    "inconclusive": "inconclusive",
}
ROLE_WORDS = {
    "base": "base",
    "aa": "the base again",
    "suspect": "suspect",
    "positive-control": "known bad",
    "negative-control": "known harmless",
}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def number_word(n: int, *, start: bool = False) -> str:
    """Small counts as words, as prose wants them."""
    word = NUMBERS[n] if n < len(NUMBERS) else f"{n:,}"
    return word.capitalize() if start else word


def p_text(p: float | None) -> str:
    """A p-value with two significant digits, never "0.000"."""
    if p is None:
        return "–"
    if p < 1e-4:
        return f"{p:.0e}".replace("e-0", "e−").replace("e-", "e−")
    return f"{p:.4f}" if p < 0.01 else f"{p:.2f}"


def interval(low: float | None, high: float | None, *, signed: bool = True) -> str:
    """[−12.0, −3.1] in points; a dash when unknown."""
    if low is None or high is None:
        return "–"
    return f"[{charts.points(low, signed=signed)}, {charts.points(high, signed=signed)}]"


def signed(share: float | None) -> str:
    """A difference in points with its sign."""
    return charts.points(share, signed=True)


CONTROL_SIGNS = {"passed": "✅", "failed": "❌", "absent": "➖"}


def suspects(report: Report) -> dict[str, Build]:
    """Builds under suspicion by patch name, in campaign order."""
    return {build.build_id: build for build in report.builds if build.role == "suspect"}


def headline(report: Report) -> str:
    """The run's answer in one sentence."""
    stopping = {control.state for control in report.controls.values() if control.blocks}
    n_stopping = sum(control.blocks for control in report.controls.values())
    wanted = suspects(report)
    named = [v for v in report.verdicts if v.patch in wanted]
    of = Counter(v.verdict for v in named)
    total = len(named)
    guilty = [v.patch for v in named if v.verdict == "culprit"]
    if not named:
        return "No patch was under suspicion in this run"
    if len(guilty) == 1:
        text = f"{guilty[0]} loses recall"
    elif len(guilty) == 2:
        text = f"{guilty[0]} and {guilty[1]} lose recall"
    elif guilty:
        text = f"{number_word(len(guilty), start=True)} of {number_word(total)} patches lose recall"
    elif of["exonerated"] == total:
        text = "No patch loses recall" if total > 1 else f"{named[0].patch} does not lose recall"
    elif of["exonerated"]:
        text = f"No patch convicted, {number_word(of['exonerated'])} of {number_word(total)} exonerated"
    else:
        text = "No patch convicted, none exonerated"
    if stopping and not guilty:
        how = "failed" if "failed" in stopping else "is missing" if n_stopping == 1 else "are missing"
        return f"No verdict: {'controls' if n_stopping > 1 else 'a control'} {how}"
    return text


def lede(report: Report) -> str:
    """The second sentence: how the rest came out and how large the losses are."""
    wanted = suspects(report)
    named = [v for v in report.verdicts if v.patch in wanted]
    parts = []
    for verdict in named:
        if verdict.verdict == "culprit" and verdict.delta_recall is not None:
            at = f" at {verdict.rung:,} tokens" if verdict.rung is not None else ""
            parts.append(
                f"{verdict.patch}: {signed(verdict.delta_recall)} points{at}"
                f" {interval(verdict.ci_low, verdict.ci_high)}."
            )
    rest = Counter(v.verdict for v in named if v.verdict != "culprit")
    told = [f"{number_word(n)} {VERDICT_WORDS[kind]}" for kind, n in rest.items()]
    if told and any(v.verdict == "culprit" for v in named):
        parts.append(f"Of the others, {', '.join(told)}.")
    elif told:
        parts.append(f"{', '.join(told).capitalize()}.")
    for state, said in (("failed", "Control not passed"), ("absent", "No such control in this run")):
        names = [name for name, control in report.controls.items() if control.state == state]
        if names:
            parts.append(f"{said}: {', '.join(names)}.")
    return " ".join(parts)


def ordered_verdicts(report: Report) -> list[Verdict]:
    """Suspects first, the convicted on top; the control patches below."""
    rank = {"culprit": 0, "within-margin": 1, "inconclusive": 2, "exonerated": 3}
    wanted = suspects(report)
    return sorted(report.verdicts, key=lambda v: (v.patch not in wanted, rank[v.verdict]))


def tone_of(report: Report, build_id: str) -> str:
    """The tone of a build's line: its verdict, or what role it plays."""
    build = next((b for b in report.builds if b.build_id == build_id), None)
    if build is None or build.role == "base":
        return "base"
    if build.role == "aa":
        return "quiet"
    if build.role != "suspect":
        return "control"
    verdict = next((v for v in report.verdicts if v.patch == build_id), None)
    return charts.VERDICT_TONE[verdict.verdict] if verdict else "control"


def word_of(report: Report, build_id: str) -> str:
    """The words beside that tone."""
    build = next((b for b in report.builds if b.build_id == build_id), None)
    verdict = next((v for v in report.verdicts if v.patch == build_id), None)
    return VERDICT_WORDS[verdict.verdict] if verdict else ROLE_WORDS[build.role] if build else ""


def comparisons_of(report: Report, build_id: str) -> list[Comparison]:
    """That build against the base, rungs in order, the pooled contrast last."""
    found = [c for c in report.comparisons if c.candidate == build_id and c.baseline == BASE]
    return sorted(found, key=lambda c: (c.rung is None, c.rung or 0))


def short(value: str) -> str:
    """A value that fits in a table; of a hash the first digits (the whole one is in campaign.json)."""
    return value[:16] if re.fullmatch(r"[0-9a-f]{40,}", value) else visible(value, 160)


def commands(campaign: Campaign, report: Report) -> str:
    """The command lines that ask the same again, write the reports again, and go after what was found."""
    run = f"results/runs/{shlex.quote(campaign.run_id)}"
    rungs = ",".join(str(r) for r in campaign.rungs)
    lines = []
    if campaign.longrecall_commit:
        dirty = "  # with changes that were not committed" if campaign.longrecall_commit.endswith("+") else ""
        lines.append(f"git checkout {campaign.longrecall_commit.removesuffix('+')}{dirty}")
    lines += [
        f"longrecall eval {shlex.quote(campaign.patchset.path)} --rungs {rungs}"
        f" --conversations {campaign.n_conversations} --seed {campaign.seed}{_settings(campaign)}",
        "",
        "# the reports and verdicts again, from the stored replies, without a server",
        f"longrecall report {run}",
    ]
    if report.attributions:
        lines += ["", "# serve what would tell the causes apart", f"longrecall attribute {run} --next"]
    return visible("\n".join(lines), 4000)


DEFAULTS: dict[str, object] = {
    "recipe": "reference", "arms": ("warm",), "repeats": 1, "max_tokens": 16, "block_size": 4, "concurrency": 64,
    "gold_logprobs": False, "stop_early": False, "whole_replies": False, "template_args": {}, "model_folder": None,
    "only": (),
}  # fmt: skip
"""Settings of a campaign that its command line leaves out."""


def _settings(campaign: Campaign) -> str:
    """The options of a campaign that are not the defaults."""
    parts = []
    for name, default in DEFAULTS.items():
        value = getattr(campaign, name)
        if value == default:
            continue
        flag = f" --{name.replace('_', '-')}"
        if name == "only":
            parts += [f"{flag} {shlex.quote(patch)}" for patch in value]
        elif isinstance(value, dict):
            parts.append(f"{flag} {shlex.quote(json.dumps(value))}")
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            parts.append(flag if value is True else f"{flag} {shlex.quote(text)}")
    return "".join(parts)


def engine_lacks(campaign: Campaign) -> str:
    """What the engine could not be asked for, as one sentence; empty when it lacks nothing or is not known."""
    engine = ENGINES.get(campaign.patchset.engine)
    lacking = engine.capabilities.lacking() if engine is not None else ()
    return f"Not available with engine {engine.name}: {', '.join(lacking)}." if engine is not None and lacking else ""


def anchor(text: str) -> str:
    """A name usable as an HTML id."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text)
