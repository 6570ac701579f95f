"""A campaign: builds are made and served, every planned question is asked of each, and the replies are judged.

plan      patchset, model folder, conversations, builds: everything that is decided before the first request
folder    results/runs/<UTC time>-<patchset>-<key>: the key is a hash of the plan, so that the same command finds
          its unfinished run and goes on with it
serve     one process per build, ready when it has generated a token; what each says of itself must be the same
          but for the named patch
ask       runners/replay.py, with the journal on the disk before and after every request
judge     results/report.py, from the run folder alone
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from longrecall.evals.cells import ARM_ORDER
from longrecall.evals.paired import min_conversations_any_time
from longrecall.evals.schema import VerdictConfig
from longrecall.evals.score import foreign_index, score_replay
from longrecall.needles.dataset import read_parquet, suite_hash, write_parquet
from longrecall.needles.plant import concat_twin, make_conversations, make_haystack
from longrecall.needles.recipes import recipe as named_recipe
from longrecall.needles.render import Ruler
from longrecall.needles.schema import Conversation
from longrecall.results import run_folder
from longrecall.results.early import EarlyStop
from longrecall.results.preflight import problem_of, too_short
from longrecall.results.schema import Campaign, Report
from longrecall.runners import inside
from longrecall.runners.builds import (
    BASE,
    BASE_AGAIN,
    ModelFolder,
    PreparedBuild,
    cache_dir,
    changed_keys,
    check_builds,
    given_builds,
    make_trees,
    prepare_builds,
    with_server_info,
    without_secrets,
)
from longrecall.runners.client import Endpoint, connect
from longrecall.runners.engines import Engine, engine_of
from longrecall.runners.gold import GoldScorer
from longrecall.runners.inside import Shape, look_inside
from longrecall.runners.journal import Journal, JournalError
from longrecall.runners.patchset import PatchsetError, content_hash, load_patchset, read_diffs
from longrecall.runners.processes import Server, ServerError, log_tail, stop_all
from longrecall.runners.prompts import Prompts, make_prompts
from longrecall.runners.replay import BuildGone, ReplayPlan, Reply, replay, unanswered
from longrecall.runners.schema import Arm, Build, PatchSet

DEFAULT_MARGIN = 0.10
_STALE_S = 3600.0
STOP = ("\n",)


class CampaignError(RuntimeError):
    """A campaign that could not be finished; what was answered is kept in its run folder."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `longrecall eval` was asked for."""

    patchset: Path
    rungs: tuple[int, ...] = (448, 1536)
    conversations: int = 24
    seed: int = 0
    recipe: str = "reference"
    only: tuple[str, ...] = ()
    """Patch ids to run; empty: all. Controls are always run."""
    parallel: int | None = None
    """Builds asked at the same time; None: as many as there are cores, one thread each."""
    threads: int | None = None
    servers_at_once: int | None = None
    """Builds served at the same time; None: as many as fit into memory."""
    servers_per_gpu: int = 1
    """Builds that share a GPU; each then needs a flag that bounds its memory (SGLang: --mem-fraction-static)."""
    runs_dir: Path = Path("results/runs")
    run_dir: Path | None = None
    fresh: bool = False
    model_folder: Path | None = None
    """Served weights and tokenizer; None: the reference model, made when it is not there."""
    block_size: int = 4
    max_tokens: int = 16
    repeats: int = 1
    arms: tuple[Arm, ...] = ("warm",)
    request_timeout_s: float = 300.0
    start_timeout_s: float | None = None
    """For a server's first token; None: the engine's own."""
    concurrency: int = 64
    """Most requests of one build open at a time."""
    gold_logprobs: bool = False
    """Ask for the right answer's log-probabilities after each reply."""
    stop_early: bool = False
    """Ask no more of a build once its e-values convict or exonerate it."""
    inside: int = 0
    """Conversations that are looked at from inside (runners/inside.py)."""
    in_process: bool | None = False
    """Measure the code of patches that lost recall (results/in_process.py); None: if the reference model is served."""
    stream: bool = False
    keep_servers: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything decided before the first request."""

    options: Options
    patchset: PatchSet
    engine: Engine
    model: ModelFolder
    conversations: tuple[Conversation, ...]
    builds: tuple[PreparedBuild, ...]
    campaign: Campaign
    key: str
    """Hash of all that decides what is asked of what; two runs with one key are the same experiment."""
    parallel: int
    prompts: Prompts
    """How this engine and model are to be asked."""


@dataclass
class Stages:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - before

    def elapsed(self) -> float:
        return time.monotonic() - self.started


class Watcher:
    """Told what happens; the default says nothing. `results/progress.py` has the one for a terminal."""

    def note(self, text: str) -> None:
        """One line for a reader: a stage, a warning, a conviction."""

    def begin(self, campaign: Campaign, planned: int, per_build: int) -> None:
        """The asking begins; `planned` replies in all."""

    def reply(self, build_id: str, rung: int, outcome: str, *, stored: bool) -> None:
        """One graded reply; `stored` when it comes from the journal of an earlier process."""

    def end(self) -> None:
        """The asking is over."""


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_plan(options: Options, stages: Stages, note: Callable[[str], None] = lambda text: None) -> Plan:
    """Decide everything: what is served, what is asked, in which order.

    Raises:
        ValueError: a patchset, diff, recipe or rung that cannot be used; the message names it.
    """
    patchset = load_patchset(options.patchset)
    engine = engine_of(patchset)
    patchset = _selected(patchset, options.only)
    _check_arms(options, engine)
    recipe = named_recipe(options.recipe)
    parallel = options.parallel or (cpu_count() if engine.launches else 2)
    threads = options.threads or max(1, cpu_count() // parallel)
    with stages.stage("builds_s"):  # a diff that does not apply is named before anything takes time
        trees = make_trees(patchset, engine, threads=threads) if engine.launches else None
    with stages.stage("model_s"):
        model = find_model(engine, options.model_folder, note)
    with stages.stage("conversations_s"):
        ruler = Ruler.from_folder(model.path)
        model = replace(model, tokenizer_hash=ruler.tokenizer_hash, template_hash=ruler.template_hash)
        note(f"planting {options.conversations} conversations, rungs {', '.join(map(str, options.rungs))}")
        haystack = make_haystack(recipe, ruler, options.seed)
        conversations = tuple(
            make_conversations(
                recipe, ruler=ruler, rungs=options.rungs, count=options.conversations, seed=options.seed,
                haystack=haystack,
            )
        )  # fmt: skip
        with_twins = conversations if "concat" in options.arms else ()
        twins = {item.conversation_id: concat_twin(item, haystack) for item in with_twins}
        prompts = make_prompts(ruler, twins, after_prompt=engine.begun_after_generation_prompt)
    margin = patchset.margin or DEFAULT_MARGIN
    if options.stop_early and options.conversations < (
        least := min_conversations_any_time(margin, VerdictConfig.alpha)
    ):
        note(
            f"--stop-early with {options.conversations} conversations can convict but exonerate nobody: at a margin of"
            f" {margin:g} that takes {least} at least"
        )
    with stages.stage("builds_s"):
        if trees is not None:
            prepared = prepare_builds(patchset, engine, model, threads=threads, trees=trees)
        else:
            prepared = given_builds(patchset)
    builds = tuple(item.build for item in prepared)
    suite = suite_hash(conversations)
    key = _key(patchset, builds, suite, options)
    now = datetime.now(UTC)
    campaign = Campaign(
        run_id=f"{now:%Y%m%d-%H%M%S}-{patchset.name}-{key[:8]}",
        suite_hash=suite,
        created=now.isoformat(timespec="seconds"),
        longrecall_version=_version(),
        longrecall_commit=_commit(),
        patchset=patchset,
        builds=builds,
        recipe=options.recipe,
        seed=options.seed,
        rungs=options.rungs,
        n_conversations=len(conversations),
        conversation_order=_shuffled([item.conversation_id for item in conversations], options.seed),
        block_size=options.block_size,
        arms=options.arms,
        repeats=options.repeats,
        max_tokens=options.max_tokens,
        verdict=VerdictConfig(margin=margin),
        onset_tokens=patchset.onset_tokens or engine.onset_tokens,
        concurrency=options.concurrency,
        gold_logprobs=options.gold_logprobs,
        stop_early=options.stop_early,
    )
    return Plan(
        options=options, patchset=patchset, engine=engine, model=model, conversations=conversations,
        builds=tuple(prepared), campaign=campaign, key=key, parallel=parallel, prompts=prompts,
    )  # fmt: skip


def _check_arms(options: Options, engine: Engine) -> None:
    """Raises ValueError for an arm, or log-probabilities, that this engine cannot give."""
    if "cold" in options.arms and not engine.capabilities.cache_salt:
        raise ValueError(f"arm cold: engine {engine.name!r} cannot keep one request's prefix from another (no salt)")
    if not set(options.arms) - {"mirrored"}:
        raise ValueError("arm mirrored is the first block asked again: it needs another arm, such as warm")
    if options.gold_logprobs and not engine.gold_route:
        raise ValueError(f"--gold-logprobs: engine {engine.name!r} gives no log-probabilities of prompt tokens")
    if options.in_process and engine.name != "reference":
        raise ValueError(f"--in-process: engine {engine.name!r} has no parts that can be measured here")
    if options.inside and not (engine.capabilities.prompt_logprobs and engine.capabilities.input_ids):
        raise ValueError(f"--inside: engine {engine.name!r} gives no log-probabilities of prompts sent as token ids")


def _selected(patchset: PatchSet, only: tuple[str, ...]) -> PatchSet:
    ids = {patch.patch_id for patch in patchset.patches}
    for name in only:
        if name not in ids:
            raise PatchsetError(f"{patchset.path}: no patch {name!r}; there is {', '.join(sorted(ids))}")
    if not only:
        return patchset
    kept = tuple(patch for patch in patchset.patches if patch.patch_id in only or patch.role != "suspect")
    return replace(patchset, patches=kept)


def find_model(engine: Engine, given: Path | None, note: Callable[[str], None]) -> ModelFolder:
    """The served model's folder: the one given, or the reference model, made when it is not there yet."""
    if given is not None:
        folder = given.expanduser()
        if not (folder / "tokenizer.json").is_file():
            raise CampaignError(f"{folder}: no model folder: it has no tokenizer.json")
    elif engine.name == "reference":
        note("reference model: checking its folder by hash (made once, in seconds)")
        folder = _reference_folder()
    elif engine.name == "llamacpp":
        from longrecall.runners.llamacpp_server import llamacpp_folder

        note("Gemma 3 270M for llama.cpp: checking its folder by hash (made once, in seconds)")
        folder = llamacpp_folder(cache_dir())
    elif engine.name in ("sglang", "vllm"):
        from longrecall.runners.sglang_model import sglang_folder

        note("Gemma 3 270M in HuggingFace's form: checking its folder by hash (made once, in half a minute)")
        folder = sglang_folder()
    else:
        raise ValueError(f"engine {engine.name!r} needs --model-folder: the served model's tokenizer and chat template")
    hashes = folder / "hashes.json"
    known = json.loads(hashes.read_text()) if hashes.is_file() else {}
    weights = known.get("model.safetensors") or known.get("model.gguf")
    if weights is None and (folder / "model.safetensors").is_file():
        with (folder / "model.safetensors").open("rb") as stream:
            weights = hashlib.file_digest(stream, "sha256").hexdigest()
    return ModelFolder(path=folder, weights_hash=weights, tokenizer_hash=None, template_hash=None)


