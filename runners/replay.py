"""The replay: every planned question asked of every build, in an order that treats the builds alike.

Conversations come in blocks. A cell is one block on one build; cells are taken in order of blocks, and the order of
the builds turns by one place from block to block, so that no build is always first or always last. At most `parallel`
builds are busy at a time. Within a cell the arms follow each other; within an arm conversations run side by side, and
within a conversation the rungs go up, so that a served prefix cache makes the whole ladder cost about its longest rung.
The first probe of a rung goes alone and fills the cache; the others follow together, and the server batches them. A
server that lets prompts wait for a prefix that is just being computed is sent the whole ladder at once, and decodes it
in one batch.

The order of the probes is the same on every build, so that it cancels in the comparison.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from hashlib import sha256

from longrecall.needles.schema import Ask, Conversation, Probe
from longrecall.runners.client import Endpoint, Question, ask, error_class
from longrecall.runners.free import FreeHistories, HistoryBroken
from longrecall.runners.gold import GoldScorer
from longrecall.runners.journal import Journal, Key
from longrecall.runners.prompts import Messages, Prompts
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
    in_flight: int = 64
    """Most requests of one build open at a time."""

    @property
    def n_planned(self) -> int:
        return len(self.build_ids) * sum(1 for _ in self.keys(self.build_ids[0])) if self.build_ids else 0

    def asked_in(self, arm: Arm) -> tuple[str, ...]:
        """The conversations that are asked in an arm."""
        return self.conversation_order[: self.block_size] if arm == "mirrored" else self.conversation_order

    def keys(self, build_id: str) -> Iterator[Key]:
        """Every question of one build."""
        for arm in self.arms:
            for name in self.asked_in(arm):
                for ask_ in self.conversations[name].asks:
                    for repeat in range(self.repeats):
                        yield _key(build_id, self.conversations[name], ask_, arm, repeat)


FIRST_CONVERSATIONS = 12
"""Each conversation at most doubles the any-time-valid evidence, and a dozen patch x rung cells ask for 240: 8 at the
least, and a few more where not every probe is lost."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One block of conversations on one build."""

    number: int
    build_id: str
    conversation_ids: tuple[str, ...]
    arms: tuple[Arm, ...]


def cells(plan: ReplayPlan) -> list[Cell]:
    """All cells in the order they are taken.

    The builds of `plan.first` go ahead through the first `FIRST_CONVERSATIONS`: base and positive control, so that a
    suite that cannot see a loss is known within minutes. Arm mirrored is the first block again, at the end of all.
    """
    order, size, builds = plan.conversation_order, plan.block_size, plan.build_ids
    blocks = [order[start : start + size] for start in range(0, len(order), size)]
    n_first = -(-FIRST_CONVERSATIONS // size) if plan.first else 0
    arms = tuple(arm for arm in plan.arms if arm != "mirrored")

    def cell(number: int, build_id: str, arms: tuple[Arm, ...]) -> Cell:
        return Cell(number=number, build_id=build_id, conversation_ids=blocks[number], arms=arms)

    ahead = [
        cell(number, name, arms) for number in range(len(blocks[:n_first])) for name in builds if name in plan.first
    ]
    rest = []
    for number in range(len(blocks)):
        turn = number % len(builds)
        for name in builds[turn:] + builds[:turn]:
            if number >= n_first or name not in plan.first:
                rest.append(cell(number, name, arms))
    if "mirrored" in plan.arms:
        rest += [cell(0, name, ("mirrored",)) for name in reversed(builds)]
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
    prompts: Prompts = Prompts(),  # noqa: B008 - the messages as planned, nothing demanded of the cache
    gold: GoldScorer | None = None,
    check_alive: CheckAlive = lambda build_id: None,
    on_reply: Callable[[Reply], None] = lambda reply: None,
    only: Iterable[str] | None = None,
    finished: Callable[[str], bool] = lambda build_id: False,
) -> ReplayResult:
    """Ask everything of `plan` that the journal does not hold yet, of the builds in `only` (default: all).

    A build whose server ends is left out from then on, and so is one that `finished` names before a block; the other
    builds go on. With `gold`, each answer carries the
    log-probabilities of the right answer's tokens too.

    Raises:
        JournalError: the journal cannot be written (a full disk); nothing further is sent.
    """
    result = ReplayResult()
    wanted = set(plan.build_ids if only is None else only)
    queue = [cell for cell in cells(plan) if cell.build_id in wanted]
    histories = FreeHistories(journal.folder) if "free" in plan.arms else None
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
                if cell.build_id not in result.gone and not finished(cell.build_id):
                    asking = _Asking(
                        plan, endpoints[cell.build_id], journal, prompts, gold, histories, check_alive, on_reply
                    )
                    for arm in cell.arms:
                        await asking.run(arm, [plan.conversations[name] for name in cell.conversation_ids])
            except* BuildGone as gone:
                result.gone[cell.build_id] = str(_first(gone))
            finally:
                async with turn:
                    busy.discard(cell.build_id)
                    turn.notify_all()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(parallel, len(wanted)))):
                group.create_task(worker())
    finally:
        if histories is not None:
            histories.close()
    return result


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


