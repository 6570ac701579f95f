"""The replay: every planned question asked of every build, in an order that treats the builds alike.

Conversations come in blocks. A cell is one block on one build; cells are taken in order of blocks, and the order of
the builds turns by one place from block to block, so that no build is always first or always last. At most `parallel`
builds are busy at a time. Within a cell, conversations run side by side; within a conversation the rungs go up, so
that a served prefix cache makes the whole ladder cost about its longest rung. The first probe of a rung goes alone and
fills the cache; the others follow together, and the server batches them. A server that lets prompts wait for a prefix
that is just being computed is sent the whole ladder at once, and decodes it in one batch.

The order of the probes is the same on every build, so that it cancels in the comparison.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from longrecall.needles.schema import Ask, Conversation, Probe
from longrecall.runners.client import Endpoint, Question, ask
from longrecall.runners.journal import Journal, Key
from longrecall.runners.schema import Arm, Replay, Response


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """What is to be asked; equal plans ask the same questions in the same order."""

    run_id: str
    build_ids: tuple[str, ...]
    conversations: Mapping[str, Conversation]
    conversation_order: tuple[str, ...]
    block_size: int
    arms: tuple[Arm, ...] = ("warm",)
    repeats: int = 1
    max_tokens: int = 12
    stop: tuple[str, ...] = ("\n",)
    seed: int = 0
    first: tuple[str, ...] = ()
    """Builds that go ahead through the first conversations; see `cells`."""
    conversations_at_once: int = 4
    whole_ladder: bool = False
    """Send all rungs and probes of a conversation at once (the server shares a prefix that is being computed)."""
    in_flight: int = 32
    """Most requests of one build open at a time."""

    @property
    def n_planned(self) -> int:
        asks = sum(len(self.conversations[name].asks) for name in self.conversation_order)
        return asks * len(self.build_ids) * len(self.arms) * self.repeats


FIRST_CONVERSATIONS = 12
"""Each conversation at most doubles the any-time-valid evidence, and a dozen patch x rung cells ask for 240: 8 at the
least, and a few more where not every probe is lost."""


class Cell:
    """One block of conversations on one build."""

    def __init__(self, number: int, build_id: str, conversation_ids: tuple[str, ...]) -> None:
        self.number = number
        self.build_id = build_id
        self.conversation_ids = conversation_ids


def cells(plan: ReplayPlan) -> list[Cell]:
    """All cells in the order they are taken.

    The builds of `plan.first` go ahead through the first `FIRST_CONVERSATIONS`: base and positive control, so that a
    suite that cannot see a loss is known within minutes.
    """
    order, size, builds = plan.conversation_order, plan.block_size, plan.build_ids
    blocks = [order[start : start + size] for start in range(0, len(order), size)]
    n_first = -(-FIRST_CONVERSATIONS // size) if plan.first else 0
    ahead = [
        Cell(number, build_id, block)
        for number, block in enumerate(blocks[:n_first])
        for build_id in builds
        if build_id in plan.first
    ]
    rest = []
    for number, block in enumerate(blocks):
        turn = number % len(builds)
        for build_id in builds[turn:] + builds[:turn]:
            if number >= n_first or build_id not in plan.first:
                rest.append(Cell(number, build_id, block))
    return ahead + rest


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One recorded answer with what it answers."""

    replay: Replay
    conversation: Conversation
    probe: Probe
    ask: Ask


class BuildGone(RuntimeError):
    """The server of a build has ended; what it had not answered stays unanswered."""


@dataclass(kw_only=True)
class ReplayResult:
    """What happened to the cells."""

    gone: dict[str, str] = field(default_factory=dict)
    """build_id to message, for builds whose server ended."""


_NOTICE_S = 0.2
"""A connection breaks a moment before the supervisor has seen that the server ended."""
CheckAlive = Callable[[str], None]
"""Raises when the server of this build has ended."""


async def replay(
    plan: ReplayPlan,
    endpoints: Mapping[str, Endpoint],
    journal: Journal,
    *,
    parallel: int,
    messages_for: Callable[[Conversation, Ask], Sequence[Mapping[str, str]]],
    check_alive: CheckAlive = lambda build_id: None,
    on_reply: Callable[[Reply], None] = lambda reply: None,
    only: Iterable[str] | None = None,
) -> ReplayResult:
    """Ask everything of `plan` that the journal does not hold yet, of the builds in `only` (default: all).

    A build whose server ends is left out from then on; the other builds go on.

    Raises:
        JournalError: the journal cannot be written (a full disk); nothing further is sent.
    """
    result = ReplayResult()
    wanted = set(plan.build_ids if only is None else only)
    queue = [cell for cell in cells(plan) if cell.build_id in wanted]
    busy: set[str] = set()
    turn = asyncio.Condition()

    async def take() -> Cell | None:
        """The first cell whose build is idle; waits while every remaining build is busy."""
        async with turn:
            while True:
                for place, cell in enumerate(queue):
                    if cell.build_id not in busy:
                        busy.add(cell.build_id)
                        return queue.pop(place)
                if not queue:
                    return None
                await turn.wait()

    async def worker() -> None:
        while (cell := await take()) is not None:
            try:
                if cell.build_id not in result.gone:
                    await _run_cell(plan, cell, endpoints[cell.build_id], journal, messages_for, check_alive, on_reply)
            except* BuildGone as gone:
                result.gone[cell.build_id] = str(_first(gone))
            finally:
                async with turn:
                    busy.discard(cell.build_id)
                    turn.notify_all()

    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, min(parallel, len(wanted)))):
            group.create_task(worker())
    return result


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


