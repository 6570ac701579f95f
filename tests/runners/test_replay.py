"""Everything planned is asked once, of every build alike, and each probe ends in exactly one right class."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest

from longrecall.needles.schema import Conversation
from longrecall.results.run_folder import load_replays
from longrecall.runners.client import connect, error_class
from longrecall.runners.journal import Journal
from longrecall.runners.processes import Server, ServerError
from longrecall.runners.replay import BuildGone, ReplayPlan, ReplayResult, Reply, cells, replay
from longrecall.runners.schema import Replay

HERE = Path(__file__).parent


def plan_of(
    conversations: list[Conversation], builds: tuple[str, ...] = ("base", "b"), **changes: object
) -> ReplayPlan:
    order = [conversation.conversation_id for conversation in conversations]
    random.Random(1).shuffle(order)
    settings: dict[str, object] = {"block_size": 2, "seed": 3} | changes
    return ReplayPlan(
        run_id="r",
        build_ids=builds,
        conversations={conversation.conversation_id: conversation for conversation in conversations},
        conversation_order=tuple(order),
        **settings,  # type: ignore[arg-type]
    )


def run(
    plan: ReplayPlan,
    servers: Mapping[str, Server],
    run_dir: Path,
    planted: ModuleType,
    *,
    timeout_s: float = 20.0,
    on_reply: Callable[[Reply], None] = lambda reply: None,
) -> ReplayResult:
    async def go() -> ReplayResult:
        def check(build_id: str) -> None:
            try:
                servers[build_id].check_alive()
            except ServerError as problem:
                raise BuildGone(str(problem)) from None

        async with AsyncExitStack() as stack:
            endpoints = {
                name: await stack.enter_async_context(connect(name, server.url, model="loopback", timeout_s=timeout_s))
                for name, server in servers.items()
            }
            journal = Journal(run_dir)
            try:
                return await replay(
                    plan, endpoints, journal, parallel=2, check_alive=check,
                    on_reply=on_reply,
                )  # fmt: skip
            finally:
                journal.close()

    return asyncio.run(go())


def identity(replay_: Replay) -> tuple[str, str, str, int]:
    return (replay_.build_id, replay_.conversation_id, replay_.probe_id, replay_.rung)


def test_all_is_asked_once_and_rungs_go_up(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    plan = plan_of(planted.make(5))
    servers = {name: loopback(name=name) for name in plan.build_ids}
    told: list[Reply] = []
    run(plan, servers, tmp_path, planted, on_reply=told.append)
    replays = load_replays(tmp_path)
    assert len(replays) == plan.n_planned == 5 * 4 * 2 * 2 == len({identity(r) for r in replays}) == len(told)
    assert sorted(r.send_order for r in replays) == list(range(plan.n_planned))
    assert all(r.response.error is None for r in replays)
    for reply in told:
        assert reply.replay.response.text == f" {reply.probe.gold}."
    for build in plan.build_ids:
        for conversation_id in plan.conversation_order:
            rungs = [r.rung for r in sorted(replays, key=lambda r: r.send_order)
                     if (r.build_id, r.conversation_id) == (build, conversation_id)]  # fmt: skip
            assert rungs == sorted(rungs)


def test_the_first_probe_of_a_rung_fills_the_cache_for_the_rest(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    plan = plan_of(planted.make(2), builds=("base",))
    run(plan, {"base": loopback(name="base")}, tmp_path, planted)
    by_rung = Counter((r.conversation_id, r.rung, (r.response.cached_tokens or 0) > 0) for r in load_replays(tmp_path))
    for conversation in plan.conversations:
        for rung in (60, 120):
            assert by_rung[conversation, rung, False] == 1 and by_rung[conversation, rung, True] == 3


def test_cold_requests_carry_salts_of_their_own(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    plan = plan_of(planted.make(2), builds=("base",), arms=("cold",))
    run(plan, {"base": loopback("--seen", str(tmp_path / "seen"), name="base")}, tmp_path, planted)
    salts = [json.loads(line)["salt"] for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(set(salts)) == plan.n_planned and None not in salts
    assert all(len(salt) <= 128 and salt.isalnum() for salt in salts), "vLLM takes no others"
    assert {r.response.cached_tokens for r in load_replays(tmp_path)} == {0}


def test_builds_take_turns_at_going_first(planted: ModuleType) -> None:
    plan = plan_of(planted.make(12), builds=("a", "b", "c"))
    first = [cell.build_id for cell in cells(plan) if cell.number == cell.number][::3]
    assert Counter(first) == {"a": 2, "b": 2, "c": 2}
    for number in range(6):
        block = [cell for cell in cells(plan) if cell.number == number]
        assert {cell.build_id for cell in block} == {"a", "b", "c"}
        assert len({cell.conversation_ids for cell in block}) == 1


def test_base_and_positive_control_go_ahead_through_the_first_conversations(planted: ModuleType) -> None:
    plan = plan_of(planted.make(16), builds=("base", "a", "bad", "c"), first=("base", "bad"))
    order = [(cell.number, cell.build_id) for cell in cells(plan)]
    assert order[:12] == [(number, build) for number in range(6) for build in ("base", "bad")]
    assert len(order) == len(set(order)) == 8 * 4


def test_a_second_run_of_the_same_plan_asks_nothing(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    plan = plan_of(planted.make(3), builds=("base",))
    server = loopback("--seen", str(tmp_path / "seen"), name="base")
    run(plan, {"base": server}, tmp_path, planted)
    before = (tmp_path / "replays.jsonl").read_bytes()
    run(plan, {"base": server}, tmp_path, planted)
    assert (tmp_path / "replays.jsonl").read_bytes() == before
    assert len((tmp_path / "seen").read_text().splitlines()) == plan.n_planned


def test_a_build_whose_server_ends_leaves_the_others_unharmed(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    plan = plan_of(planted.make(4))
    servers = {"base": loopback(name="base"), "b": loopback("--die-after", "10", name="b")}
    result = run(plan, servers, tmp_path, planted)
    assert list(result.gone) == ["b"] and "dying as told" in result.gone["b"]
    counts = Counter(r.build_id for r in load_replays(tmp_path))
    assert counts["base"] == plan.n_planned // 2 and 0 < counts["b"] <= 10
    assert all(r.response.error is None for r in load_replays(tmp_path)), "what died unanswered is not an answer"
    servers["b"] = loopback(name="b2")
    assert run(plan, servers, tmp_path, planted).gone == {}
    assert Counter(r.build_id for r in load_replays(tmp_path)) == {"base": 32, "b": 32}


CLASS_OF = {
    None: None, "reset-once": None, "slow": None, "http-500": "http 5xx", "http-503": "http 5xx",
    "http-429": "http 4xx",
    "http-400": "http 4xx", "overflow-400": "overflow", "overflow-413": "overflow", "hang": "timeout", "cut": "cut",
    "invalid-json": "invalid-json", "not-an-object": "invalid-reply", "no-choices": "invalid-reply",
    "error-200": "invalid-reply", "no-usage": "usage", "wrong-usage": "prompt-tokens", "wrong-cached": "usage",
    "reset": "connection",
}  # fmt: skip


HANG_S = 20.0
"""Time limit of a request under faults: a slow machine must not turn an answer into a hang. Schedules run side by side,
so that hangs are waited for together."""
SCHEDULES_AT_ONCE = 16


def question_key(messages: list[dict[str, str]]) -> str:
    return sha256("\n".join(message["content"] for message in messages).encode()).hexdigest()[:16]


def streamed(number: int) -> bool:
    """Whether the replies of a schedule are streamed, which costs the client four times as much."""
    return number % 4 == 1


def check_schedules(tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server], schedules: range) -> None:
    """Each schedule: a random fault, or none, for every probe of 3 conversations x 4 probes x 2 rungs."""
    faults: dict[str, str] = {}
    wanted: dict[tuple[int, str, str, int], str | None] = {}
    for number in schedules:
        rng = random.Random(number)
        for conversation in planted.make(3, seed=number):
            for ask in conversation.asks:
                # a broken connection costs the backoff and a hang the time limit: both are drawn less often
                fault = rng.choices(list(CLASS_OF), [6, 1, 1] + [1] * (len(CLASS_OF) - 4) + [0.3])[0]
                if fault == "hang" and number % 10 != 1:
                    fault = None
                if fault:
                    faults[question_key(planted.messages_for(conversation, ask))] = fault
                name = "cut" if fault == "no-choices" and streamed(number) else CLASS_OF[fault]
                wanted[number, conversation.conversation_id, ask.probe_id, ask.rung] = name
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(faults))
    server = loopback("--faults", str(path), name="base")

    async def go() -> None:
        side_by_side = asyncio.Semaphore(SCHEDULES_AT_ONCE)
        async with (
            connect("base", server.url, model="loopback", timeout_s=HANG_S) as whole,
            connect("base", server.url, model="loopback", timeout_s=HANG_S, stream=True) as stream,
        ):

            async def one(number: int) -> None:
                endpoint = stream if streamed(number) else whole
                plan = plan_of(planted.make(3, seed=number), builds=("base",), block_size=3)
                folder = tmp_path / f"run-{number}"
                folder.mkdir()
                async with side_by_side:
                    journal = Journal(folder)
                    try:
                        await replay(plan, {"base": endpoint}, journal, parallel=1)
                    finally:
                        journal.close()

            async with asyncio.TaskGroup() as group:
                for number in schedules:
                    group.create_task(one(number))

    asyncio.run(go())
    seen: Counter[str | None] = Counter()
    for number in schedules:
        replays = load_replays(tmp_path / f"run-{number}")
        assert len(replays) == len({identity(r) for r in replays}) == 3 * 4 * 2
        for r in replays:
            name = error_class(r.response.error) if r.response.error else None
            assert name == wanted[number, r.conversation_id, r.probe_id, r.rung], (number, r)
            seen[name] += 1
    assert set(seen) == set(CLASS_OF.values()), "a class was never drawn: the schedules do not test it"


def test_a_hundred_random_fault_schedules_end_in_the_right_classes(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    check_schedules(tmp_path, planted, loopback, range(100))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_hundred_fault_schedules_end_in_the_right_classes(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    check_schedules(tmp_path, planted, loopback, range(1000, 1500))


PROGRAM = """
import asyncio, importlib.util, random, sys
from pathlib import Path
from contextlib import AsyncExitStack
from longrecall.runners.client import connect
from longrecall.runners.journal import Journal
from longrecall.runners.replay import ReplayPlan, replay
spec = importlib.util.spec_from_file_location("planted", {planted!r})
planted = importlib.util.module_from_spec(spec); spec.loader.exec_module(planted)
conversations = planted.make({count})
order = [c.conversation_id for c in conversations]
random.Random(1).shuffle(order)
plan = ReplayPlan(run_id="r", build_ids=("base", "b"), conversations={{c.conversation_id: c for c in conversations}},
                  conversation_order=tuple(order), block_size=2, seed=3)
