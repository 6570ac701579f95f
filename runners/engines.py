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

from longrecall.runners.patchset import PatchsetError
from longrecall.runners.schema import PatchSet

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds needles/, runners/ and kernels/: a checkout, or site-packages/longrecall."""


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


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One kind of server."""

    name: str
    capabilities: Capabilities
    launches: bool
    """False: the servers run already and are given by URL."""
    source_folders: tuple[str, ...] = ()
    """Folders below ROOT that make the base source; diffs name their files as a/<folder>/…"""
    module: str = ""
    packages: tuple[str, ...] = ()
    """Distributions whose versions go into the manifest."""
    volatile: tuple[str, ...] = ()
    """Regular expressions of keys of /server_info that differ between two starts of one build."""
    shares_prefill: bool = False
    """A prompt waits for a prefix that another is computing, so that a whole ladder may be sent at once."""
    server_mb: int = 0
    """Memory of one busy server beyond the weights that all share; 0: not known."""
    shared_mb: int = 0
    onset_tokens: int | None = None
    info_path: str = "/server_info"
    """Route of the server's own report, when it has one."""
    echoes_begun_answer: bool = False
    """The reply to a continued assistant turn repeats the turn's beginning."""
    statistics_path: str = ""
    """Route that tells what the server has done so far, as numbers; empty: none."""

    def command(self, folder: Path, threads: int, args: tuple[str, ...]) -> tuple[str, ...]:
        """Launch command with "{port}" for the port; `folder` holds the model."""
        return (
            sys.executable, "-m", self.module, "--folder", str(folder), "--host", "127.0.0.1", "--port", "{port}",
            "--threads", str(threads), *args,
        )  # fmt: skip


ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name="reference",
            launches=True,
            source_folders=("kernels", "needles", "runners"),
            module="longrecall.runners.reference.server",
            capabilities=Capabilities(
                continue_final=True, tokenize=True, cache_report=True, flush_cache=True, cache_salt=True,
                prompt_logprobs=True, input_ids=True, indexer_topk=True, server_info=True,
            ),
            packages=("torch", "numpy", "safetensors", "tokenizers", "jinja2", "starlette", "uvicorn"),
            volatile=("port", "pid", "host", "url", "time", ".*_time", ".*uptime.*", ".*started.*", ".*requests.*",
                      "cached.*", ".*cache_(used|tokens|bytes|entries|nodes)", ".*memory.*", "rss.*"),
            shares_prefill=True,
            server_mb=1700,  # measured: 1.2 to 1.6 GB private while busy, .9 GB of mapped weights in common
            shared_mb=900,
            onset_tokens=512,
            statistics_path="/statistics",
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
            server_mb=600,
            shared_mb=300,
        ),
        Engine(
            name="openai",
            launches=False,
            # The least that any OpenAI-compatible server has; more is found by asking it.
            capabilities=Capabilities(continue_final=True, cache_report=True),
        ),
    )
}  # fmt: skip


def engine_of(patchset: PatchSet) -> Engine:
    """The engine a patchset names; raises PatchsetError naming the known ones."""
    engine = ENGINES.get(patchset.engine)
    if engine is None:
        near = difflib.get_close_matches(patchset.engine, ENGINES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"engines: {', '.join(ENGINES)}"
        raise PatchsetError(f"{patchset.path}: engine {patchset.engine!r} is not known; {hint}")
    for patch in patchset.patches:
        where = f"{patchset.path}: patch {patch.patch_id!r}"
        if engine.launches and patch.endpoint:
            raise PatchsetError(
                f"{where}: engine {engine.name!r} launches its servers; endpoint is for engine 'openai'"
            )
        if not engine.launches and (patch.diffs or patch.env or patch.args or not patch.endpoint):
            raise PatchsetError(
                f"{where}: engine {engine.name!r} asks running servers: give endpoint, and no diffs, env or args"
            )
    if not engine.launches and not patchset.source:
        raise PatchsetError(f"{patchset.path}: engine {engine.name!r} needs source = the base URL of the base server")
    return engine


def is_volatile(engine: Engine, key: str) -> bool:
    """Whether a key of the server's report may differ between two starts of one build."""
    return any(re.fullmatch(pattern, key) for pattern in engine.volatile)
