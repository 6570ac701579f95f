"""What a set holds, in numbers."""

import hashlib
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from longrecall.needles.dataset import SetError, canonical_bytes
from longrecall.needles.lint import Baselines
from longrecall.needles.schema import Conversation


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Prompts of one kind on one rung."""

    kind: str
    rung: int
    prompts: int
    mean_depth_pct: float | None
    median_distance_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A set in numbers."""

    conversations: int
    facts: int
    turns: int
    suite_hash: str
    cells: tuple[Cell, ...]
    baselines: dict[str, float]
    """Share of prompts on which each constant answer would be right."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def count(conversations: Iterable[Conversation]) -> Counted:
    """Read a set once."""
    baselines = Baselines()
    digest = hashlib.sha256()
    number = facts = turns = 0
    places: dict[tuple[str, int], list[tuple[float | None, int | None]]] = {}
    for conversation in conversations:
        digest.update(canonical_bytes(conversation))
        number, facts, turns = number + 1, facts + len(conversation.facts), turns + len(conversation.turns)
        baselines.add(conversation)
        kinds = {probe.probe_id: probe.kind for probe in conversation.probes}
        for ask in conversation.asks:
            if ask.probe_id not in kinds:
                raise SetError(f"{conversation.conversation_id} asks {ask.probe_id}, which does not exist")
            places.setdefault((kinds[ask.probe_id], ask.rung), []).append((ask.depth_pct, ask.distance_tokens))
    cells = []
    for (kind, rung), found in sorted(places.items()):
        depths = [depth for depth, _ in found if depth is not None]
        distances = [distance for _, distance in found if distance is not None]
        cells.append(
            Cell(
                kind=kind,
                rung=rung,
                prompts=len(found),
                mean_depth_pct=round(statistics.fmean(depths), 2) if depths else None,
                median_distance_tokens=int(statistics.median(distances)) if distances else None,
            )
        )
    answerable, prompts = max(1, baselines.answerable), max(1, baselines.prompts)
    frequent = baselines.golds.most_common(1)[0][1] if baselines.golds else 0
    return Counted(
        conversations=number,
        facts=facts,
        turns=turns,
        suite_hash=digest.hexdigest(),
        cells=tuple(cells),
        baselines={
            "not mentioned": baselines.abstentions / prompts,
            "the most frequent answer of the set": frequent / max(1, baselines.golds.total()),
            "the last value stated": baselines.last_value / answerable,
            "the value stated most often": baselines.frequent_value / answerable,
        },
    )
