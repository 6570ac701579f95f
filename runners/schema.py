"""Records of what was served and what it answered: `PatchSet`, `Build`, `Response`, `Replay`.

Unknown is None, never 0, -1 or NaN.
"""

from dataclasses import dataclass, field
from typing import Literal

SCHEMA_VERSION = 1

Arm = Literal["warm", "cold", "branched", "free", "concat", "alone", "mirrored"]
"""How a question is asked; runners/prompts.py says what each sends."""
Role = Literal["suspect", "positive-control", "negative-control"]
Expect = Literal["culprit", "exonerated"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change under suspicion: diffs, environment, launch arguments, or several of these."""

    patch_id: str
    title: str = ""
    role: Role = "suspect"
    diffs: tuple[str, ...] = ()
    """Unified diff files, relative to the patchset file."""
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    endpoint: str | None = None
    """A server that already runs (engine "openai"): its base URL stands for the patched build."""
    changes: tuple[str, ...] = ()
    """Keys of the server's own report (/server_info) that this patch is meant to change."""
    model_override: dict[str, object] = field(default_factory=dict)
    """Keys of the model's config.json that are served otherwise (SGLang's --json-model-override-args)."""
    source_patcher: str | None = None
    """YAML of SGLang's own runtime source patcher, relative to the patchset file."""
    build_command: tuple[str, ...] = ()
    """Run in the patched tree, for compiled parts; what it leaves there is part of the build."""
    expect: Expect | None = None
    """Known answer, where there is one; reported beside the verdict, never used by it."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Several servers behind a router that serve one build together."""

    kind: Literal["pd", "replicas"]
    """pd: prefill and decode on servers of their own; replicas: equal servers."""
    prefill: int = 1
    decode: int = 1
    replicas: int = 2
    gpus_per_server: int = 1
    transfer_backend: str = "mooncake"
    """How the KV cache moves from prefill to decode."""
    policy: str = "cache_aware"
    """How the router chooses among equal servers."""


@dataclass(frozen=True, kw_only=True)
class PatchSet:
    """A base build and the patches under suspicion, read from a TOML file."""

    schema_version: int = SCHEMA_VERSION
    name: str
    path: str
    engine: str
    source: str | None = None
    """Base source (for engine "openai" the base URL); None: the engine's own (the reference build: this checkout)."""
    python: str | None = None
    """Interpreter of the environment that serves (engine "sglang"), relative to the patchset file."""
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    model_override: dict[str, object] = field(default_factory=dict)
    deployment: Deployment | None = None
    """How the servers of one build work together; None: one server."""
    patches: tuple[Patch, ...]
    margin: float | None = None
    """Largest tolerable loss of recall (Delta); None: the engine's default."""
    onset_tokens: int | None = None
    """Longest context at which top-k selection is still the identity; None: the engine's own, if it knows."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a build is made of and what the server said it is; builds differ by the named patch only."""

    source_hash: str
    """sha256 over the sorted (relative path, file bytes) of the base source before the patch."""
    tree_hash: str
    """The same after the patch."""
    diff_hash: str | None
    args: tuple[str, ...]
    env: dict[str, str]
    packages: dict[str, str]
    weights_hash: str | None = None
    template_hash: str | None = None
    tokenizer_hash: str | None = None
    server_info: dict[str, object] | None = None
    hardware: str | None = None


@dataclass(frozen=True, kw_only=True)
class Build:
    """One served arm: the base, the base again, or the base plus one patch."""

    build_id: str
    """"base", "base-again", or the patch id."""
    patch_ids: tuple[str, ...]
    role: Literal["base", "aa", "suspect", "positive-control", "negative-control"]
    manifest: Manifest | None = None


@dataclass(frozen=True, kw_only=True)
class Response:
    """What the server answered to one request."""

    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cached_at_least: int | None = None
    """Prompt tokens that this arm wants from the prefix cache. Fewer do not spoil the answer: they are reported."""
    completion_tokens: int | None = None
    token_logprobs: tuple[float, ...] | None = None
    """Natural-log probability of each generated token."""
    gold_logprobs: tuple[float, ...] | None = None
    """Natural-log probability of each token of the gold answer, forced after the prompt."""
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    error: str | None = None
    """Class and message when nothing usable came back: "overflow: …", "timeout: …", "http 500: …"."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One probe asked of one build."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    build_id: str
    conversation_id: str
    probe_id: str
    rung: int
    arm: Arm
    repeat: int
    send_order: int
    """Place in the order in which this run first sent its requests, over all builds."""
    response: Response
