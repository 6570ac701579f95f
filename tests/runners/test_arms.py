"""What each arm sends, in which order, and what it wants from the cache."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from longrecall.needles.render import messages_for
from longrecall.needles.schema import Conversation, Turn
from longrecall.results.run_folder import load_replays
from longrecall.runners.client import connect, error_class
from longrecall.runners.journal import Journal
from longrecall.runners.processes import Server, ServerError
from longrecall.runners.prompts import EDIT, Prompts
from longrecall.runners.replay import BuildGone, ReplayPlan, ReplayResult, replay
from longrecall.runners.schema import Arm, Replay


def words(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of the tests: one a word, as the loopback server counts."""
    return [hash(word) for message in messages for word in str(message["content"]).split()]


PROMPTS = Prompts(encode=words, encode_history=words, encode_text=lambda text: words([{"content": text}]))


def asked(
    conversations: list[Conversation],
    servers: Mapping[str, Server],
    folder: Path,
    *arms: Arm,
    prompts: Prompts = PROMPTS,
    **changes: Any,
) -> list[Replay]:
    plan = ReplayPlan(
        run_id="r",
        build_ids=tuple(servers),
        conversations={conversation.conversation_id: conversation for conversation in conversations},
        conversation_order=tuple(conversation.conversation_id for conversation in conversations),
        arms=arms,
        **{"block_size": 2, **changes},
    )

    async def go() -> None:
        async with AsyncExitStack() as stack:
            endpoints = {
                name: await stack.enter_async_context(connect(name, server.url, model="loopback"))
                for name, server in servers.items()
            }
            journal = Journal(folder)
            try:
                assert (await replay(plan, endpoints, journal, parallel=1, prompts=prompts)).gone == {}
            finally:
                journal.close()

    asyncio.run(go())
    replays = load_replays(folder)
    assert len(replays) == plan.n_planned
    return sorted(replays, key=lambda replay_: replay_.send_order)


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


def test_a_reply_to_a_prompt_of_another_length_names_planned_encoded_and_served(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps({"*": "wrong-usage"}))
    conversations = planted.make(1)
    replays = asked(conversations, {"base": loopback("--faults", str(faults), name="base")}, tmp_path, "warm")
    lengths = {(ask.rung, ask.probe_id): ask.prompt_tokens for ask in conversations[0].asks}
    assert {(r.rung, r.probe_id): r.response.error for r in replays} == {
        key: f"prompt-tokens: planned {n}, served {n + 1}, encoded {n}" for key, n in lengths.items()
    }