async def _run_cell(
    plan: ReplayPlan,
    cell: Cell,
    endpoint: Endpoint,
    journal: Journal,
    messages_for: Callable[[Conversation, Ask], Sequence[Mapping[str, str]]],
    check_alive: CheckAlive,
    on_reply: Callable[[Reply], None],
) -> None:
    side_by_side = asyncio.Semaphore(plan.conversations_at_once)
    in_flight = asyncio.Semaphore(plan.in_flight)

    async def one(conversation: Conversation, ask_: Ask, arm: Arm, repeat: int, order: int) -> None:
        key = _key(cell.build_id, conversation, ask_, arm, repeat)
        messages = messages_for(conversation, ask_)
        question = Question(
            messages=messages,
            prompt_tokens=ask_.prompt_tokens,
            continue_final=messages[-1]["role"] == "assistant",
            max_tokens=plan.max_tokens,
            stop=plan.stop,
            # A salt of its own keeps a cold request from finding any other's prefix.
            cache_salt="/".join(map(str, (plan.run_id, *key))) if arm == "cold" else None,
            cached_at_most=0 if arm == "cold" else None,
        )
        async with in_flight:
            response = await ask(endpoint, question, random.Random(f"{plan.seed}/{key}"))
        if response.error and response.error.startswith(("connection:", "cut:")):
            # An answer that never came because the server is gone is not recorded: a resumed run asks again.
            await asyncio.sleep(_NOTICE_S)
            check_alive(cell.build_id)
        recorded = await _record(plan, key, order, response, journal)
        probe = next(probe for probe in conversation.probes if probe.probe_id == ask_.probe_id)
        on_reply(Reply(replay=recorded, conversation=conversation, probe=probe, ask=ask_))

    async def climb(conversation: Conversation) -> None:
        async with side_by_side:
            for arm in plan.arms:
                for repeat in range(plan.repeats):
                    for batch in batches(plan, conversation, arm):
                        keys = {ask_: _key(cell.build_id, conversation, ask_, arm, repeat) for ask_ in batch}
                        open_ = [ask_ for ask_ in batch if keys[ask_] not in journal.answered]
                        if not open_:
                            continue
                        sent = await journal.sending([keys[ask_] for ask_ in open_])
                        async with asyncio.TaskGroup() as group:
                            for ask_, record in zip(open_, sent, strict=True):
                                group.create_task(one(conversation, ask_, arm, repeat, record.send_order))

    async with asyncio.TaskGroup() as group:
        for conversation_id in cell.conversation_ids:
            group.create_task(climb(plan.conversations[conversation_id]))


def batches(plan: ReplayPlan, conversation: Conversation, arm: Arm) -> list[list[Ask]]:
    """The asks of a conversation in the groups that are sent together."""
    rungs = [probe_order(plan, conversation, rung) for rung in sorted({ask_.rung for ask_ in conversation.asks})]
    if plan.whole_ladder:
        return [[ask_ for asks in rungs for ask_ in asks]]
    if arm == "cold":  # nothing is shared
        return rungs
    return [batch for asks in rungs for batch in (asks[:1], asks[1:]) if batch]


def probe_order(plan: ReplayPlan, conversation: Conversation, rung: int) -> list[Ask]:
    """The asks of one rung in a seeded random order that is the same on every build."""
    asks = sorted((ask_ for ask_ in conversation.asks if ask_.rung == rung), key=lambda item: item.probe_id)
    random.Random(f"{plan.seed}/{conversation.conversation_id}/{rung}").shuffle(asks)
    return asks


def unanswered(plan: ReplayPlan, build_id: str, answered: Set[Key]) -> int:
    """How many questions of one build the journal does not hold yet."""
    return sum(
        _key(build_id, plan.conversations[name], ask_, arm, repeat) not in answered
        for name in plan.conversation_order
        for ask_ in plan.conversations[name].asks
        for arm in plan.arms
        for repeat in range(plan.repeats)
    )


def _key(build_id: str, conversation: Conversation, ask_: Ask, arm: Arm, repeat: int) -> Key:
    return Key(build_id, conversation.conversation_id, ask_.probe_id, ask_.rung, arm, repeat)


async def _record(plan: ReplayPlan, key: Key, order: int, response: Response, journal: Journal) -> Replay:
    replay_ = Replay(
        run_id=plan.run_id,
        build_id=key.build_id,
        conversation_id=key.conversation_id,
        probe_id=key.probe_id,
        rung=key.rung,
        arm=key.arm,  # type: ignore[arg-type]
        repeat=key.repeat,
        send_order=order,
        response=response,
    )
    await journal.record(replay_)
    return replay_
