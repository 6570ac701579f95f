"""Each way a request can fail ends in one class; a planned count that is not served voids the reply."""

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longrecall.runners.client import ERROR_CLASSES, Question, ask, connect, error_class
from longrecall.runners.processes import HeldPort, Server
from longrecall.runners.schema import Response

LOOPBACK = Path(__file__).with_name("loopback_server.py")
MESSAGES = (
    {"role": "user", "content": "Note: The locker code of Ada is 48213. Thanks."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the locker code of Ada?"},
    {"role": "assistant", "content": "The locker code of Ada is"},
)
WORDS = sum(len(message["content"].split()) for message in MESSAGES)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(fault: str | None = None) -> Server:
        faults = tmp_path / "faults.json"
        faults.write_text(json.dumps({"*": fault} if fault else {}))
        seen = tmp_path / "seen.jsonl"
        command = [sys.executable, str(LOOPBACK), "--port", "{port}", "--faults", str(faults), "--seen", str(seen)]
        server = Server("demo", command, dict(os.environ), tmp_path, HeldPort())
        servers.append(server)
        server.start()
        asyncio.run(server.wait_ready(20.0))
        return server

    yield make
    for server in servers:
        server.stop()


def ask_once(server: Server, *, stream: bool, prompt_tokens: int | None = WORDS, timeout_s: float = 20.0) -> Response:
    async def go() -> Response:
        async with connect("demo", server.url, model="loopback", timeout_s=timeout_s, stream=stream) as endpoint:
            question = Question(messages=MESSAGES, prompt_tokens=prompt_tokens, continue_final=True)
            return await ask(endpoint, question, random.Random(0))

    return asyncio.run(go())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_recorded_with_its_usage(served: Callable[..., Server], stream: bool) -> None:
    response = ask_once(served(), stream=stream)
    assert response.error is None and response.text == " 48213." and response.finish_reason == "stop"
    assert response.prompt_tokens == WORDS and response.cached_tokens == 0 and response.completion_tokens == 1
    assert response.token_logprobs == (-0.1,) and response.e2e_ms is not None and response.e2e_ms > 0
    assert (response.ttft_ms is not None) == stream


CASES = [
    ("reset", "connection", 4),
    ("http-500", "http 5xx", 1),
    ("http-503", "http 5xx", 1),
    ("http-429", "http 4xx", 1),
    ("http-400", "http 4xx", 1),
    ("overflow-400", "overflow", 1),
    ("overflow-413", "overflow", 1),
    ("hang", "timeout", 1),
    ("cut", "cut", 1),
    ("invalid-json", "invalid-json", 1),
    ("not-an-object", "invalid-reply", 1),
    ("error-200", "invalid-reply", 1),
    ("no-usage", "usage", 1),
    ("wrong-usage", "prompt-tokens", 1),
    ("wrong-cached", "usage", 1),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "name", "requests"), CASES)
def test_a_fault_has_one_class_and_only_unanswered_requests_are_sent_again(
    served: Callable[..., Server], tmp_path: Path, fault: str, name: str, requests: int, stream: bool
) -> None:
    response = ask_once(served(fault), stream=stream, timeout_s=0.6 if fault == "hang" else 20.0)
    assert response.error is not None and error_class(response.error) == name, response
    assert name in ERROR_CLASSES
    assert len((tmp_path / "seen.jsonl").read_text().splitlines()) == requests


def test_an_empty_choice_list_is_not_an_empty_answer(served: Callable[..., Server]) -> None:
    response = ask_once(served("no-choices"), stream=False)
    assert response.error is not None and response.error.startswith("invalid-reply: choices = []")


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_breaks_once_is_tried_again(served: Callable[..., Server], stream: bool) -> None:
    response = ask_once(served("reset-once"), stream=stream)
    assert response.error is None and response.text == " 48213."


def test_a_count_other_than_planned_names_both(served: Callable[..., Server]) -> None:
    response = ask_once(served(), stream=False, prompt_tokens=WORDS + 3)
    assert response.error == f"prompt-tokens: planned {WORDS + 3}, served {WORDS}"


def test_nobody_listening_is_a_connection_error(tmp_path: Path) -> None:
    held = HeldPort()
    server = Server("demo", [], {}, tmp_path, held)
    response = ask_once(server, stream=False)
    held.release()
    assert response.error is not None and error_class(response.error) == "connection"