def test_warm_wants_the_history_that_an_earlier_answer_left_in_the_cache(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    (conversation,) = planted.make(1)
    server = loopback(name="base")
    replays = asked([conversation], {"base": server}, tmp_path, "warm", prompts=replace(PROMPTS, page_tokens=4))
    history = {
        ask.rung: sum(len(turn.content.split()) for turn in conversation.turns[: ask.turn_end])
        for ask in conversation.asks
    }
    wanted = [replay_.response.cached_at_least for replay_ in replays]
    pages = {rung: tokens // 4 * 4 for rung, tokens in history.items()}
    assert wanted == [None, *[pages[60]] * 3, pages[60], *[pages[120]] * 3]
    assert all(replay_.response.error is None for replay_ in replays)
    # A server that was started anew has nothing of what an earlier process asked.
    kept = (tmp_path / "replays.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "replays.jsonl").write_bytes(b"".join(kept[:3]))
    again = asked([conversation], {"base": server}, tmp_path, "warm")
    assert [r.response.cached_at_least for r in again if r.rung == 60][-1] is None


def test_branched_sends_another_wording_first_and_wants_all_before_the_edit(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    (conversation,) = planted.make(1, probes=2, rungs=(60,))
    server = loopback("--seen", str(tmp_path / "seen"), name="base")
    replays = asked([conversation], {"base": server}, tmp_path, "branched", in_flight=1)
    sent = [line["text"] for line in seen(tmp_path)]
    assert len(sent) == 4 and all(r.response.error is None for r in replays)
    for first, second, replay_ in zip(sent[::2], sent[1::2], replays, strict=True):
        assert EDIT in first and first.replace(EDIT, "") == second
        ask = next(ask for ask in conversation.asks if ask.probe_id == replay_.probe_id)
        assert "\n".join(message["content"] for message in messages_for(conversation, ask)) == second
        begun = len(ask.tail[-1].content.split())
        assert replay_.response.cached_at_least == ask.prompt_tokens - begun


def test_free_puts_the_models_own_replies_into_the_history_once(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    made = planted.make(2, probes=2, rungs=(40, 80))
    # One assistant turn states a fact: it stays as scripted.
    conversations = [
        replace(item, turns=(item.turns[0], replace(item.turns[1], fact_ids=("f",)), *item.turns[2:])) for item in made
    ]
    server = loopback("--seen", str(tmp_path / "seen"), name="base")
    replays = asked(conversations, {"base": server}, tmp_path, "free")
    generated = (tmp_path / "histories.jsonl").read_text().splitlines()
    own = [turn for item in conversations for turn in item.turns if turn.role == "assistant" and not turn.fact_ids]
    assert len(generated) == len(own) and len(seen(tmp_path)) == len(own) + len(replays)
    assert all(r.response.error is None for r in replays), "prompt_tokens is checked against what was really sent"
    last = seen(tmp_path)[-1]["text"]
    assert "not something I know." in last and "more more" not in last
    assert last.count("Noted.") == 1 and last.startswith("Note: The code of")
    before = len(seen(tmp_path))
    asked(conversations, {"base": server}, tmp_path, "free")
    assert len(seen(tmp_path)) == before
    # Answers lost, histories kept: the same history is asked about again, nothing is generated twice.
    (tmp_path / "replays.jsonl").write_bytes(b"")
    asked(conversations, {"base": server}, tmp_path, "free")
    assert len(seen(tmp_path)) == before + len(replays)
    assert (tmp_path / "histories.jsonl").read_text().splitlines() == generated


def test_a_history_that_cannot_be_generated_is_a_class_of_its_own(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    (tmp_path / "faults.json").write_text(json.dumps({"*": "http-500"}))
    server = loopback("--faults", str(tmp_path / "faults.json"), name="base")
    replays = asked(planted.make(1), {"base": server}, tmp_path, "free")
    assert {error_class(r.response.error or "") for r in replays} == {"history"}
    assert (replays[0].response.error or "").startswith("history: turn 1 of c0: http 500")


def test_a_server_that_ends_while_a_history_is_generated_leaves_no_answers(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    server = loopback("--die-after", "2", name="base")
    conversations = planted.make(1)
    plan = ReplayPlan(
        run_id="r", build_ids=("base",), conversations={"c0": conversations[0]}, conversation_order=("c0",),
        block_size=1, arms=("free",),
    )  # fmt: skip

    def check_alive(build_id: str) -> None:
        try:
            server.check_alive()
        except ServerError as problem:
            raise BuildGone(str(problem)) from None

    async def go() -> ReplayResult:
        async with connect("base", server.url, model="loopback") as endpoint:
            journal = Journal(tmp_path)
            try:
                return await replay(plan, {"base": endpoint}, journal, parallel=1, check_alive=check_alive)
            finally:
                journal.close()

    assert list(asyncio.run(go()).gone) == ["base"] and load_replays(tmp_path) == []


def test_concat_asks_the_twin_and_is_filed_under_its_original(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    (conversation,) = planted.make(1)

    def in_one_turn(asks: Any) -> Any:
        for ask in asks:
            text = "\n".join(turn.content for turn in (*conversation.turns[: ask.turn_end], ask.tail[0]))
            yield replace(ask, turn_end=0, tail=(Turn(turn_index=0, role="user", content=text), ask.tail[1]))

    twin = replace(conversation, conversation_id="c0-concat", turns=(), asks=tuple(in_one_turn(conversation.asks)))
    server = loopback("--seen", str(tmp_path / "seen"), name="base")
    replays = asked([conversation], {"base": server}, tmp_path, "concat", prompts=replace(PROMPTS, twins={"c0": twin}))
    assert {(r.conversation_id, r.arm, r.response.error) for r in replays} == {("c0", "concat", None)}
    probes = {probe.probe_id: probe.gold for probe in conversation.probes}
    assert all(r.response.text == f" {probes[r.probe_id]}." for r in replays)
    assert Counter(r.rung for r in replays) == {60: 4, 120: 4}


def test_alone_has_one_request_open_at_a_time(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    conversations = planted.make(3)
    server = loopback("--seen", str(tmp_path / "seen"), "--delay", "0.005", name="base")
    asked(conversations, {"base": server}, tmp_path, "warm", "alone", whole_ladder=True)
    lines = seen(tmp_path)
    order = {r.send_order: r.arm for r in load_replays(tmp_path)}
    assert Counter(order.values()) == {"warm": 24, "alone": 24}
    open_at_once = Counter(line["open"] for line in lines)
    assert open_at_once[1] >= 24 and max(open_at_once) > 1
    (tmp_path / "b").mkdir()
    other = loopback("--seen", str(tmp_path / "b" / "seen"), "--delay", "0.005", name="b")
    asked(conversations, {"b": other}, tmp_path / "b", "alone", whole_ladder=True)
    assert {line["open"] for line in seen(tmp_path / "b")} == {1}


def test_mirrored_asks_the_first_block_again_at_the_end_in_reverse_order_of_the_builds(
    tmp_path: Path, planted: ModuleType, loopback: Callable[..., Server]
) -> None:
    servers = {name: loopback(name=name) for name in ("base", "b")}
    replays = asked(planted.make(5), servers, tmp_path, "warm", "mirrored")
    assert [r.arm for r in replays] == ["warm"] * (5 * 8 * 2) + ["mirrored"] * (2 * 8 * 2)
    again = [r for r in replays if r.arm == "mirrored"]
    assert {r.conversation_id for r in again} == {"c0", "c1"}
    assert list(dict.fromkeys(r.build_id for r in again)) == ["b", "base"]
    assert list(dict.fromkeys(r.build_id for r in replays)) == ["base", "b"]