def _reference_folder() -> Path:
    """The reference model's folder, from a process of its own: it takes a gigabyte while the weights are converted."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from longrecall.runners.reference.convert import reference_folder

    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(reference_folder).result()


def _shuffled(ids: list[str], seed: int) -> tuple[str, ...]:
    import random

    random.Random(f"order/{seed}").shuffle(ids)
    return tuple(ids)


def _key(patchset: PatchSet, builds: Sequence[Build], suite: str, options: Options) -> str:
    what = {
        "patchset": content_hash(patchset),
        "builds": [asdict(build) for build in builds],
        "suite": suite,
        "seed": options.seed,
        "block_size": options.block_size,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "arms": options.arms,
        "concurrency": options.concurrency,
        "gold_logprobs": options.gold_logprobs,
        "stop_early": options.stop_early,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _version() -> str:
    from longrecall.results.report import version

    return version()


def _commit() -> str | None:
    """Commit of the checkout this runs from, with "+" when it has changes; None outside a checkout."""
    import subprocess

    from longrecall.runners.engines import ROOT

    if not (ROOT / ".git").exists():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def open_run(plan: Plan, note: Callable[[str], None]) -> tuple[Path, Campaign]:
    """The run folder of a plan: the unfinished one of the same plan, or a new one with campaign and conversations."""
    options = plan.options
    existing = options.run_dir if options.run_dir and (options.run_dir / run_folder.CAMPAIGN).is_file() else None
    if existing is None and options.run_dir is None and not options.fresh:
        existing = unfinished(options.runs_dir, plan.key)
    if existing is not None:
        campaign = run_folder.load_campaign(existing)
        stored = _key(plan.patchset, [_without_info(b) for b in campaign.builds], campaign.suite_hash, options)
        if stored != plan.key:
            raise CampaignError(
                f"{existing} holds another campaign (patchset, sources, packages, conversations or settings differ);"
                " give another --run-dir, or leave it out"
            )
        run_folder.load_timing(existing)  # a damaged one is named now, not after hours of asking
        note(f"going on with {existing}")
        return existing, campaign
    run_dir = options.run_dir or options.runs_dir / plan.campaign.run_id
    campaign = replace(plan.campaign, run_id=run_dir.name)
    made = run_dir.with_name(f".{run_dir.name}.tmp")
    for stale in run_dir.parent.glob(".*.tmp"):
        if time.time() - stale.stat().st_mtime > _STALE_S:  # left by a process that was killed while making it
            shutil.rmtree(stale, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        write_parquet(plan.conversations, made / run_folder.CONVERSATIONS)
        if plan.prompts.twins:
            write_parquet(plan.prompts.twins.values(), made / run_folder.CONCAT)
        for patch in plan.patchset.patches:
            for name, text in read_diffs(plan.patchset, patch):
                if not Path(name).is_absolute() and ".." not in Path(name).parts:
                    run_folder.write_bytes(made / name, text.encode())
        run_folder.write_campaign(made, campaign)
        if run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()
        os.rename(made, run_dir)
    except OSError as problem:
        shutil.rmtree(made, ignore_errors=True)
        raise CampaignError(f"{run_dir}: the run folder cannot be made: {problem.strerror or problem}") from None
    except ValueError as problem:
        shutil.rmtree(made, ignore_errors=True)
        raise CampaignError(f"{run_dir}: the run folder cannot be made: {problem}") from None
    return run_dir, campaign


def unfinished(runs_dir: Path, key: str) -> Path | None:
    """The newest run of this key that has no whole report yet."""
    for path in sorted(runs_dir.glob(f"*-{key[:8]}"), reverse=True):
        if not (path / run_folder.CAMPAIGN).is_file():
            continue
        report = path / run_folder.REPORT_JSON
        said = run_folder.read_json(report) if report.is_file() else None
        if not isinstance(said, dict) or said.get("partial"):
            return path
    return None


def _without_info(build: Build) -> Build:
    return replace(build, manifest=replace(build.manifest, server_info=None)) if build.manifest else build


class Grades:
    """Scores replies as they come and knows the first patch that is proved guilty."""

    def __init__(
        self, campaign: Campaign, conversations: Sequence[Conversation], watcher: Watcher, stages: Stages
    ) -> None:
        self._watcher, self._stages = watcher, stages
        self._conversations = {item.conversation_id: item for item in conversations}
        self._foreign = foreign_index(conversations)
        self._probes = {c.conversation_id: {p.probe_id: p for p in c.probes} for c in conversations}
        self._asks = {c.conversation_id: {(a.rung, a.probe_id): a for a in c.asks} for c in conversations}
        self._rungs = campaign.rungs
        self._arm = next(arm for arm in ARM_ORDER if arm in campaign.arms)
        self.early = EarlyStop(campaign, conversations)
        self._candidates, self._running = self.early.candidates, self.early.running
        self._said: dict[str, str] = {}

    def stored(self, replays: Sequence[Any]) -> None:
        for item in replays:
            self._take(item, stored=True)

    def __call__(self, reply: Reply) -> None:
        self._take(reply.replay, stored=False)

    def _take(self, item: Any, *, stored: bool) -> None:
        name = item.conversation_id
        score = score_replay(
            item,
            self._conversations[name],
            self._asks[name][item.rung, item.probe_id],
            self._probes[name][item.probe_id],
            self._foreign[name],
        )
        if item.arm == self._arm:
            self._running.add(score)
        self._watcher.reply(item.build_id, item.rung, score.outcome, stored=stored)
        for build in self._candidates if item.build_id == BASE else [item.build_id]:
            if build in self._candidates:
                self._announce(build)

    def _announce(self, build: str) -> None:
        decision = self._running.decision(build)
        if decision is None or self._said.get(build) == decision:
            return
        first = "culprit" not in self._said.values() and decision == "culprit"
        self._said[build] = decision
        if decision == "culprit":
            worst = max((self._running.cell(build, rung) for rung in self._rungs), key=lambda cell: cell.e_loss)
            after = f"{self._stages.elapsed():.0f} s"
            if first:
                self._stages.seconds["first_conviction_s"] = self._stages.elapsed()
            self._watcher.note(
                f"{'first ' if first else ''}conviction after {after}: {build} loses recall at {worst.rung} tokens"
                f" ({_pct(worst.recall_baseline)} -> {_pct(worst.recall)}, {worst.n_conversations} conversations,"
                f" e-value {worst.e_loss:.3g}, valid at any time; subject to the controls)"
            )


def _pct(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.0f} %"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished (or broken off) campaign."""

    run_dir: Path
    report: Report
    gone: Mapping[str, str]
    """Builds whose server ended, with the message."""


