"""Replay → Score: the outcome of one reply, with where its fact stood."""

import hashlib
import math
from collections import Counter
from collections.abc import Container, Iterable

from longrecall.evals.grade import grade
from longrecall.evals.schema import Score
from longrecall.evals.values import canonical
from longrecall.needles.schema import Ask, Conversation, Probe
from longrecall.runners.schema import Replay


def foreign_index(conversations: Iterable[Conversation]) -> dict[str, frozenset[str]]:
    """Per conversation_id: the canonical values that only other conversations plant. Naming one is a cache leak.

    Values planted in several conversations (words of a small value space) cannot tell a leak and are left out.
    """
    planted = {
        c.conversation_id: {canonical(v) for fact in c.facts for v in (fact.value, *fact.aliases) if v}
        for c in conversations
    }
    counts = Counter(value for values in planted.values() for value in values)
    once = frozenset(value for value, n in counts.items() if n == 1)
    return {conversation_id: once - values for conversation_id, values in planted.items()}


def score_replay(
    replay: Replay, conversation: Conversation, ask: Ask, probe: Probe, foreign: Container[str] = frozenset()
) -> Score:
    """Grade one reply. Raises ValueError when replay, ask and probe do not speak of one question."""
    if (replay.conversation_id, replay.probe_id, replay.rung) != (
        conversation.conversation_id,
        probe.probe_id,
        ask.rung,
    ) or (ask.probe_id != probe.probe_id):
        raise ValueError(
            f"replay of {replay.conversation_id}/{replay.probe_id} at rung {replay.rung} scored against "
            f"{conversation.conversation_id}/{probe.probe_id} at rung {ask.rung} (ask of {ask.probe_id})"
        )
    response = replay.response
    outcome, answer = grade(response.text, response.finish_reason, response.error, probe, conversation, foreign)
    return Score(
        run_id=replay.run_id,
        build_id=replay.build_id,
        conversation_id=replay.conversation_id,
        cluster_id=conversation.cluster_id or conversation.conversation_id,
        probe_id=probe.probe_id,
        probe_kind=probe.kind,
        rung=ask.rung,
        arm=replay.arm,
        repeat=replay.repeat,
        outcome=outcome,
        answer=answer,
        gold_logprob=_sum_logprobs(response.gold_logprobs),
        depth_pct=ask.depth_pct,
        distance_tokens=ask.distance_tokens,
        distance_turns=ask.distance_turns,
        context_tokens=response.prompt_tokens if response.prompt_tokens is not None else ask.prompt_tokens,
        cached_tokens=response.cached_tokens,
        send_order=replay.send_order,
        reply_hash=None
        if response.text is None
        else hashlib.sha256(response.text.encode("utf-8", "surrogatepass")).hexdigest()[:12],
    )


def _sum_logprobs(logprobs: tuple[float, ...] | None) -> float | None:
    """None when the server gave none or any of them is not a log-probability (NaN, infinite, above 0)."""
    if not logprobs or not all(math.isfinite(p) and p <= 1e-3 for p in logprobs):
        return None
    return math.fsum(logprobs)
