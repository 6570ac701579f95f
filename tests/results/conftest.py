"""A simulated campaign for the tests of results/: real records, real grading, replies by a seeded model of recall.

Builds: base, base-again, a known-bad control, a known-harmless control, one patch that loses past the onset, one that
loses everywhere, and innocent ones. Nothing here is used by the product.
"""

import fcntl
import json
import os
import random
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longrecall.evals.schema import VerdictConfig
from longrecall.needles.dataset import write_parquet
from longrecall.needles.schema import Ask, Conversation, Fact, Probe, Turn
from longrecall.results import run_folder
from longrecall.results.schema import Campaign
from longrecall.runners.journal import encode_replay
from longrecall.runners.schema import Build, Manifest, Patch, PatchSet, Replay, Response

NAMES = "Ada Boris Chen Dara Emil Farah Goro Hana Iris Jonas Kofi Lena Mara Nils Oona Petra".split()
ATTRIBUTES = ("locker code", "badge number", "parking permit", "radio call number")


class Loss(NamedTuple):
    """How a build differs: points of recall lost below and above the onset."""

    below: float
    above: float


@dataclass(frozen=True)
class Simulated:
    """A campaign's inputs."""

    campaign: Campaign
    conversations: list[Conversation]
    replays: list[Replay]
    onset: int = 512
    extra: dict[str, object] = field(default_factory=dict)


def make_conversation(index: int, rungs: Sequence[int], n_probes: int, seed: int) -> Conversation:
    rng = random.Random(seed * 100_003 + index)
    attribute = rng.choice(ATTRIBUTES)
    turns, facts, probes = [], [], []
    for i in range(n_probes):
        name = f"{NAMES[i % len(NAMES)]}{'' if i < len(NAMES) else i}"
        value = f"{rng.randrange(10_000, 100_000)}"
        at = len(turns)
        turns += [
            Turn(
                turn_index=at,
                role="user",
                content=f"Please note: the {attribute} of {name} is {value}.",
                fact_ids=(f"f{i}",),
            ),
            Turn(turn_index=at + 1, role="assistant", content=f"Noted, the {attribute} of {name} is {value}."),
            Turn(
                turn_index=at + 2,
                role="user",
                content="How was the harbour this morning? " + "The boats came in late. " * 6,
            ),
            Turn(turn_index=at + 3, role="assistant", content="Grey and calm. " + "The gulls sat on the sheds. " * 5),
        ]
        facts.append(Fact(fact_id=f"f{i}", entity=name, attribute=attribute, value=value, kind="single", turn_index=at))
        probes.append(
            Probe(
                probe_id=f"p{i}",
                kind="single",
                question=f"What is the {attribute} of {name}?",
                gold=value,
                live_fact=f"f{i}",
                answer_prefix=f"The {attribute} of {name} is",
            )
        )
    values = [f.value for f in facts]
    probes = [replace(p, distractor_values=tuple(v for v in values if v != p.gold)) for p in probes]
    asks = [
        Ask(
            rung=rung,
            probe_id=probe.probe_id,
            turn_end=len(turns),
            tail=(Turn(turn_index=len(turns), role="user", content=probe.question),),
            prompt_tokens=rung,
            depth_pct=min(99.0, 100.0 * (i + 0.5) / n_probes * min(rungs) / rung + 5),
            distance_tokens=rung - 40 * i - 30,
            distance_turns=len(turns) - 4 * i,
        )
        for rung in rungs
        for i, probe in enumerate(probes)
    ]
    return Conversation(
        conversation_id=f"c{index:04d}",
        recipe="reference",
        seed=seed,
        tokenizer_hash="t" * 12,
        template_hash="m" * 12,
        rungs=tuple(rungs),
        turns=tuple(turns),
        facts=tuple(facts),
        probes=tuple(probes),
        asks=tuple(asks),
    )