async def go():
    async with AsyncExitStack() as stack:
        endpoints = {{name: await stack.enter_async_context(connect(name, url, model="loopback"))
                     for name, url in {urls!r}.items()}}
        journal = Journal(Path({run_dir!r}))
        print("in flight", len(journal.in_flight), flush=True)
        await replay(plan, endpoints, journal, parallel=2)
        journal.close()
asyncio.run(go())
print("done", flush=True)
"""


def test_kill_9_at_random_moments_loses_and_doubles_nothing(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    count, rng = 8, random.Random(11)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    servers = {
        name: loopback("--delay", "0.01", "--seen", str(tmp_path / f"seen-{name}"), name=name) for name in ("base", "b")
    }
    program = PROGRAM.format(
        planted=str(HERE / "planted.py"), count=count, run_dir=str(run_dir),
        urls={name: server.url for name, server in servers.items()},
    )  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(HERE.parent.parent / ".ns")}
    planned = 2 * count * 4 * 2
    in_flight = kills = 0
    for _ in range(40):
        process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        in_flight += int(process.stdout.readline().split()[-1])
        # killed once a random number of further answers is on the disk, or when it is done
        target = answers(run_dir) + rng.randrange(5, 45)
        deadline = time.monotonic() + 60
        while process.poll() is None and answers(run_dir) < target and time.monotonic() < deadline:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait(60)
        if process.returncode == 0:
            break
    assert process.returncode == 0 and kills >= 2
    replays = load_replays(run_dir)
    assert len(replays) == len({identity(r) for r in replays}) == planned
    assert all(r.response.error is None for r in replays)
    requests = Counter(
        (name, json.loads(line)["key"])
        for name in servers
        for line in (tmp_path / f"seen-{name}").read_text().splitlines()
    )
    assert len(requests) == planned
    assert sum(requests.values()) - planned <= in_flight, "only what was in flight at a kill may be asked again"


def answers(run_dir: Path) -> int:
    path = run_dir / "replays.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