def run_campaign(options: Options, watcher: Watcher) -> Outcome:
    """Plan, serve, ask, judge.

    Raises:
        ValueError: something asked for cannot be used.
        RuntimeError: a server, the journal or the disk failed; what was answered is kept and the same command goes on.
    """
    _check_writable(options.run_dir or options.runs_dir / "run")
    stages = Stages()
    plan = make_plan(options, stages, watcher.note)
    run_dir, campaign = open_run(plan, watcher.note)
    if not any(build.role == "positive-control" for build in campaign.builds):
        watcher.note(
            f'{plan.patchset.path} has no patch with role = "positive-control": without a build that is known to lose'
            " recall nothing is exonerated"
        )
    try:
        gone = asyncio.run(_serve_and_ask(plan, run_dir, campaign, stages, watcher))
    finally:
        _write_timing(run_dir, stages)
    if options.inside:
        _write_inside(plan, run_dir, run_folder.load_campaign(run_dir))
    from longrecall.results.report import write_reports

    watcher.note("judging and writing the reports")
    report = write_reports(run_dir)
    served_here = plan.engine.name == "reference" and options.model_folder is None
    if options.in_process or (options.in_process is None and served_here and not report.partial):
        from longrecall.results.in_process import explain_losses

        with stages.stage("in_process_s"):
            found = explain_losses(run_dir, plan.model, watcher.note)
        if found:
            run_folder.write_json(
                run_dir / run_folder.TIMING,
                run_folder.load_timing(run_dir) | {"in_process_s": round(stages.seconds["in_process_s"], 3)},
            )
            report = write_reports(run_dir)
    return Outcome(run_dir=run_dir, report=report, gone=gone)


