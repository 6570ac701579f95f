"""Runs as Inspect AI logs (`.eval`): one log per build, one sample per reply, for its viewer and its data frames.

    longrecall report results/runs/20261129-reference --inspect logs/
    inspect view --log-dir logs/

An extra (pip install 'longrecall[inspect]'): the log format moves with that project's releases, so it is written by
its own library and a test reads it back. A reply that is missing data is left unscored (NaN), as Inspect has it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longrecall.evals.schema import MISSING, Score
from longrecall.needles.schema import Conversation
from longrecall.results.schema import Campaign
from longrecall.results.storage import HistoryError
from longrecall.runners.schema import Build, Replay


def export_inspect(
    folder: Path,
    campaign: Campaign,
    conversations: Sequence[Conversation],
    replays: Sequence[Replay],
    scores: Sequence[Score],
) -> list[Path]:
    """Write `<run>_<build>.eval` for each build. Raises HistoryError when inspect_ai is not installed."""
    try:
        from inspect_ai import log as inspect_log
    except ImportError as error:
        raise HistoryError("writing Inspect logs needs inspect_ai: pip install 'longrecall[inspect]'") from error
    known = {c.conversation_id: c for c in conversations}
    paired = list(zip(replays, scores, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for build in campaign.builds:
        own = [(replay, score) for replay, score in paired if replay.build_id == build.build_id]
        samples = [_sample(known[replay.conversation_id], replay, score) for replay, score in own]
        path = folder / f"{campaign.run_id}_{build.build_id}.eval"
        inspect_log.write_eval_log(_log(campaign, build, samples, [score for _, score in own]), str(path))
        written.append(path)
    return written


def _sample(conversation: Conversation, replay: Replay, score: Score) -> Any:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score as InspectScore

    from longrecall.needles.render import messages_for

    roles = {"user": ChatMessageUser, "assistant": ChatMessageAssistant, "system": ChatMessageSystem}
    ask = next(a for a in conversation.asks if (a.probe_id, a.rung) == (replay.probe_id, replay.rung))
    probe = next(p for p in conversation.probes if p.probe_id == replay.probe_id)
    sent = [roles.get(m["role"], ChatMessageUser)(content=m["content"]) for m in messages_for(conversation, ask)]
    text = replay.response.text or ""
    right = float(score.outcome == "ok") if score.outcome not in MISSING else math.nan
    return EvalSample(
        id=f"{replay.conversation_id}/{replay.probe_id}/{replay.rung}",
        epoch=replay.repeat + 1,
        input=sent,
        target=[probe.gold, *probe.aliases],
        messages=[*sent, ChatMessageAssistant(content=text)],
        output=ModelOutput.from_content(model=replay.build_id, content=text),
        scores={"recall": InspectScore(value=right, answer=score.answer, explanation=score.outcome)},
        metadata={
            "conversation": replay.conversation_id,
            "probe": replay.probe_id,
            "rung": replay.rung,
            "arm": replay.arm,
            "outcome": score.outcome,
            "depth_pct": score.depth_pct,
            "distance_tokens": score.distance_tokens,
            "cached_tokens": score.cached_tokens,
        },
    )


def _log(campaign: Campaign, build: Build, samples: list[Any], scores: list[Score]) -> Any:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalMetric, EvalResults, EvalScore, EvalSpec

    counted = [score.outcome == "ok" for score in scores if score.outcome not in MISSING]
    metrics = {"recall": EvalMetric(name="recall", value=sum(counted) / len(counted))} if counted else {}
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=campaign.created,
            task=f"longrecall {campaign.patchset.name}",
            dataset=EvalDataset(name=campaign.recipe, samples=len(samples)),
            model=f"{campaign.patchset.engine}/{build.build_id}",
            config=EvalConfig(epochs=campaign.repeats),
            metadata={"run_id": campaign.run_id, "suite_hash": campaign.suite_hash, "patches": list(build.patch_ids)},
        ),
        results=EvalResults(
            total_samples=len(samples),
            completed_samples=len(counted),
            scores=[EvalScore(name="recall", scorer="recall", metrics=metrics)],
        ),
        samples=samples,
    )
