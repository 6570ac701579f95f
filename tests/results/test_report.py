"""Reports of a simulated campaign: the numbers, the page in a real browser, and replies that want to break it."""

import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from longrecall.evals.scores_file import read_scores
from longrecall.results import charts, run_folder
from longrecall.results.flips import find_flips, visible
from longrecall.results.main import build_app
from longrecall.results.page import RunData, verdict_rows
from longrecall.results.report import assemble, assemble_with_scores, write_reports
from longrecall.results.report_command import print_summary
from longrecall.results.run_folder import load_report
from longrecall.results.words import VERDICT_WORDS, commands, interval, signed


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, campaign40: Any, run_writer: Callable[..., Path]) -> Path:
    """A finished simulated run with its reports."""
    folder = run_writer(tmp_path_factory.mktemp("runs") / campaign40.campaign.run_id, campaign40)
    write_reports(folder)
    return folder


def test_report_json_has_the_agreed_keys(run_dir: Path) -> None:
    report = json.loads((run_dir / run_folder.REPORT_JSON).read_text())
    wanted = "schema_version run_id suite_hash partial builds rungs curves comparisons verdicts controls missing"
    assert set(wanted.split()) <= set(report)
    assert set(report["controls"]) == {"aa", "positive", "negative"}
    fields = "patch verdict delta_recall ci_low ci_high p_value n_conversations n_probes more_conversations_needed"
    assert all(set(fields.split()) <= set(verdict) for verdict in report["verdicts"])
    assert report["partial"] is False


def test_verdicts_match_what_was_simulated(run_dir: Path, campaign40: Any) -> None:
    report = run_folder.load_report(run_dir)
    expected = {p.patch_id: p.expect for p in campaign40.campaign.patchset.patches}
    assert {v.patch: v.verdict for v in report.verdicts} == expected


def test_controls_that_a_campaign_lacks_are_absent_and_not_failed(
    tmp_path: Path, campaign40: Any, run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / campaign40.campaign.run_id, campaign40)
    campaign = json.loads((folder / run_folder.CAMPAIGN).read_text())
    for build in campaign["builds"]:
        if build["role"] in ("positive-control", "negative-control"):
            build["role"] = "suspect"
    (folder / run_folder.CAMPAIGN).write_text(json.dumps(campaign))
    write_reports(folder)
    report = run_folder.load_report(folder)
    assert {name: c.state for name, c in report.controls.items()} == {
        "aa": "passed", "positive": "absent", "negative": "absent",
    }  # fmt: skip
    text = (folder / run_folder.REPORT_MD).read_text()
    assert "➖ **positive**" in text and "❌ **positive" not in text and "No such control in this run" in text
    page = (folder / run_folder.REPORT_HTML).read_text()
    assert page.count("absent</span></h3>") == 2 and "failed</span></h3>" not in page


