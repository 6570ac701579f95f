"""The whole of `longrecall eval` against real servers on loopback: verdicts, resume, exit codes, bad input."""

import asyncio
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from typer.testing import CliRunner

from longrecall.evals.paired import min_conversations_any_time
from longrecall.needles.rungs import parse_rungs
from longrecall.results import run_folder
from longrecall.results.campaign import exit_code, run_campaign
from longrecall.results.eval_command import parse_fail_on
from longrecall.results.main import build_app
from longrecall.results.plan import CampaignError, Options, make_plan
from longrecall.results.watching import Stages, Watcher
from longrecall.results.words import DEFAULTS
from longrecall.runners import builds, engines
from longrecall.runners.journal import Journal, key_of
from longrecall.runners.processes import HeldPort, Server, stop_all

ROOT = Path(__file__).resolve().parent.parent.parent
LOOPBACK = ROOT / "tests" / "runners" / "loopback_server.py"
BUILDS = {"base": 0.0, "same": 0.0, "forgetful": 0.5, "known-bad": 0.9, "noop": 0.0}
RUNGS = "300,450"
PROBES = 2
CONVERSATIONS = 26
ENV = os.environ | {"PYTHONPATH": str(ROOT / ".ns")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer makes every word one token."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r" ?[^\s]+|\s"), "isolated")
    tokenizer.add_special_tokens([tokenizers.AddedToken("<s>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    (folder / "few.toml").write_text(
        f'name = "few"\nanswer_prefix = true\n[[elements]]\nkind = "keys"\ncount = {PROBES}\ndistractors = 2\n'
    )
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def patchset(place: Path, model: Path) -> Iterator[Path]:
    """A patchset of endpoints: loopback servers, some of which forget."""
    servers = {}
    for name, forget in BUILDS.items():
        argv = [sys.executable, str(LOOPBACK), "--port", "{port}", "--model-folder", str(model)]
        argv += ["--forget", str(forget), "--seen", str(place / f"seen-{name}")]
        servers[name] = Server(name, argv, ENV, place / f"server-{name}", HeldPort())
        servers[name].start()

    async def ready() -> None:
        await asyncio.gather(*(server.wait_ready(60.0) for server in servers.values()))

    try:
        asyncio.run(ready())
        yield write_patchset(place, {name: server.url for name, server in servers.items()})
    finally:
        stop_all(list(servers.values()))


def requests_seen(place: Path) -> int:
    return sum(len((place / f"seen-{name}").read_text().splitlines()) for name in BUILDS)


@pytest.fixture(scope="module")
def whole(patchset: Path, model: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """One run from beginning to end."""
    return run(command(patchset, model, place / "runs", "--fail-on", "culprit"))


def write_patchset(folder: Path, urls: dict[str, str]) -> Path:
    roles = {"known-bad": "positive-control", "noop": "negative-control"}
    text = f'name = "demo"\nengine = "openai"\nsource = "{urls["base"]}"\nonset_tokens = 512\n'
    for name in BUILDS:
        if name != "base":
            role = roles.get(name, "suspect")
            text += f'[[patch]]\nid = "{name}"\nrole = "{role}"\nendpoint = "{urls[name]}"\n'
    path = folder / "demo.toml"
    path.write_text(text)
    return path


def unserved() -> dict[str, str]:
    """Addresses of builds that are never reached."""
    return {name: f"http://127.0.0.1:{port}" for port, name in enumerate(BUILDS, 9)}


def command(patchset: Path, model: Path, runs: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "longrecall.results.main", "eval", str(patchset), "--model-folder", str(model),
            "--runs-dir", str(runs), "--recipe", str(model / "few.toml"), "--rungs", RUNGS,
            "--conversations", str(CONVERSATIONS), *args]  # fmt: skip


def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=ENV, capture_output=True, text=True, timeout=120, **options)


def test_the_forgetful_build_is_convicted_and_the_same_one_exonerated(
    whole: subprocess.CompletedProcess[str],
) -> None:
    done = whole
    assert done.returncode == 1, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["verdicts"] == {
        "same": "exonerated", "forgetful": "culprit", "known-bad": "culprit", "noop": "exonerated"
    }  # fmt: skip
    assert line["controls"] == {"aa": True, "positive": True, "negative": True} and line["partial"] is False
    assert "first conviction after" in done.stderr and "known-bad" in done.stderr
    run_dir = Path(line["run_dir"])
    for name in ("campaign.json", "conversations.parquet", "replays.jsonl", "scores.parquet", "report.json",
                 "report.md", "report.html", "timing.json"):  # fmt: skip
        assert (run_dir / name).stat().st_size > 0, name
    campaign = run_folder.load_campaign(run_dir)
    replays = run_folder.load_replays(run_dir)
    assert len(replays) == len({key_of(replay) for replay in replays}) == 6 * CONVERSATIONS * PROBES * 2
    assert all(replay.response.error is None for replay in replays)
    assert campaign.onset_tokens == 512 and len(campaign.builds) == 6
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name]


def test_killed_with_9_and_run_again_the_report_is_the_same_and_nothing_is_doubled(
    tmp_path: Path, patchset: Path, model: Path, place: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    before = requests_seen(place)
    argv = command(patchset, model, tmp_path / "runs")
    for answers in (60, 200):
        process = subprocess.Popen(argv, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 100
        while journal_lines(tmp_path / "runs") < answers and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.002)
        assert process.poll() is None, "it was done before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    (run_dir,) = (tmp_path / "runs").iterdir()
    kept = (run_dir / "replays.jsonl").read_bytes()
    broken_off = Journal(run_dir)
    broken_off.close()
    done = run(argv)
    assert done.returncode == 0, done.stderr
    assert "going on with" in done.stderr
    # The kill may have met the moment between two blocks, when nothing is in flight.
    lost = f"{len(broken_off.in_flight)} requests were in flight when the run was broken off"
    assert (lost in done.stderr) == bool(broken_off.in_flight), done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert Path(line["run_dir"]) == run_dir and list((tmp_path / "runs").iterdir()) == [run_dir]
    assert (run_dir / "replays.jsonl").read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    replays = run_folder.load_replays(run_dir)
    assert len(replays) == len({key_of(replay) for replay in replays}) == 6 * CONVERSATIONS * PROBES * 2
    in_flight_most = 2 * 2 * 4 * PROBES  # kills x builds asked at once x conversations x probes
    assert 0 <= requests_seen(place) - before - len(replays) <= in_flight_most
    first = json.loads(whole.stdout.splitlines()[-1])
    assert first["suite_hash"] == line["suite_hash"] and first["verdicts"] == line["verdicts"]
    assert evidence(Path(first["run_dir"])) == evidence(run_dir)


def test_every_arm_is_asked_and_the_verdict_is_about_the_first(tmp_path: Path, patchset: Path, model: Path) -> None:
    arms = "concat,warm,branched,free,alone,mirrored"
    argv = command(
        patchset,
        model,
        tmp_path / "runs",
        "--conversations",
        "3",
        "--block-size",
        "2",
        "--arms",
        arms,
        "--concurrency",
        "6",
    )
    done = run(argv)
    assert done.returncode == 3, done.stderr  # 3 conversations pass no control
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["partial"] is False
    run_dir = Path(line["run_dir"])
    asked = Counter((replay.arm, replay.response.error) for replay in run_folder.load_replays(run_dir))
    each = len(BUILDS) + 1, 3 * PROBES * 2
    assert asked == {
        **{(arm, None): each[0] * each[1] for arm in ("concat", "warm", "branched", "free", "alone")},
        ("mirrored", None): each[0] * 2 * PROBES * 2,
    }
    assert (run_dir / "concat.parquet").is_file() and (run_dir / "histories.jsonl").is_file()
    report = json.loads((run_dir / "report.json").read_text())
    assert {point["n_probes"] for point in report["curves"]} == {3 * PROBES}
    assert {missing["n_planned"] for missing in report["missing"]} == {each[1]}


def test_the_report_repeats_the_command_and_says_what_the_engine_lacks(
    whole: subprocess.CompletedProcess[str], model: Path
) -> None:
    written = (Path(json.loads(whole.stdout.splitlines()[-1])["run_dir"]) / "report.md").read_text()
    assert f"--seed 0 --recipe {model / 'few.toml'}" in written and "--arms" not in written
    assert f"--model-folder {model}" in written and "--only" not in written
    assert "Not available with engine openai: token counts of a text" in written
    plain = Options(patchset=Path("x.toml"))  # 16 tokens are what the answers of the default recipe get
    assert {name: getattr(plain, name) for name in DEFAULTS} | {"max_tokens": 16} == DEFAULTS


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--arms", "hot"], "'hot' is none of warm, cold"),
        (["--arms", "mirrored"], "it needs another arm"),
        (["--arms", "cold"], "arm cold: engine 'openai'"),
        (["--gold-logprobs"], "--gold-logprobs: engine 'openai'"),
        (["--inside", "1"], "--inside: engine 'openai'"),
    ],
)
def test_what_an_engine_cannot_be_asked_for_is_said_first(
    tmp_path: Path, model: Path, args: list[str], said: str
) -> None:
    argv = command(write_patchset(tmp_path, unserved()), model, tmp_path / "runs", *args)[3:]
    done = CliRunner().invoke(build_app(argv), argv)
    assert done.exit_code == 2 and said in done.stderr, done.output


@pytest.mark.parametrize(
    ("name", "damage", "code", "said"),
    [
        (
            "replays.jsonl",
            lambda text: text.replace('"rung":300', '"rung":7', 1),
            3,
            "was never planned by campaign.json",
        ),
        (
            "replays.jsonl",
            lambda text: re.sub(r'"build_id":("[^"]*")', r'"build_id":[\1]', text, count=1),  # whichever came first
            3,
            "replays.jsonl line 1: not a replay",
        ),
        (
            "campaign.json",
            lambda text: text.replace('"few-', '"gone-', 1),
            3,
            "stands in only one of campaign.json and",
        ),
        ("timing.json", lambda text: "[]", 2, "timing.json: "),
    ],
)
def test_a_damaged_run_is_not_gone_on_with(
    whole: subprocess.CompletedProcess[str], patchset: Path, model: Path, tmp_path: Path,
    name: str, damage: Callable[[str], str], code: int, said: str,
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    shutil.copytree(json.loads(whole.stdout.splitlines()[-1])["run_dir"], run_dir)
    before = (run_dir / name).read_text()
    (run_dir / name).write_text(damage(before))
    assert (run_dir / name).read_text() != before
    argv = command(patchset, model, tmp_path / "runs", "--run-dir", str(run_dir))[3:]
    done = CliRunner().invoke(build_app(argv), argv)
    errors = [line for line in done.stderr.splitlines() if line.startswith("longrecall: error: ")]
    assert done.exit_code == code and len(errors) == 1 and said in errors[0], done.output


def test_too_few_conversations_to_exonerate_anybody_are_said_first(tmp_path: Path, model: Path) -> None:
    argv = command(write_patchset(tmp_path, unserved()), model, tmp_path / "runs", "--stop-early")[3:]
    done = CliRunner().invoke(build_app(argv), argv)
    said = " ".join(done.stderr.split())
    assert f"--stop-early with {CONVERSATIONS} conversations can convict but exonerate nobody" in said
    assert f"that takes {min_conversations_any_time(0.10, 0.05)} at least" in said


def evidence(run_dir: Path) -> dict[str, Any]:
    """report.json without what names the run and the hour."""
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return {key: value for key, value in report.items() if key not in ("run_id", "created", "timing")}


def journal_lines(runs: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in runs.glob("*/replays.jsonl"))


def test_sigterm_ends_it_in_order_and_says_how_to_go_on(tmp_path: Path, patchset: Path, model: Path) -> None:
    argv = command(patchset, model, tmp_path / "runs")
    process = subprocess.Popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150  # before the asking begins a signal just ends it
    while journal_lines(tmp_path / "runs") < 50 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.terminate()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "interrupted by SIGTERM" in stderr and "the same command goes on" in stderr and "Traceback" not in stderr


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--rungs", "400,4oo"], 2, "--rungs '400,4oo': '4oo' is not a length in tokens"),
        (["--rungs", "800,500"], 2, "lengths must increase"),
        (["--rungs", "60"], 2, "60"),
        (["--rungs", "\u00b2"], 2, "is not a length in tokens"),
        (["--run-dir", "/"], 2, "run folder '/' has no name of its own"),
        (["--fail-on", "guilty"], 2, "'guilty' is none of culprit, inconclusive"),
        (["--only", "nobody"], 2, "no patch 'nobody'"),
        (["--recipe", "nothing"], 2, "nothing"),
        (["--model-folder", "/no/such/folder"], 3, "/no/such/folder: no model folder"),
    ],
)
def test_what_cannot_be_used_is_named_and_leaves_nothing(
    tmp_path: Path, model: Path, args: list[str], code: int, said: str
) -> None:
    patchset = write_patchset(tmp_path, unserved())
    argv = command(patchset, model, tmp_path / "runs", *args)[3:]
    done = CliRunner().invoke(build_app(argv), argv)
    assert done.exit_code == code, done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("longrecall: error: ")]
    assert len(errors) == 1 and said in errors[0] and "Traceback" not in done.output
    assert not (tmp_path / "runs").exists()


