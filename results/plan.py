"""Everything that is decided before the first request: patchset, model folder, conversations, builds, and their key.

The key is a hash of all that decides what is asked of what: the same command finds its unfinished run by it.
"""

import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from longrecall.evals.paired import min_conversations_any_time
from longrecall.evals.schema import VerdictConfig
from longrecall.needles.dataset import suite_hash
from longrecall.needles.plant import concat_twin, make_conversations, make_haystack
from longrecall.needles.recipes import recipe as named_recipe
from longrecall.needles.render import Ruler
from longrecall.needles.schema import Conversation
from longrecall.results.preflight import reply_tokens
from longrecall.results.report import version
from longrecall.results.schema import Campaign
from longrecall.results.watching import Stages
from longrecall.runners.builds import ModelFolder, PreparedBuild, cache_dir, given_builds, make_trees, prepare_builds
from longrecall.runners.engines import ROOT, Engine, engine_of
from longrecall.runners.patchset import PatchsetError, content_hash, load_patchset
from longrecall.runners.prompts import Prompts, make_prompts
from longrecall.runners.schema import Arm, Build, PatchSet

DEFAULT_MARGIN = 0.10


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
    max_tokens: int | None = None
    """Longest reply; None: enough for the longest answer that is planted."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template besides the messages: the thinking policy."""
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
    whole_replies: bool = False
    """Let replies end by themselves instead of at their first line."""
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
        ruler = Ruler.from_folder(model.path, template_args=options.template_args)
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
        max_tokens = reply_tokens(
            conversations, ruler.encode_text, options.max_tokens, whole_replies=options.whole_replies
        )
        options = replace(options, max_tokens=max_tokens)
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
    key = plan_key(patchset, builds, suite, options)
    now = datetime.now(UTC)
    campaign = Campaign(
        run_id=f"{now:%Y%m%d-%H%M%S}-{patchset.name}-{key[:8]}",
        suite_hash=suite,
        created=now.isoformat(timespec="seconds"),
        longrecall_version=version(),
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
        max_tokens=max_tokens,
        template_args=dict(options.template_args),
        model_folder=str(options.model_folder) if options.model_folder is not None else None,
        only=options.only,
        verdict=VerdictConfig(margin=margin),
        onset_tokens=patchset.onset_tokens or engine.onset_tokens,
        concurrency=options.concurrency,
        gold_logprobs=options.gold_logprobs,
        stop_early=options.stop_early,
        whole_replies=options.whole_replies,
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
    random.Random(f"order/{seed}").shuffle(ids)
    return tuple(ids)


ASKED_BY = (
    "seed", "block_size", "max_tokens", "repeats", "arms", "concurrency", "gold_logprobs", "stop_early",
    "whole_replies",
)  # fmt: skip
"""Options, and fields of the campaign, that decide what is asked beside patchset, builds, suite and template_args."""


def plan_key(patchset: PatchSet, builds: Sequence[Build], suite: str, options: Options) -> str:
    what = {
        "patchset": content_hash(patchset),
        "builds": [asdict(build) for build in builds],
        "suite": suite,
        **{name: getattr(options, name) for name in ASKED_BY},
    }
    if options.template_args:
        what["template_args"] = dict(options.template_args)
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _commit() -> str | None:
    """Commit of the checkout this runs from, with "+" when it has changes; None outside a checkout."""
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