def test_report_joins_served_and_in_process_evidence(
    tmp_path: Path, campaign40: Any, run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / campaign40.campaign.run_id, campaign40)
    row = {"patch": "index-rotation-one-sided", "feature": "selection_shift", "estimate": 0.6, "stderr": 0.02, "n": 192}
    (folder / "evidence-x.json").write_text(json.dumps([{**row, "source": "in-process"}]))
    write_reports(folder)
    found = {a.patch: a for a in run_folder.load_report(folder).attributions}
    assert set(found) == {b.build_id for b in campaign40.campaign.builds if not b.build_id.startswith("base")}
    rotation, scaling = found["index-rotation-one-sided"], found["hash-topk-double-scaling"]
    assert rotation.causes[0].family == "index keys" and rotation.causes[0].probability > 0.4
    assert rotation.length_dependent_share > 0.8 and "most that index keys" in rotation.sentence
    assert any(f.family == "routed scaling" and "selection_shift" in f.predicted for f in rotation.causes)
    assert scaling.length_dependent_share < 0.6 and scaling.share_ci_low < scaling.length_dependent_share
    assert "no loss to explain" in found["mhc-bf16"].sentence
    for name in (run_folder.REPORT_MD, run_folder.REPORT_HTML):
        text = (folder / name).read_text().replace("\\", "")
        assert "Why recall is lost" in text and "selection_shift +0.60" in text and "In-process" in text
    stored = json.loads((folder / run_folder.REPORT_JSON).read_text())
    family = next(a for a in stored["attributions"] if a["patch"] == rotation.patch)["families"]["index keys"]
    own = rotation.causes[0]
    assert family == pytest.approx(sum(f.probability for f in rotation.causes if f.family == "index keys"))
    assert f"{family:.2f}" != f"{own.probability:.2f}"
    row = (rotation.patch, "index keys", f"{family:.2f}", own.cause, f"{own.probability:.2f}")
    assert f"| {' | '.join(row)} |" in (folder / run_folder.REPORT_MD).read_text()
    page = re.sub(r"<[^>]*>", "|", (folder / run_folder.REPORT_HTML).read_text())
    assert re.search(r"\|+".join(map(re.escape, row)), page)


@pytest.mark.parametrize(("count", "said"), [(1, "1 flip"), (2, "2 flips")])
def test_one_flip_is_said_in_the_singular(run_dir: Path, campaign40: Any, count: int, said: str) -> None:
    report, campaign, scores = assemble_with_scores(run_dir)
    conversations, replays, patch = campaign40.conversations, campaign40.replays, "index-rotation-one-sided"
    alone = [f for f in find_flips(scores, conversations, replays, [patch])[patch] if len(f.replies) == 1]
    flips = {patch: alone[:count]}
    data = RunData(report=report, campaign=campaign, scores=scores, replays=replays, flips=flips, diffs={}, version="x")
    assert {row["patch"]: row["flips"] for row in verdict_rows(data) if row["flips"]} == {patch: said}


def test_report_is_the_same_from_stored_files_at_any_time(run_dir: Path) -> None:
    stored, again = run_folder.load_report(run_dir), assemble(run_dir)
    assert (stored.verdicts, stored.comparisons, stored.curves) == (again.verdicts, again.comparisons, again.curves)


def test_flips_agree_with_the_comparisons(run_dir: Path, campaign40: Any) -> None:
    report = run_folder.load_report(run_dir)
    scores = read_scores(run_dir / run_folder.SCORES)
    others = [b.build_id for b in report.builds if b.build_id != "base"]
    flips = find_flips(scores, campaign40.conversations, campaign40.replays, others)
    for comparison in report.comparisons:
        if comparison.rung is None:
            continue
        replies = [r for f in flips[comparison.candidate] for r in f.replies if r.rung == comparison.rung]
        counts = Counter(r.direction for r in replies)
        assert (counts["lost"], counts["gained"]) == (comparison.lost, comparison.gained)
    lines = (run_dir / run_folder.FLIPS).read_text().splitlines()
    assert len(lines) == sum(len(own) for own in flips.values())