def test_a_dead_port_is_one_message_and_exit_3(tmp_path: Path, model: Path) -> None:
    held = HeldPort()
    patchset = write_patchset(tmp_path, unserved() | {"base": f"http://127.0.0.1:{held.port}"})
    done = run(command(patchset, model, tmp_path / "runs"))
    held.release()
    assert done.returncode == 3
    assert f"build base: nobody answers at http://127.0.0.1:{held.port}" in done.stderr.splitlines()[-1]


def test_an_endpoint_that_is_something_else_is_named(tmp_path: Path, model: Path) -> None:
    page = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert page.stdout is not None
        port = page.stdout.readline().split(" port ")[1].split()[0]
        patchset = write_patchset(tmp_path, unserved() | {"base": f"http://127.0.0.1:{port}"})
        done = run(command(patchset, model, tmp_path / "runs"))
    finally:
        page.kill()
        page.wait()
    assert done.returncode == 3
    assert "is not an OpenAI-compatible server: /v1/models answered 404" in done.stderr


def test_a_full_disk_keeps_what_was_answered_and_the_same_command_goes_on(
    patchset: Path, model: Path, tmp_path: Path
) -> None:
    argv = command(patchset, model, tmp_path / "runs")

    def small_disk() -> None:
        # The largest file a process may write: the journal hits it as it would hit the end of a disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))

    done = run(argv, preexec_fn=small_disk)
    assert done.returncode == 3, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("longrecall: error: ") and "cannot be written: File too large" in last
    assert "Traceback" not in done.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    kept = (run_dir / "replays.jsonl").read_bytes()
    assert kept.endswith(b"\n") and 100 < kept.count(b"\n")
    again = run(argv)
    assert again.returncode == 0, again.stderr
    assert (run_dir / "replays.jsonl").read_bytes().startswith(kept)


