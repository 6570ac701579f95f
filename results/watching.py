"""What is told while a campaign runs: stages and their seconds, and each reply graded as it comes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from longrecall.evals.cells import ARM_ORDER
from longrecall.evals.score import foreign_index, score_replay
from longrecall.needles.schema import Conversation
from longrecall.results.early import EarlyStop
from longrecall.results.schema import Campaign
from longrecall.runners.builds import BASE
from longrecall.runners.replay import Reply
from longrecall.runners.schema import Replay


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

    def stored(self, replays: Sequence[Replay]) -> None:
        for item in replays:
            self._take(item, stored=True)

    def __call__(self, reply: Reply) -> None:
        self._take(reply.replay, stored=False)

    def _take(self, item: Replay, *, stored: bool) -> None:
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