def _check_writable(folder: Path) -> None:
    """Raise ValueError, before anything is hashed or served, when a run folder cannot be made there."""
    if not folder.name:
        raise ValueError(f"run folder {str(folder)!r} has no name of its own; give a new folder below it")
    place = folder
    while not place.exists() and place.parent != place:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{folder}: the run folder cannot be made: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"{folder}: the run folder cannot be made: {place} is not writable")


def _write_inside(plan: Plan, run_dir: Path, campaign: Campaign) -> None:
    """inside.json and inside-evidence.json, from the arrays in the run folder."""
    names = [build.build_id for build in campaign.builds]
    summary = inside.summarise(run_dir, names, BASE, BASE_AGAIN, campaign.onset_tokens)
    run_folder.write_json(run_dir / inside.SUMMARY, summary)
    info = campaign.builds[0].manifest.server_info if campaign.builds[0].manifest else None
    shape = Shape.of(plan.model.path, info, campaign.onset_tokens)
    run_folder.write_json(run_dir / inside.EVIDENCE, inside.observations(run_dir, summary, shape))


def _write_timing(run_dir: Path, stages: Stages) -> None:
    path = run_dir / run_folder.TIMING
    before = run_folder.load_timing(run_dir)
    # A run that was broken off adds up: its stages were paid for too.
    total = {name: round(before.get(name, 0.0) + value, 3) for name, value in stages.seconds.items()}
    if "first_conviction_s" in before:
        total["first_conviction_s"] = before["first_conviction_s"]
    total["wall_s"] = round(before.get("wall_s", 0.0) + stages.elapsed(), 3)
    run_folder.write_json(path, before | total)