def reply_text(rng: random.Random, probe: Probe, right: bool) -> str:
    """What the simulated model says: the value and a short run-on, or one of several kinds of wrong."""
    if right:
        return f" {probe.gold}. Is there anything else?"
    kind = rng.random()
    if kind < 0.45 and probe.distractor_values:
        return f" {rng.choice(probe.distractor_values)}."
    if kind < 0.8:
        return f" {probe.gold[:3]}{rng.randrange(10)}{probe.gold[4]}."
    if kind < 0.9:
        return " not something I can recall from our conversation."
    return ""


LOSSES = {
    "base": Loss(0, 0),
    "base-again": Loss(0, 0),
    "topk-256": Loss(0, 0.45),
    "noop": Loss(0, 0),
    "index-rotation-one-sided": Loss(0, 0.3),
    "hash-topk-double-scaling": Loss(0.22, 0.25),
    "index-keys-fp8": Loss(0, 0.004),
    "mhc-bf16": Loss(0, 0),
}
ROLES = {"base": "base", "base-again": "aa", "topk-256": "positive-control", "noop": "negative-control"}


def simulate(
    *,
    conversations: int = 40,
    probes: int = 8,
    rungs: Sequence[int] = (448, 1024, 2048),
    losses: Mapping[str, tuple[float, float]] | None = None,
    seed: int = 1,
    flips: float = 0.01,
    say: Callable[[str, str], str] | None = None,
    run_id: str = "20261129-140233-reference",
) -> Simulated:
    """A campaign in which build b loses `losses[b]` points; `say(build, text)` may replace any reply."""
    losses = LOSSES if losses is None else losses
    suite = [make_conversation(i, rungs, probes, seed) for i in range(conversations)]
    rng = random.Random(seed)
    replays: list[Replay] = []
    for conversation in suite:
        ease = min(1.0, max(0.5, rng.gauss(0.88, 0.06)))
        for ask in conversation.asks:
            probe = next(p for p in conversation.probes if p.probe_id == ask.probe_id)
            luck = rng.random()
            for build, (below, above) in losses.items():
                lost = above if ask.rung > 512 else below
                right = luck < ease - lost - 0.02 * (ask.rung > 1500)
                if rng.random() < flips:
                    right = not right
                text = reply_text(rng, probe, right)
                if say is not None:
                    text = say(build, text)
                replays.append(
                    Replay(
                        run_id=run_id,
                        build_id=build,
                        conversation_id=conversation.conversation_id,
                        probe_id=probe.probe_id,
                        rung=ask.rung,
                        arm="warm",
                        repeat=0,
                        send_order=len(replays),
                        response=Response(
                            text=text,
                            finish_reason="stop",
                            prompt_tokens=ask.prompt_tokens,
                            cached_tokens=ask.prompt_tokens - 24,
                            completion_tokens=8,
                            e2e_ms=40.0 + rng.random(),
                        ),
                    )
                )
    patches = tuple(
        Patch(
            patch_id=build,
            title=build.replace("-", " "),
            role="suspect" if build not in ROLES else ROLES[build],  # type: ignore[arg-type]
            diffs=(f"patches/{build}.diff",),
            expect="culprit" if loss[1] > 0.1 else "exonerated",
        )
        for build, loss in losses.items()
        if build not in ("base", "base-again")
    )
    builds = tuple(
        Build(
            build_id=build,
            patch_ids=() if build.startswith("base") else (build,),
            role=ROLES.get(build, "suspect"),  # type: ignore[arg-type]
            manifest=Manifest(
                source_hash="5e" * 32,
                tree_hash=("5e" if build.startswith("base") else f"{i:02x}") * 32,
                diff_hash=None if build.startswith("base") else f"{i + 64:02x}" * 32,
                args=("--threads", "1"),
                env={"OMP_NUM_THREADS": "1"},
                packages={"torch": "2.13.0", "numpy": "2.3.1"},
                weights_hash="9f" * 32,
                server_info={"model": "reference", "index_topk": 512},
            ),
        )
        for i, build in enumerate(losses)
    )
    campaign = Campaign(
        run_id=run_id,
        suite_hash=f"{seed:02x}" * 32,
        created="2026-11-29T14:02:33+00:00",
        longrecall_version="0.1.0",
        longrecall_commit="b1e6904" + "0" * 33,
        patchset=PatchSet(name="reference", path="patchsets/reference.toml", engine="reference", patches=patches),
        builds=builds,
        recipe="reference",
        seed=seed,
        rungs=tuple(rungs),
        n_conversations=conversations,
        conversation_order=tuple(c.conversation_id for c in suite),
        block_size=4,
        arms=("warm",),
        repeats=1,
        max_tokens=16,
        verdict=VerdictConfig(),
        onset_tokens=512,
    )
    return Simulated(campaign, suite, replays)