class LoopbackEngine(engines.Engine):
    """Launches the loopback server as a build of the reference source."""

    def command(self, folder: Path, threads: int, args: tuple[str, ...]) -> tuple[str, ...]:
        return (sys.executable, str(LOOPBACK), "--port", "{port}", "--model-folder", str(folder), *args)


@pytest.fixture
def launched(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Options]:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path / "cache"))
    engine = LoopbackEngine(
        name="loopback", launches=True, source_folders=("needles",),
        capabilities=engines.Capabilities(server_info=True), volatile=("pid",),
    )  # fmt: skip
    # As base source, what the loopback server itself imports.
    source = tmp_path / "source" / "needles"
    source.mkdir(parents=True)
    for module in (ROOT / "needles").glob("*.py"):
        shutil.copy(module, source)
    monkeypatch.setattr(builds, "ROOT", tmp_path / "source")
    monkeypatch.setattr(engines, "ENGINES", {**engines.ENGINES, "loopback": engine})

    def options(patches: str) -> Options:
        path = tmp_path / "launched.toml"
        path.write_text(f'name = "launched"\nengine = "loopback"\n{patches}')
        return Options(
            patchset=path, model_folder=model, rungs=(300, 450), conversations=3,
            recipe=str(model / "few.toml"), runs_dir=tmp_path / "runs"
        )  # fmt: skip

    return options


