"""Records of a run: the `Campaign` that was asked for and the `Report` that came out.

A run folder `results/runs/<run_id>/` holds campaign.json, conversations.parquet, replays.jsonl (append-only journal),
scores.parquet, report.json, report.md and report.html. Unknown is None, never 0, -1 or NaN.
"""

from dataclasses import dataclass, field
from typing import Any

from longrecall.evals.schema import (
    Attribution,
    Comparison,
    ControlResult,
    CurvePoint,
    Flips,
    LengthFit,
    LogprobShift,
    Missing,
    Verdict,
    VerdictConfig,
)
from longrecall.runners.schema import Arm, Build, PatchSet

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What was asked for, fixed before the first request; resume refuses when it differs."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    suite_hash: str
    """sha256 over the conversations' content: two runs with one suite hash asked the same prompts."""
    created: str
    """UTC, ISO 8601."""
    longrecall_version: str
    longrecall_commit: str | None
    patchset: PatchSet
    builds: tuple[Build, ...]
    recipe: str
    seed: int
    rungs: tuple[int, ...]
    n_conversations: int
    conversation_order: tuple[str, ...]
    """conversation_ids in the (seeded random) order they are asked."""
    block_size: int
    """Conversations asked of every build before the next block begins."""
    arms: tuple[Arm, ...]
    repeats: int
    max_tokens: int
    verdict: VerdictConfig
    onset_tokens: int | None = None
    """Longest context at which top-k selection is still the identity (the reference build: 512)."""
    concurrency: int = 32
    """Most requests of one build open at a time (arm alone: one)."""
    gold_logprobs: bool = False
    """Whether the right answer's log-probabilities were asked for after each reply."""
    stop_early: bool = False
    """Whether a build was asked no further once its e-values had decided."""
    whole_replies: bool = False
    """Whether replies ended by themselves instead of at their first line."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Variables given to the chat template besides the messages: the thinking policy."""
    model_folder: str | None = None
    """The model folder that was named; None: the engine's own."""
    only: tuple[str, ...] = ()
    """The patches of the patchset that were asked for; empty: all."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """report.json: everything a reader or a CI job needs, recomputable from the run folder."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    suite_hash: str
    partial: bool
    """True when planned replies are still missing: the run can be resumed."""
    analysis_version: str
    created: str
    verdict_config: VerdictConfig
    builds: tuple[Build, ...]
    rungs: tuple[int, ...]
    onset_tokens: int | None
    curves: tuple[CurvePoint, ...]
    comparisons: tuple[Comparison, ...]
    verdicts: tuple[Verdict, ...]
    controls: dict[str, ControlResult]
    """Keys: aa, positive, negative."""
    missing: tuple[Missing, ...]
    timing: dict[str, float | None]
    """Seconds by stage (wall_s, inside_model_s, …), where measured."""
    length_fits: tuple[LengthFit, ...] = ()
    logprob_shifts: tuple[LogprobShift, ...] = ()
    flips: tuple[Flips, ...] = ()
    attributions: tuple[Attribution, ...] = ()
    """Of every patch, where the onset of top-k selection is known: served and in-process evidence together."""