async def _serve_and_ask(
    plan: Plan, run_dir: Path, campaign: Campaign, stages: Stages, watcher: Watcher
) -> dict[str, str]:
    """Ask what the journal lacks; servers are up only while they are needed, and never left behind."""
    journal = Journal(run_dir)
    servers: dict[str, Server] = {}
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    interrupted: list[int] = []

    def interrupt(number: int) -> None:
        interrupted.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread (a test)
            loop.add_signal_handler(number, interrupt, number)
    try:
        return await _ask_all(plan, run_dir, campaign, journal, servers, stages, watcher)
    except asyncio.CancelledError:
        if not interrupted:
            raise
        raise CampaignError(
            f"interrupted by {signal.Signals(interrupted[0]).name} with {len(journal.answered)} answers kept in"
            f" {run_dir}; the same command goes on from there"
        ) from None
    finally:
        watcher.end()
        with stages.stage("stop_s"):
            stop_all(list(servers.values()))
        journal.close()


async def _ask_all(
    plan: Plan,
    run_dir: Path,
    campaign: Campaign,
    journal: Journal,
    servers: dict[str, Server],
    stages: Stages,
    watcher: Watcher,
) -> dict[str, str]:
    options = plan.options
    conversations = read_parquet(run_dir / run_folder.CONVERSATIONS)
    unknown = set(campaign.conversation_order) ^ {item.conversation_id for item in conversations}
    if unknown:
        raise CampaignError(
            f"{run_dir}: {min(unknown)} stands in only one of {run_folder.CAMPAIGN} and {run_folder.CONVERSATIONS};"
            " give --fresh for a new run"
        )
    replay_plan = ReplayPlan(
        run_id=campaign.run_id,
        build_ids=tuple(build.build_id for build in campaign.builds),
        conversations={item.conversation_id: item for item in conversations},
        conversation_order=campaign.conversation_order,
        block_size=campaign.block_size,
        arms=campaign.arms,
        repeats=campaign.repeats,
        max_tokens=campaign.max_tokens,
        stop=STOP,
        seed=campaign.seed,
        first=tuple(build.build_id for build in campaign.builds if build.role in ("base", "positive-control")),
        conversations_at_once=plan.engine.ladders_at_once or campaign.block_size,
        whole_ladder=plan.engine.shares_prefill,
        in_flight=campaign.concurrency,
    )
    planned = replay_plan.n_planned
    if journal.in_flight:
        watcher.note(
            f"{len(journal.in_flight)} requests were in flight when the run was broken off; their answers are lost, and"
            " they are asked again"
        )
    strange = journal.answered - {key for name in replay_plan.build_ids for key in replay_plan.keys(name)}
    if strange:
        raise CampaignError(
            f"{run_dir / run_folder.REPLAYS}: {'/'.join(map(str, min(strange, key=str)))} was never planned by"
            f" {run_folder.CAMPAIGN}; give --fresh for a new run"
        )
    grades = Grades(campaign, conversations, watcher, stages)
    watcher.begin(campaign, planned, planned // len(campaign.builds))
    grades.stored(run_folder.load_replays(run_dir))
    if len(journal.answered) >= planned:
        watcher.note("every planned question is answered already; nothing is asked")
        return {}
    gone: dict[str, str] = {}
    gold = None
    if campaign.gold_logprobs and plan.engine.gold_route and plan.prompts.encode is not None:
        gold = GoldScorer(route=plan.engine.gold_route, encode=plan.prompts.encode)
    left = [item for item in plan.builds if unanswered(replay_plan, item.build.build_id, journal.answered)]
    if campaign.stop_early:
        left = [item for item in left if not grades.early.finished(item.build.build_id)]
        if not left:
            watcher.note("every patch is decided already; nothing is asked")
            return {}
    waves = plan_waves(plan, left, watcher.note)
    infos = {
        build.build_id: build.manifest.server_info
        for build in campaign.builds
        if build.manifest is not None and build.manifest.server_info is not None
    }
    for number, wave in enumerate(waves):
        ids = [prepared.build.build_id for prepared in wave]
        async with AsyncExitStack() as stack:
            with stages.stage("start_s"):
                campaign, failed = await _start(plan, wave, run_dir, campaign, servers, infos, watcher)
            endpoints: dict[str, Endpoint] = {}
            longest: dict[str, int | None] = {}
            for prepared in wave:
                build_id = prepared.build.build_id
                if build_id in failed:
                    continue
                url = servers[build_id].url if build_id in servers else prepared.endpoint
                assert url is not None
                model, longest[build_id] = await _served_model(build_id, url)
                endpoints[build_id] = await stack.enter_async_context(
                    connect(
                        build_id, url, model=model, timeout_s=options.request_timeout_s,
                        stream=options.stream, echoes_begun_answer=plan.engine.echoes_begun_answer,
                        begun_after_generation_prompt=plan.engine.begun_after_generation_prompt,
                        returns=plan.engine.returns(_launch_args(plan, build_id)),
                        api_key="none" if servers else os.environ.get("OPENAI_API_KEY", "none"),
                    )
                )  # fmt: skip

            def check_alive(build_id: str) -> None:
                server = servers.get(build_id)
                try:
                    if server is not None:
                        server.check_alive()
                except ServerError as problem:
                    raise BuildGone(str(problem)) from None

            by_flag = max(plan.engine.page_tokens(_launch_args(plan, name)) for name in ids)
            page = max(by_flag, page_tokens([infos.get(name) for name in ids]))
            prompts = replace(plan.prompts, page_tokens=page)
            for build_id, endpoint in endpoints.items():
                wrong = too_short(longest[build_id], campaign.rungs[-1], campaign.max_tokens) or await problem_of(
                    endpoint, prompts, plan.conversations[0], str(plan.model.path)
                )
                if wrong is not None:
                    tail = f"; its log ends:\n{log_tail(servers[build_id].log)}" if build_id in servers else ""
                    failed[build_id] = f"build {build_id} at {endpoint.root}: {wrong}{tail}"
            _without(failed, watcher)
            gone |= failed
            ids = [name for name in ids if name not in failed]
            with stages.stage("replay_s"):
                try:
                    result = await replay(
                        replay_plan, endpoints, journal, parallel=plan.parallel, prompts=prompts, gold=gold,
                        check_alive=check_alive, on_reply=grades, only=ids,
                        finished=grades.early.finished if campaign.stop_early else lambda build_id: False,
                    )  # fmt: skip
                except* JournalError as problems:
                    raise CampaignError(str(_first(problems))) from None
            gone |= result.gone
            for said, times in (gold.problems if gold is not None else {}).items():
                watcher.note(f"{times} right answers are without log-probabilities: {said}")
            if options.inside:
                with stages.stage("inside_s"):
                    for build_id in (name for name in ids if name not in gone):
                        wrong = await look_inside(
                            endpoints[build_id], prompts, conversations, options.inside, run_dir,
                            Shape.of(plan.model.path, infos.get(build_id), campaign.onset_tokens), campaign.max_tokens,
                        )  # fmt: skip
                        if wrong is not None:
                            watcher.note(f"build {build_id} cannot be looked at from inside: {wrong}")
            if plan.engine.statistics_path:
                alive = [servers[name].url for name in ids if name in servers and servers[name].exit_code() is None]
                for name, value in (await server_statistics(alive, plan.engine.statistics_path)).items():
                    stages.seconds[name] = stages.seconds.get(name, 0.0) + value
            for build_id, message in result.gone.items():
                watcher.note(f"build {build_id} is incomplete: {message}")
            if options.keep_servers and number == len(waves) - 1:
                watcher.end()
                for build_id in ids:
                    if build_id in servers:
                        watcher.note(f"{build_id} serves at {servers[build_id].url}/v1")
                watcher.note("servers are kept until Ctrl-C")
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        if number < len(waves) - 1:
            with stages.stage("stop_s"):
                stop_all([servers.pop(name) for name in ids if name in servers])
    return gone


def plan_waves(
    plan: Plan, builds: Sequence[PreparedBuild], note: Callable[[str], None]
) -> list[Sequence[PreparedBuild]]:
    """The builds served at the same time: all of them where memory allows, else in groups, one after another."""
    at_once = plan.options.servers_at_once
    engine = plan.engine
    if at_once is None and engine.launches and engine.server_mb:
        import psutil

        available_mb = psutil.virtual_memory().available // 2**20
        at_once = max(1, int(available_mb - engine.shared_mb) // engine.server_mb)
        if at_once < len(builds):
            note(
                f"{available_mb:,} MB of memory are free and a server takes {engine.server_mb:,}: {at_once} of"
                f" {len(builds)} builds are served at a time, so they are not interleaved block by block"
            )
    by_gpus = engine.builds_at_once(plan.patchset)
    if by_gpus is not None:
        by_gpus *= plan.options.servers_per_gpu
    if by_gpus is not None and by_gpus < (at_once or len(builds)):
        note(f"the GPUs here serve {by_gpus} of {len(builds)} builds at a time")
        at_once = by_gpus
    at_once = at_once or len(builds)
    return [builds[start : start + at_once] for start in range(0, len(builds), at_once)]


async def _start(
    plan: Plan,
    wave: Sequence[PreparedBuild],
    run_dir: Path,
    campaign: Campaign,
    servers: dict[str, Server],
    infos: dict[str, dict[str, object]],
    watcher: Watcher,
) -> tuple[Campaign, dict[str, str]]:
    """Start the servers of a wave, wait for each one's first token, and compare what each says of itself.

    Returns the campaign with what they say, and the builds that did not come up, with the message; the others go on.
    Without the base there is nothing to compare with, and the campaign ends.
    """
    started = []
    for place, prepared in enumerate(wave):
        if prepared.endpoint is None:
            build_id = prepared.build.build_id
            folder = run_dir.resolve() / "builds" / build_id
            servers[build_id] = plan.engine.server(
                prepared, plan.patchset, folder, place // plan.options.servers_per_gpu
            )
            started.append(servers[build_id])
    if started:
        watcher.note(f"starting {len(started)} servers")
    failed: dict[str, str] = {}
    for server in started:
        try:
            server.start()
        except ServerError as problem:
            failed[server.name] = str(problem)
    timeout_s = plan.options.start_timeout_s or plan.engine.start_timeout_s
    waited = [server for server in started if server.name not in failed]
    for server, outcome in zip(
        waited,
        await asyncio.gather(*(item.wait_ready(timeout_s) for item in waited), return_exceptions=True),
        strict=True,
    ):
        if isinstance(outcome, ServerError):
            failed[server.name] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    if BASE in failed:
        raise CampaignError(failed[BASE])
    stop_all([servers.pop(name) for name in failed])
    started = [server for server in started if server.name not in failed]
    if plan.engine.capabilities.server_info:
        for server in started:
            parts = {
                name: await server_info(server.name, url, plan.engine.info_path)
                for name, url in server.info_urls().items()
            }
            info: dict[str, object] = {"servers": parts} if "" not in parts else parts[""]
            logged = plan.engine.told_by_log(server.log_of_this_start())
            info |= {"log": logged} if logged else {}
            before = infos.get(server.name, info)
            changed = changed_keys(before, info, plan.engine)
            if changed:
                raise CampaignError(
                    f"build {server.name} is not the server this run began with: {'; '.join(changed)};"
                    " give --fresh for a new run"
                )
            infos[server.name] = info
            asked_for = _launch_args(plan, server.name)
            against = [line for part in parts.values() for line in plan.engine.contradictions(asked_for, part)]
            if against:
                raise CampaignError(f"build {server.name} does not run what it was asked to run: {'; '.join(against)}")
    told = tuple(with_server_info(prepared.build, infos.get(prepared.build.build_id)) for prepared in plan.builds)
    asked = [build for build in told if not infos or build.build_id in infos]
    check_builds(asked, plan.patchset, plan.engine)
    for build in asked:
        run_folder.write_json(run_dir / "builds" / build.build_id / "manifest.json", build)
    campaign = replace(campaign, builds=told)
    run_folder.write_campaign(run_dir, campaign)
    return campaign, failed


def _without(failed: Mapping[str, str], watcher: Watcher) -> None:
    """Say which builds are left out; raises CampaignError when the base is one of them."""
    if BASE in failed:
        raise CampaignError(failed[BASE])
    for build_id, message in failed.items():
        watcher.note(f"build {build_id} is left out, the others go on: {message}")


def page_tokens(infos: Sequence[Mapping[str, object] | None]) -> int:
    """The largest cache page that any of these servers reports, in tokens."""
    sizes = [info.get("page_size") for info in infos if info is not None]
    return max((size for size in sizes if isinstance(size, int) and size > 0), default=1)


def _launch_args(plan: Plan, build_id: str) -> tuple[str, ...]:
    """The launch arguments in a build's manifest."""
    builds = {item.build.build_id: item.build for item in plan.builds}
    manifest = builds[build_id].manifest
    return manifest.args if manifest is not None else ()


def _first(problem: BaseException) -> BaseException:
    """The first of a task group's exceptions: one clear message, not a tree of them."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem


async def server_info(build_id: str, url: str, path: str) -> dict[str, object]:
    """What a server says of itself."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            reply = await client.get(path)
            info = reply.json() if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError) as problem:
        raise CampaignError(f"build {build_id}: {path} cannot be read: {problem!r}") from None
    if not isinstance(info, dict):
        raise CampaignError(f"build {build_id}: {path} answered {reply.status_code}: {reply.text[:200]!r}")
    return without_secrets(info)


STATISTICS = ("prefill_tokens", "decode_tokens", "cached_tokens", "prefill_s", "decode_s", "busy_s")


async def server_statistics(urls: Sequence[str], path: str) -> dict[str, float]:
    """Sums over the servers of what they have done, and `inside_model_s`; one that does not say is left out."""
    total: dict[str, float] = {}
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        for url in urls:
            try:
                told = (await client.get(url + path)).json()
            except (httpx.HTTPError, ValueError):
                continue
            for name in STATISTICS:
                if isinstance(told.get(name), int | float):
                    total[name] = total.get(name, 0.0) + told[name]
    if "prefill_s" in total and "decode_s" in total:
        total["inside_model_s"] = total["prefill_s"] + total["decode_s"]
    return total


async def _served_model(build_id: str, url: str) -> tuple[str, int | None]:
    """The name of the model that a server lists first, and its longest context in tokens where it says so."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            reply = await client.get("/v1/models")
            listed = reply.json()["data"][0]
            longest = listed.get("max_model_len")
            return str(listed["id"]), longest if isinstance(longest, int) and longest > 0 else None
    except httpx.HTTPError as problem:
        raise CampaignError(f"build {build_id}: nobody answers at {url}: {problem!r}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CampaignError(
            f"build {build_id}: {url} is not an OpenAI-compatible server: /v1/models answered {reply.status_code}:"
            f" {reply.text[:120]!r}"
        ) from None


def exit_code(report: Report, fail_on: frozenset[str], gone: Mapping[str, str]) -> int:
    """0 done; 3 incomplete or controls failed; 1 a suspect is a culprit, 4 one is inconclusive (when asked for)."""
    from longrecall.evals.controls import campaign_blocker

    controls = [report.controls[name] for name in ("aa", "positive", "negative")]
    if report.partial or gone or campaign_blocker(controls) is not None:
        return 3
    suspects = {build.build_id for build in report.builds if build.role == "suspect"}
    found = {verdict.verdict for verdict in report.verdicts if verdict.patch in suspects}
    if "culprit" in found and "culprit" in fail_on:
        return 1
    return 4 if "inconclusive" in found and "inconclusive" in fail_on else 0