BAD = '[[patch]]\nid = "bad"\nrole = "positive-control"\nargs = ["--forget", "0.9"]\n'


class Notes(Watcher):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def our_children(base: Path) -> set[str]:
    """Loopback servers of runs below `base`; other test processes have servers of their own."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            place = os.readlink(entry / "cwd")
        except OSError:
            continue
        if b"loopback_server.py" in command and (str(base).encode() in command or place.startswith(str(base))):
            found.add(entry.name)
    return found


def test_launched_builds_are_recorded_with_what_they_say_and_all_ended(
    launched: Callable[..., Options], tmp_path: Path
) -> None:
    outcome = run_campaign(launched(BAD), Watcher())
    assert our_children(tmp_path) == set()
    campaign = run_folder.load_campaign(outcome.run_dir)
    for build in campaign.builds:
        assert build.manifest is not None and build.manifest.server_info is not None
        assert build.manifest.server_info["engine"] == "loopback"
        assert (outcome.run_dir / "builds" / build.build_id / "manifest.json").is_file()
        assert (outcome.run_dir / "builds" / build.build_id / "server.log").is_file()
    assert outcome.gone == {} and not outcome.report.partial
    assert exit_code(outcome.report, frozenset(), outcome.gone) == 3, "3 conversations cannot pass the controls"


def test_builds_that_do_not_fit_into_memory_are_served_in_turn(launched: Callable[..., Options]) -> None:
    options = dataclasses.replace(launched(BAD), servers_at_once=1)
    outcome = run_campaign(options, Watcher())
    assert not outcome.report.partial and outcome.gone == {}
    replays = run_folder.load_replays(outcome.run_dir)
    order = [replay.build_id for replay in sorted(replays, key=lambda replay: replay.send_order)]
    assert list(dict.fromkeys(order)) == ["base", "base-again", "bad"] and order == sorted(order, key=order.index)
    assert all(
        build.manifest and build.manifest.server_info for build in run_folder.load_campaign(outcome.run_dir).builds
    )


def test_a_server_that_says_it_is_something_else_is_refused(launched: Callable[..., Options]) -> None:
    other = '[[patch]]\nid = "other"\nargs = ["--info", \'{"backend": "dense"}\']\n'
    with pytest.raises(
        ValueError, match=r"by more than the named patch(?s:.*)other: server_info backend: base \(absent\)"
    ):
        run_campaign(launched(other), Watcher())


def test_a_server_that_dies_at_start_is_one_message_with_its_log(
    launched: Callable[..., Options], tmp_path: Path
) -> None:
    options = launched(BAD + '[[patch]]\nid = "broken"\nargs = ["--exit-at-start", "9"]\n')
    outcome = run_campaign(options, Watcher())
    assert list(outcome.gone) == ["broken"] and outcome.report.partial
    assert "the server ended with code 9" in outcome.gone["broken"]
    assert "cannot load the weights" in outcome.gone["broken"]
    assert exit_code(outcome.report, frozenset(), outcome.gone) == 3
    asked = {missing.build: missing.n_asked for missing in outcome.report.missing}
    assert asked["base"] == asked["base-again"] == asked["bad"] == 3 * PROBES * 2 and not asked.get("broken")
    assert our_children(tmp_path) == set()


def test_without_the_base_there_is_no_campaign(launched: Callable[..., Options], tmp_path: Path) -> None:
    options = launched('args = ["--exit-at-start", "9"]\n' + BAD)
    with pytest.raises(CampaignError, match=r"build base: the server ended with code 9(?s:.*)cannot load the weights"):
        run_campaign(options, Watcher())
    assert our_children(tmp_path) == set()


def test_a_server_that_runs_out_of_memory_is_named_with_its_log(
    launched: Callable[..., Options], tmp_path: Path
) -> None:
    outcome = run_campaign(launched(BAD + '[[patch]]\nid = "greedy"\nargs = ["--out-of-memory"]\n'), Watcher())
    assert "was ended by SIGKILL (out of memory?)" in outcome.gone["greedy"]
    assert "allocating the KV cache" in outcome.gone["greedy"] and our_children(tmp_path) == set()


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ('["--extra-tokens", "1"]', r"it counts \d+ tokens where the tokenizer and chat template of .* make \d+"),
        ('["--template-error"]', "it cannot be asked: http 400: .*roles must alternate"),
        (
            '["--max-model-len", "465"]',
            "its longest context is 465 tokens, and rung 450 with an answer of 16 takes 466",
        ),
        ('["--first-token", "<think>"]', "it begins to think instead of answering.*--template-args"),
    ],
    ids=["another tokenizer", "a template that raises", "too short a context", "thinking"],
)
def test_a_build_that_cannot_be_asked_is_left_out_and_the_others_go_on(
    launched: Callable[..., Options], patch: str, said: str
) -> None:
    outcome = run_campaign(launched(f'{BAD}[[patch]]\nid = "other"\nargs = {patch}\n'), Watcher())
    assert list(outcome.gone) == ["other"] and re.search(said, outcome.gone["other"])
    assert "its log ends" in outcome.gone["other"]
    asked = {missing.build: missing.n_asked for missing in outcome.report.missing}
    assert asked["bad"] == 3 * PROBES * 2 and not asked.get("other")
    assert exit_code(outcome.report, frozenset(), outcome.gone) == 3


def test_the_thinking_policy_is_planted_sent_and_told(
    launched: Callable[..., Options], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "thinking"
    shutil.copytree(model, folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        template.replace(
            "{% if add", "{% if enable_thinking is false %}{{ 'No thoughts please.' }}{% endif %}{% if add"
        )
    )
    options = dataclasses.replace(launched(BAD), model_folder=folder, template_args={"enable_thinking": False})
    outcome = run_campaign(options, Watcher())
    replays = run_folder.load_replays(outcome.run_dir)
    assert outcome.gone == {} and all(replay.response.error is None for replay in replays)
    assert {replay.response.prompt_tokens for replay in replays} == {300, 450}
    told = (outcome.run_dir / "report.md").read_text()
    assert """--template-args '{"enable_thinking": false}'""" in told
    thinking = run_campaign(dataclasses.replace(options, template_args={}, fresh=True), Watcher())
    assert thinking.report.suite_hash != outcome.report.suite_hash


def test_a_model_may_think_when_replies_end_by_themselves(launched: Callable[..., Options]) -> None:
    options = launched('args = ["--thinks", "--first-token", "<think>"]\n' + BAD)
    with pytest.raises(CampaignError, match=r"build base .* it begins to think .*--whole-replies"):
        run_campaign(options, Watcher())
    outcome = run_campaign(dataclasses.replace(options, whole_replies=True), Watcher())
    assert outcome.gone == {} and run_folder.load_campaign(outcome.run_dir).max_tokens > 256
    plain = run_campaign(launched(BAD), Watcher())
    recalls = [[point.recall for point in run.report.curves] for run in (outcome, plain)]
    assert recalls[0] == recalls[1] and max(recalls[0]) > 0.5, "what was thought is not graded"
    assert "--whole-replies" in (outcome.run_dir / "report.md").read_text()


def test_replies_have_room_for_the_longest_answer_planted(
    launched: Callable[..., Options], model: Path, tmp_path: Path
) -> None:
    options = launched(BAD)
    assert make_plan(options, Stages()).campaign.max_tokens == 16
    letters = tmp_path / "letters"
    shutil.copytree(model, letters)
    tokenizer = tokenizers.Tokenizer.from_file(str(letters / "tokenizer.json"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\d| ?[^\s\d]+|\s"), "isolated")
    tokenizer.save(str(letters / "tokenizer.json"))
    wide = tmp_path / "wide.toml"
    wide.write_text((model / "few.toml").read_text() + "digits = 15\n")
    options = dataclasses.replace(options, model_folder=letters, recipe=str(wide), rungs=(600, 900))
    assert make_plan(options, Stages()).campaign.max_tokens > 15 + 8
    with pytest.raises(ValueError, match=r"--max-tokens 12 cuts off answers: the longest one planted takes 1\d tokens"):
        make_plan(dataclasses.replace(options, max_tokens=12), Stages())


def test_a_server_that_dies_later_leaves_the_others_unharmed_and_the_run_goes_on(
    launched: Callable[..., Options],
) -> None:
    dying = launched('[[patch]]\nid = "dying"\nargs = ["--die-after", "6"]\n')
    notes = Notes()
    outcome = run_campaign(dying, notes)
    assert list(outcome.gone) == ["dying"] and outcome.report.partial
    assert exit_code(outcome.report, frozenset(), outcome.gone) == 3
    asked = {missing.build: missing.n_asked for missing in outcome.report.missing}
    assert asked["base"] == asked["base-again"] == 3 * PROBES * 2 and 0 < asked["dying"] <= 6
    again = run_campaign(dying, notes)
    assert again.run_dir == outcome.run_dir
    assert {m.build: m.n_asked for m in again.report.missing}["dying"] > asked["dying"]


def test_another_campaign_cannot_be_put_into_a_run_folder(launched: Callable[..., Options]) -> None:
    options = launched(BAD)
    outcome = run_campaign(options, Watcher())
    within = dataclasses.replace(options, run_dir=outcome.run_dir)
    before = {path: path.read_bytes() for path in outcome.run_dir.rglob("*") if path.is_file()}
    thinking = {"enable_thinking": False}
    for other, named in (
        ({"seed": 5}, "seed is 0 there and 5 here"),
        ({"max_tokens": 99}, "max_tokens is [0-9]+ there and 99 here"),
        ({"concurrency": 3}, "concurrency is [0-9]+ there and 3 here"),
        ({"arms": ("alone",)}, r"arms is \('warm',\) there and \('alone',\) here"),
        ({"template_args": thinking}, "template_args is {} there and {'enable_thinking': False} here"),
    ):
        with pytest.raises(CampaignError, match=f"holds another campaign: {named}"):
            run_campaign(dataclasses.replace(within, **other), Watcher())
    options.patchset.write_text("margin = 0.2\n" + options.patchset.read_text())
    with pytest.raises(CampaignError, match=r"holds another campaign: verdict is .*margin=0\.1.* there"):
        run_campaign(within, Watcher())
    launched(BAD.replace("0.9", "0.8"))
    with pytest.raises(CampaignError, match="holds another campaign: build bad differs in args"):
        run_campaign(within, Watcher())
    assert {path: path.read_bytes() for path in outcome.run_dir.rglob("*") if path.is_file()} == before


def test_a_finished_run_is_not_gone_on_with(launched: Callable[..., Options]) -> None:
    first = run_campaign(launched(BAD), Watcher())
    second = run_campaign(launched(BAD), Watcher())
    assert first.run_dir != second.run_dir or not first.report.partial


def test_several_reasons_to_fail_may_be_named() -> None:
    assert parse_fail_on("culprit, inconclusive") == {"culprit", "inconclusive"} and parse_fail_on("") == frozenset()


def test_a_run_may_stop_once_the_evidence_has_decided(patchset: Path, model: Path, place: Path) -> None:
    argv = command(patchset, model, place / "early", "--conversations", "64", "--stop-early")
    done = run(argv)
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert not line["partial"] and set(line["verdicts"].values()) == {"culprit", "exonerated"}
    report = json.loads((Path(line["run_dir"]) / "report.json").read_text())
    asked = {row["build"]: row["n_asked"] for row in report["missing"]}
    planned = 64 * PROBES * len(parse_rungs(RUNGS))
    assert asked["known-bad"] < asked["same"] < planned and asked["base"] < planned
    assert all(row["n_asked"] == row["n_planned"] for row in report["missing"])
    before = requests_seen(place)
    again = run([*argv, "--run-dir", line["run_dir"]])
    assert json.loads(again.stdout.splitlines()[-1])["verdicts"] == line["verdicts"]
    assert requests_seen(place) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "patchsets/reference.toml", "--recipe", "nosuch"], "nosuch"),
        (["eval", "patchsets/reference.toml", "--runs-dir", "README.md/runs"], "README.md is not a folder"),
        (["trace", "routed-scaling", "--sglang", "reference", "--quant", "fp8", "--all"], "--quant, --all cannot be"),
        (["trace", "routed-scaling", "--sglang", "reference", "--runner", "marlin"], "--runner cannot be given with"),
        (["trace", "routed-scaling", "--all", "--quant", "fp8"], "--quant cannot be given with --all"),
        (["trace", "routed-scaling", "--diff", "0.5.16", "0.5.17", "--sglang", "x"], "--sglang cannot be given with"),
        (["trace", "routed-scaling", "--diff", "reference", "0.5.17"], "--diff reference"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_read(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("longrecall.results.plan.find_model", lambda *given: pytest.fail("looked for the model"))
    done = CliRunner().invoke(build_app(arguments), arguments)
    assert done.exit_code == 2
    assert "longrecall: error: " in done.output and message in done.output


def test_a_diff_that_does_not_apply_is_named_before_the_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stale.diff").write_text(
        "--- a/runners/gold.py\n+++ b/runners/gold.py\n@@ -1,1 +1,1 @@\n-a line that never was\n+another\n"
    )
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\nengine = "reference"\n[[patch]]\nid = "stale"\ndiffs = ["stale.diff"]\n'
    )
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("longrecall.results.plan.find_model", lambda *given: pytest.fail("looked for the model"))
    arguments = ["eval", str(tmp_path / "mine.toml"), "--runs-dir", str(tmp_path / "runs")]
    done = CliRunner().invoke(build_app(arguments), arguments)
    assert done.exit_code == 2
    assert "stale.diff" in done.output and "runners/gold.py" in done.output
    assert not (tmp_path / "runs").exists()