class _Asking:
    """One build being asked a block of conversations."""

    def __init__(
        self,
        plan: ReplayPlan,
        endpoint: Endpoint,
        journal: Journal,
        prompts: Prompts,
        gold: GoldScorer | None,
        histories: FreeHistories | None,
        check_alive: CheckAlive,
        on_reply: Callable[[Reply], None],
    ) -> None:
        self.plan, self.endpoint, self.journal = plan, endpoint, journal
        self.prompts, self.gold, self.histories = prompts, gold, histories
        self.check_alive, self.on_reply = check_alive, on_reply
        self.in_flight = asyncio.Semaphore(plan.in_flight)

    async def run(self, arm: Arm, conversations: list[Conversation]) -> None:
        """Ask everything of these conversations in one arm."""
        self.in_flight = asyncio.Semaphore(1 if arm == "alone" else self.plan.in_flight)
        side_by_side = asyncio.Semaphore(1 if arm == "alone" else self.plan.conversations_at_once)

        async def climb(conversation: Conversation) -> None:
            async with side_by_side:
                for repeat in range(self.plan.repeats):
                    await self._climb(arm, conversation, repeat)

        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(climb(conversation))

    async def _climb(self, arm: Arm, conversation: Conversation, repeat: int) -> None:
        answered: set[int] = set()
        for batch in batches(self.plan, conversation, arm):
            keys = {ask_: _key(self.endpoint.build_id, conversation, ask_, arm, repeat) for ask_ in batch}
            open_ = [ask_ for ask_ in batch if keys[ask_] not in self.journal.answered]
            if not open_:
                continue
            history: Messages | None = None
            broken: str | None = None
            if arm == "free" and self.histories is not None:
                turn_end = max(ask_.turn_end for ask_ in open_)
                try:
                    history = await self.histories.grown(self.endpoint, self.prompts, conversation, repeat, turn_end)
                except HistoryBroken as problem:
                    broken = str(problem)
                    await self._check_alive(problem.error)
            sent = await self.journal.sending([keys[ask_] for ask_ in open_])
            async with asyncio.TaskGroup() as group:
                for ask_, record in zip(open_, sent, strict=True):
                    key, order = keys[ask_], record.send_order
                    if broken is not None:
                        group.create_task(self._record(conversation, ask_, key, order, Response(error=broken)))
                    else:
                        group.create_task(self._one(arm, conversation, ask_, key, order, history, set(answered)))
            answered |= {ask_.rung for ask_ in open_}

    async def _one(
        self,
        arm: Arm,
        conversation: Conversation,
        ask_: Ask,
        key: Key,
        order: int,
        history: Messages | None,
        answered: set[int],
    ) -> None:
        messages = self.prompts.messages(conversation, ask_, arm)
        planned: int | None = ask_.prompt_tokens
        if history is not None:
            messages = history[: ask_.turn_end] + messages[ask_.turn_end :]
            planned = len(self.prompts.encode(messages)) if self.prompts.encode is not None else None
        wanted = None
        if arm in ("warm", "alone", "mirrored"):
            wanted = self.prompts.demanded(conversation, ask_.rung, answered)
        # A salt of its own keeps a cold request from finding any other's prefix; vLLM takes 128 letters, no "/".
        salt = sha256("/".join(map(str, (self.plan.run_id, *key))).encode()).hexdigest() if arm == "cold" else None
        rng = random.Random(f"{self.plan.seed}/{key}")
        async with self.in_flight:
            if arm == "branched":
                first, wanted = self.prompts.edited(messages)
                before = await ask(self.endpoint, self._question(first, None, None, None), rng)
                wanted = wanted if before.error is None else None
            response = await ask(self.endpoint, self._question(messages, planned, salt, wanted), rng)
            if response.error is not None:
                await self._check_alive(response.error)
                if error_class(response.error) == "prompt-tokens" and self.prompts.encode is not None:
                    response = replace(
                        response, error=f"{response.error}, encoded {len(self.prompts.encode(messages))}"
                    )
            elif self.gold is not None:
                probe = _probe(conversation, ask_)
                response = await self.gold.scored(self.endpoint, response, messages, probe, salt)
        await self._record(conversation, ask_, key, order, response)

    def _question(self, messages: Messages, planned: int | None, salt: str | None, wanted: int | None) -> Question:
        return Question(
            messages=self.prompts.as_sent(messages),
            prompt_tokens=planned,
            continue_final=messages[-1]["role"] == "assistant",
            max_tokens=self.plan.max_tokens,
            stop=self.plan.stop,
            cache_salt=salt,
            cached_at_most=0 if salt is not None else None,
            cached_at_least=wanted,
        )

    async def _check_alive(self, error: str) -> None:
        """An answer that never came because the server is gone is not recorded: a resumed run asks again."""
        if error.startswith(("connection:", "cut:")):
            await asyncio.sleep(_NOTICE_S)
            self.check_alive(self.endpoint.build_id)

    async def _record(self, conversation: Conversation, ask_: Ask, key: Key, order: int, response: Response) -> None:
        recorded = Replay(
            run_id=self.plan.run_id,
            build_id=key.build_id,
            conversation_id=key.conversation_id,
            probe_id=key.probe_id,
            rung=key.rung,
            arm=key.arm,  # type: ignore[arg-type]
            repeat=key.repeat,
            send_order=order,
            response=response,
        )
        await self.journal.record(recorded)
        probe = _probe(conversation, ask_)
        self.on_reply(Reply(replay=recorded, conversation=conversation, probe=probe, ask=ask_))


def _probe(conversation: Conversation, ask_: Ask) -> Probe:
    return next(probe for probe in conversation.probes if probe.probe_id == ask_.probe_id)


def batches(plan: ReplayPlan, conversation: Conversation, arm: Arm) -> list[list[Ask]]:
    """The asks of a conversation in the groups that are sent together."""
    rungs = [probe_order(plan, conversation, rung) for rung in sorted({ask_.rung for ask_ in conversation.asks})]
    if arm in ("alone", "free", "branched"):  # an earlier answer is part of what these send
        return [batch for asks in rungs for batch in (asks[:1], asks[1:]) if batch]
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
    return sum(key not in answered for key in plan.keys(build_id))


def _key(build_id: str, conversation: Conversation, ask_: Ask, arm: Arm, repeat: int) -> Key:
    return Key(build_id, conversation.conversation_id, ask_.probe_id, ask_.rung, arm, repeat)