def test_unfinished_run_is_partial_and_says_so(
    tmp_path: Path, campaign40: Any, run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / "run", campaign40)
    journal = folder / run_folder.REPLAYS
    data = journal.read_bytes()
    journal.write_bytes(data[: len(data) // 3])  # cut in the middle of a line
    report = write_reports(folder)
    assert report.partial
    assert "This run is not finished" in (folder / run_folder.REPORT_HTML).read_text()
    assert "This run is not finished" in (folder / run_folder.REPORT_MD).read_text()


def test_campaign_without_a_single_reply_still_reports(
    tmp_path: Path, campaign40: Any, run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / "run", campaign40)
    (folder / run_folder.REPLAYS).unlink()
    report = write_reports(folder)
    assert report.partial
    assert {v.verdict for v in report.verdicts} == {"inconclusive"}


def test_replay_of_an_unknown_conversation_names_the_file(
    tmp_path: Path, campaign40: Any, run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / "run", campaign40)
    journal = folder / run_folder.REPLAYS
    journal.write_bytes(journal.read_bytes().replace(b'"c0000"', b'"c9999"', 1))
    result = CliRunner().invoke(build_app(["report"]), ["report", str(folder)])
    assert result.exit_code == 2
    assert re.search(r"longrecall: error: .*replays\.jsonl: conversation c9999", result.output)


def test_command_prints_one_json_document_last(run_dir: Path) -> None:
    result = CliRunner().invoke(build_app(["report"]), ["report", str(run_dir), "--png"])
    assert result.exit_code == 0, result.output
    last = json.loads(result.output.splitlines()[-1])
    assert last["verdicts"]["index-rotation-one-sided"] == "culprit"
    assert (run_dir / "charts" / "recall.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("commit", "line"),
    [
        ("ab" * 20, "git checkout " + "ab" * 20),
        ("ab" * 20 + "+", "git checkout " + "ab" * 20 + "  # with changes that were not committed"),
    ],
)
def test_the_checkout_that_asks_again_is_a_command_that_runs(run_dir: Path, commit: str, line: str) -> None:
    campaign = replace(run_folder.load_campaign(run_dir), longrecall_commit=commit)
    assert commands(campaign, load_report(run_dir)).splitlines()[0] == line


def test_commands_to_reproduce_name_the_model_and_the_patches_asked_for(run_dir: Path, campaign40: Any) -> None:
    own = replace(
        campaign40.campaign, model_folder="/models/my own", only=("noop", "topk-256"), template_args={"thinking": False}
    )
    words = shlex.split(commands(own, load_report(run_dir)).split("\n\n")[0].splitlines()[-1])
    assert words[words.index("--model-folder") + 1] == "/models/my own"
    assert [words[i + 1] for i, word in enumerate(words) if word == "--only"] == ["noop", "topk-256"]
    assert json.loads(words[words.index("--template-args") + 1]) == {"thinking": False}


def test_summary_on_80_columns_cuts_nothing(run_dir: Path) -> None:
    report = load_report(run_dir)
    out = io.StringIO()
    print_summary(report, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out.getvalue()
    for verdict in report.verdicts:
        told = f"{signed(verdict.delta_recall)} {interval(verdict.ci_low, verdict.ci_high)}"
        assert any(
            line.startswith(f"{verdict.patch} ") and VERDICT_WORDS[verdict.verdict] in line and told in line
            for line in lines
        ), verdict


def test_markdown_holds_every_patch_and_rung(run_dir: Path, campaign40: Any) -> None:
    text = (run_dir / run_folder.REPORT_MD).read_text()
    for patch in campaign40.campaign.patchset.patches:
        assert patch.patch_id in text
    for rung in campaign40.campaign.rungs:
        assert f"{rung:,}" in text


def test_heat_map_tints_keep_text_readable() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    def mix(one: str, other: str, share: float) -> str:
        pairs = [(int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
        return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)

    for palette in (charts.LIGHT, charts.DARK):
        for tone in charts.TONES:
            assert contrast(palette[tone], palette["paper"]) >= 4.5, tone
        assert contrast(palette["muted"], palette["paper"]) >= 4.5
        assert contrast(palette["muted"], palette["shade"]) >= 4.5
        for tone in ("culprit", "exonerated"):
            assert contrast(palette["ink"], mix(palette[tone], palette["paper"], 0.42)) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_page_draws_in_a_browser_without_error_or_request(browser: Any, run_dir: Path, dark: bool) -> None:
    page = browser.open(run_dir / run_folder.REPORT_HTML, dark=dark)
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith("data:")] == page.requests[:1]
    shapes = page.js("[...document.querySelectorAll('svg[role=img]')].map(s => s.querySelectorAll('path').length)")
    assert len(shapes) >= 9
    assert all(n > 5 for n in shapes)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    paper = page.js("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 23, 27)" if dark else "rgb(253, 252, 249)")
    named = "[...document.querySelectorAll('svg[role=img]')].every(s => s.querySelector('title').textContent)"
    assert page.js(named)
    behind = "[...document.querySelectorAll('#curves,#differences')].every(s => s.querySelector('details.data table'))"
    assert page.js(behind)


def test_narrow_screen_has_no_sideways_scroll(browser: Any, run_dir: Path) -> None:
    page = browser.open(run_dir / run_folder.REPORT_HTML, width=390)
    assert page.js("document.documentElement.scrollWidth") <= 390


def test_keyboard_reaches_and_opens_a_flip(browser: Any, run_dir: Path) -> None:
    page = browser.open(run_dir / run_folder.REPORT_HTML)
    page.press("Tab", 9)
    assert page.js("document.activeElement.className") == "skip"
    page.js("document.querySelector('.flip summary').focus()")
    page.press("Enter", 13, "\r")
    assert page.js("document.querySelector('.flip').open")
    assert page.js("document.querySelector('.flip mark').textContent.length") == 5
    page.js("document.querySelector('select[name=direction]').value = 'gained'")
    page.js("document.querySelector('form.filters').dispatchEvent(new Event('input'))")
    shown = "[...document.querySelector('form.filters + div').querySelectorAll('.flip')].filter(f => !f.hidden)"
    assert page.js(f"{shown}.every(f => f.dataset.direction.includes('gained'))")
    assert page.js(f"{shown}.length") < page.js("document.querySelector('form.filters + div').children.length")


def test_link_to_a_flip_opens_it(browser: Any, run_dir: Path) -> None:
    page = browser.open(run_dir / run_folder.REPORT_HTML)
    page.js("location.hash = '#' + document.querySelectorAll('.flip')[3].id")
    assert page.js("new Promise(done => setTimeout(() => done(document.querySelectorAll('.flip')[3].open), 50))")


HOSTILE = [
    "<script>window.owned=1;fetch('https://evil.example/x')</script>",
    "<img src=x onerror='window.owned=1'><svg onload='window.owned=1'>",
    "</script><script>window.owned=1</script>",
    "]]>--></style></template></textarea></title><script>window.owned=1</script>",
    '" onmouseover="window.owned=1" style="position:fixed;inset:0;background:red" x="',
    "<a href='javascript:window.owned=1'>click</a><iframe src='https://evil.example'></iframe>",
    "<style>*{display:none!important}</style><link rel=stylesheet href='https://evil.example/a.css'>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'><base href='https://evil.example/'>",
    "safe \u202e gnp.exe \u2066\u2067\u202d\u200f hidden \u2069",
    "nul \x00 bell \x07 escape \x1b[31m red \x9b31m \u2028 line \u2029 paragraph \ufeff bom \ufffe",
    "zalgo " + "a" + "\u0300\u0301\u0302\u0489" * 400,
    "x" * 1_000_000,
    "word " * 200_000,
    "lone \ud800 surrogate \udfff and \ufffd",
    "{{ 7*7 }} {% raw %} ${7*7} #{7*7} <%= 7*7 %>",
    "| a | b |\n|---|---|\n<!-- <details open> @everyone `code` ](javascript:window.owned=1)",
]


def test_hostile_replies_execute_nothing_and_break_no_layout(
    browser: Any, tmp_path: Path, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> None:
    turn = iter(range(10**9))
    campaign = simulated(
        conversations=8,
        probes=4,
        rungs=(448, 1024),
        say=lambda build, text: text if build != "index-keys-fp8" else HOSTILE[next(turn) % len(HOSTILE)],
    )
    folder = run_writer(tmp_path / "run", campaign)
    write_reports(folder)
    html = (folder / run_folder.REPORT_HTML).read_bytes()
    assert len(html) < 3_000_000
    html.decode("utf-8")
    page = browser.open(folder / run_folder.REPORT_HTML)
    page.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    over = "e.dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    page.js(f"document.querySelectorAll('.text,.q').forEach(e => {over})")
    # off-screen flips are not laid out; for the measurements below, all of them are
    page.js("document.querySelectorAll('.flip').forEach(f => { f.style.contentVisibility = 'visible' })")
    assert page.js("new Promise(done => setTimeout(() => done(typeof window.owned), 100))") == "undefined"
    assert page.errors == []
    assert len(page.requests) == 1 or all(url.startswith("data:") for url in page.requests[1:])
    seen = page.js("document.querySelector('#flips').textContent")
    assert "<script>window.owned=1" in seen
    assert "⟦U+202E⟧" in seen
    assert "\u202e" not in html.decode()
    for width in (1280, 390):
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert page.js("document.documentElement.scrollWidth") <= width
    inside = "[...document.querySelectorAll('.replies td')].every(c => c.getBoundingClientRect().height < 700)"
    assert page.js(inside)
    markdown = (folder / run_folder.REPORT_MD).read_text()
    assert "<script>" not in markdown


def test_visible_never_lets_a_control_through() -> None:
    text = "".join(map(chr, range(0x250))) + "".join(map(chr, range(0x2000, 0x2070))) + "\ud800\ufeff\U000e0041"
    shown = visible(text, 10_000)
    assert not set(shown) & set(
        "\x00\x07\x1b\x7f\x9b\xad\u200b\u200e\u202a\u202e\u2066\u2069\u2028\ufeff\ud800\U000e0041"
    )
    shown.encode("utf-8")


def test_page_stays_small_for_a_large_campaign(
    tmp_path: Path, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> None:
    """12 builds × 8 rungs is the size that the page is made for; many flips are cut by room, not by count."""
    from longrecall.results.page import pick_flips

    campaign = simulated(conversations=30, probes=8, rungs=(448, 1024, 2048), flips=0.2)
    folder = run_writer(tmp_path / "run", campaign)
    write_reports(folder)
    assert (folder / run_folder.REPORT_HTML).stat().st_size < 3_000_000
    flips = find_flips(
        read_scores(folder / run_folder.SCORES), campaign.conversations, campaign.replays, ["mhc-bf16", "noop"]
    )
    shown, n_shown, n_all = pick_flips(flips, 40_000)
    assert 0 < n_shown < n_all
    assert abs(len(shown["mhc-bf16"]) - len(shown["noop"])) <= 1


def test_order_and_arms_are_charts_with_their_tables_behind(
    run_dir: Path, tmp_path: Path, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> None:
    html = (run_dir / run_folder.REPORT_HTML).read_text()
    assert "Recall by order of sending, every build" in html and "Recall by order of sending as a table" in html
    assert (run_dir / run_folder.CHARTS / "order.svg").read_text().count("first fifth: ") >= 2
    assert "Recall by arm of the prefix cache" not in html  # one arm: nothing to compare
    campaign = simulated(conversations=4, probes=2, losses={"base": (0, 0), "base-again": (0, 0), "worse": (0, 1.0)})
    folder = run_writer(tmp_path / "run", campaign)
    journal = folder / run_folder.REPLAYS
    warm = [json.loads(line) for line in journal.read_text().splitlines()]
    cold = [{**row, "arm": "cold", "send_order": row["send_order"] + 1000} for row in warm]
    journal.write_text("".join(json.dumps(row) + "\n" for row in [*warm, *cold]))
    write_reports(folder)
    chart = (folder / run_folder.CHARTS / "arms.svg").read_text()
    assert "worse, warm: " in chart and "worse, cold: " in chart
    html = (folder / run_folder.REPORT_HTML).read_text()
    assert "Recall by arm of the prefix cache, every build" in html
