"""Records of what is planted: a `Conversation` grows rung by rung and is asked about by probes that branch off it.

Ids are content hashes or readable slugs. Unknown is None, never 0, -1 or NaN. `SCHEMA_VERSION` travels in every file.
"""

from dataclasses import dataclass
from typing import Literal

SCHEMA_VERSION = 1

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One planted statement: the `attribute` of `entity` is `value`."""

    fact_id: str
    entity: str
    attribute: str
    value: str
    """Empty for a statement without a value of its own: a link of a chain, a withdrawal, an item to be counted."""
    kind: str
    """The recipe element that planted it: single, key, update, retraction, hop, distractor, verbatim, …"""
    turn_index: int
    """The turn of the conversation that states it."""
    supersedes: str | None = None
    """fact_id of the older fact that this one replaces (the older value is `stale` from this turn on)."""
    aliases: tuple[str, ...] = ()
    """Other spellings of the value that count as right."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One scripted message of the history."""

    turn_index: int
    role: Role
    content: str
    fact_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A question about one live value. It branches off the scripted history and is not kept in it."""

    probe_id: str
    kind: str
    question: str
    gold: str
    aliases: tuple[str, ...] = ()
    live_fact: str | None = None
    """fact_id the answer comes from; None for an abstention probe (the fact was never planted)."""
    distractor_values: tuple[str, ...] = ()
    """Values of other facts of this conversation: naming one of them is the `distractor` outcome."""
    stale_values: tuple[str, ...] = ()
    """Superseded values of the same fact."""
    answer_prefix: str = ""
    """The assistant turn is begun with this text ("The locker code of Ada is"); empty: the model begins itself."""
    needs: tuple[str, ...] = ()
    """fact_ids that all stand before the branch of every Ask (links of a chain, items counted, the live fact)."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One planned prompt, `turns[:turn_end]` + `tail`: exactly `prompt_tokens` under the served template."""

    rung: int
    """Target context length in tokens, template included; `prompt_tokens` equals it."""
    probe_id: str
    turn_end: int
    """History sent: the conversation's turns[:turn_end]."""
    tail: tuple[Turn, ...]
    """The branch: the asking user turn (with its padding), and the begun assistant turn if any."""
    prompt_tokens: int
    fact_span: tuple[int, int] | None = None
    """Token span [start, end) of the live fact's statement in the prompt; None when nothing is planted."""
    depth_pct: float | None = None
    """Position of the fact: 0 = start of the context, 100 = the probe."""
    distance_tokens: int | None = None
    distance_turns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A scripted multi-turn conversation with planted facts, and every prompt that asks about them.

    Rung r's history is a prefix of rung r+1's. `asks` holds one entry per (rung, probe).
    """

    schema_version: int = SCHEMA_VERSION
    conversation_id: str
    recipe: str
    seed: int
    tokenizer_hash: str
    template_hash: str
    rungs: tuple[int, ...]
    turns: tuple[Turn, ...]
    facts: tuple[Fact, ...]
    probes: tuple[Probe, ...]
    asks: tuple[Ask, ...]
    cluster_id: str | None = None
    """Conversations made from one template share it; evidence is clustered on the coarser of the two."""