def write_run(run_dir: Path, campaign: Simulated) -> Path:
    """The simulated campaign as a run folder, before any report."""
    run_dir.mkdir(parents=True)
    run_folder.write_campaign(run_dir, campaign.campaign)
    write_parquet(campaign.conversations, run_dir / run_folder.CONVERSATIONS)
    (run_dir / run_folder.REPLAYS).write_bytes(b"".join(encode_replay(replay) for replay in campaign.replays))
    return run_dir


@pytest.fixture(scope="session")
def run_writer() -> Callable[[Path, Simulated], Path]:
    """`write_run`."""
    return write_run


@pytest.fixture(scope="session")
def simulated() -> Callable[..., Simulated]:
    """`simulate`, for tests that want their own sizes."""
    return simulate


@pytest.fixture(scope="session")
def campaign40() -> Simulated:
    """The default simulated campaign: 40 conversations × 8 probes × 3 rungs × 8 builds."""
    return simulate()


class Page:
    """One tab of a headless Chromium, driven over the DevTools protocol."""

    def __init__(self, browser: "Chromium", session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        """Console errors, uncaught exceptions and policy violations."""
        self.requests: list[str] = []
        """Every URL asked for, the page itself first."""

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def see(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("text")))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {parameters['message']}")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """One key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text * (kind == "keyDown"),
            )


class Chromium:
    """A headless Chromium over a pipe: no port, no driver, nothing to install but the browser."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        # numbers far from 3 and 4, so that the dup2 below overwrites neither
        inner = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (to_browser[0], from_browser[1])]
        for fd in (to_browser[0], from_browser[1]):
            os.close(fd)

        def wire() -> None:
            os.dup2(inner[0], 3)
            os.dup2(inner[1], 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        self._process = subprocess.Popen(
            [executable, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=wire,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in inner:
            os.close(fd)
        self._out, self._in = to_browser[1], from_browser[0]
        self._buffer = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer in time")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("Chromium went away")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)  # type: ignore[no-any-return]

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """One protocol call; events that come before its answer go to their pages."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]  # type: ignore[no-any-return]
            self._event(answer)

    def _event(self, message: dict[str, Any]) -> None:
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.see(message["method"], message["params"])

    def open(self, path: Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> Page:
        """A new tab with the file loaded; scripts, fonts and layout have settled."""
        return self.open_url(path.absolute().as_uri(), dark=dark, width=width, height=height)

    def open_url(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 900) -> Page:
        """As `open`, for any address."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", features=scheme)
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.call("Page.navigate", url=url)
        loaded = "document.readyState === 'complete' ? done(1) : addEventListener('load', () => done(1))"
        page.js(f"new Promise(done => {loaded}).then(() => document.fonts.ready).then(() => 1)")
        return page

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=60)
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A running headless Chromium; tests that need one are skipped where none is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    executable = next((found for name in names if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip(f"no Chromium on this machine (looked for {', '.join(names)})")
    running = Chromium(executable, tmp_path_factory.mktemp("chromium"))
    yield running
    running.close()
