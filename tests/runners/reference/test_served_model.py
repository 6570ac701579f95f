"""The server process with the real model: starting, recalling, ending."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from longrecall.needles.lint import lint
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler, messages_for
from longrecall.needles.server_ruler import ServerRuler
from longrecall.runners.engines import ENGINES
from longrecall.runners.reference.convert import reference_folder

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 120
FACTS = {
    "Mary Okafor": "48213", "Ivan Petrov": "90417", "Lena Schmidt": "33561", "Tom Baker": "72098",
    "Aisha Khan": "15846", "Paul Dubois": "60972",
}  # fmt: skip


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    return kept | {"PYTHONPATH": str(ROOT / ".ns"), "PYTHONSAFEPATH": "1"}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "longrecall.runners.reference.server", *args]


def start(*args: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        command("--port", "0", "--die-with-parent", *args), stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()  # pytest's own time limit bounds it
    assert line, f"the server ended with code {process.wait(WAIT_S)}"
    return process, json.loads(line)["port"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return reference_folder()


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    process, port = start("--folder", str(folder))
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    assert process.wait(WAIT_S) == 0


def conversation(facts: dict[str, str]) -> list[dict[str, str]]:
    messages = []
    for name, code in facts.items():
        messages += [
            {"role": "user", "content": f"Please write this down. The locker code of {name} is {code}."},
            {"role": "assistant", "content": f"Noted. The locker code of {name} is {code}."},
        ]
    return messages


def ask(client: openai.OpenAI, history: Sequence[dict[str, str]], name: str) -> Any:
    messages = [
        *history,
        {"role": "user", "content": f"What is the locker code of {name}?"},
        {"role": "assistant", "content": f"The locker code of {name} is"},
    ]
    return client.chat.completions.create(
        model="reference", messages=messages, temperature=0, max_tokens=8, stop=["\n"],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip


def test_planted_facts_are_recalled_and_the_history_is_cached(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S)
    history = conversation(FACTS)
    replies = {name: ask(client, history, name) for name in FACTS}
    right = sum(FACTS[name] in reply.choices[0].message.content for name, reply in replies.items())
    assert right >= 4  # 6 of 6 when written
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies.values()]
    history_tokens = httpx.post(
        f"{url}/tokenize", json={"messages": history, "add_generation_prompt": False}, trust_env=False
    ).json()["count"]
    assert cached[0] == 0 and all(count >= history_tokens for count in cached[1:])


def test_forced_logprobs_prefer_the_planted_value(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=WAIT_S)

    def score(value: str) -> float:
        text = "User: The locker code of Ann is 48213.\nAssistant: Noted.\nUser: What is it?\nAssistant: The code is"
        prompt, full = (
            httpx.post(f"{url}/tokenize", json={"prompt": t}, trust_env=False).json()["tokens"]
            for t in (text, f"{text} {value}")
        )
        assert full[: len(prompt)] == prompt
        reply = client.completions.create(
            model="reference", prompt=full, echo=True, logprobs=0, max_tokens=0,
            extra_body={"logprob_start_len": len(prompt)},
        )  # fmt: skip
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None
        return sum(logprobs.token_logprobs[len(prompt) :])

    assert score("48213") > max(score("90417"), score("48231"))


def test_server_info_tells_what_is_served(url: str, folder: Path) -> None:
    info = httpx.get(f"{url}/server_info", trust_env=False).json()
    hashes = json.loads((folder / "hashes.json").read_text())
    assert info["weights_hash"] == hashes["model.safetensors"]
    assert info["tokenizer_hash"] == hashes["tokenizer.json"]
    assert len(info["template_hash"]) == 64
    assert (info["page_size"], info["threads"], info["index_topk"]) == (1, 1, 512)
    assert info["context_length"] == 32_768 and info["dtype"] in ("bfloat16", "float32")
    assert {"version", "key_format", "chunked_prefill_size", "disable_radix_cache"} <= set(info)


def test_a_taken_port_is_said_before_the_model_is_loaded(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            command("--folder", str(folder), "--port", str(port)),
            capture_output=True, env=environment(), text=True, timeout=WAIT_S,
        )  # fmt: skip
    assert ended.returncode == 3
    assert f"longrecall: error: cannot serve on 127.0.0.1 port {port}" in ended.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--index-topk", "many"], "many"),
        (["--threads", "0"], "--threads 0"),
        (["--dtype", "fp4"], "--dtype fp4"),
        (["--folder", "/nonexistent"], "/nonexistent"),
        (["--json-model-override-args", '{"index_topkk": 5}'], "index_topkk"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_arguments_name_the_value(folder: Path, args: list[str], words: str) -> None:
    ended = subprocess.run(
        command("--folder", str(folder), *args), capture_output=True, env=environment(), text=True, timeout=WAIT_S
    )
    assert ended.returncode == 2
    assert words in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_server_dies_with_its_parent(folder: Path) -> None:
    parent_code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline().strip(), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, *command("--folder", str(folder), "--port", "0", "--die-with-parent")],
        stdout=subprocess.PIPE, env=environment(), text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    port = json.loads(parent.stdout.readline())["port"]
    assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200
    parent.send_signal(signal.SIGKILL)
    parent.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=1, trust_env=False)
        except httpx.HTTPError:
            break
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_keeps_its_memory_in_huge_pages(url: str) -> None:
    pid = httpx.get(f"{url}/server_info", trust_env=False).json()["pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert any(line.startswith(b"GLIBC_TUNABLES=") and b"glibc.malloc.hugetlb=1" in line for line in environment)


def test_its_tokenize_route_is_the_ruler_of_a_set(url: str, folder: Path) -> None:
    """`longrecall needles make --server`: lengths counted by the server, checked with the tokenizer it holds."""
    ruler = ServerRuler(f"{url}/v1")
    try:
        made = list(make_conversations(recipe("single"), ruler=ruler, rungs=[500, 900], count=1, seed=3))
    finally:
        ruler.close()
    counting = httpx.get(f"{url}/statistics", timeout=WAIT_S).json()["requests"]
    assert lint(made, ruler=Ruler.from_folder(folder)) == []
    asks = [(ask, messages_for(conversation, ask)) for conversation in made for ask in conversation.asks]
    assert [ask.prompt_tokens for ask, _ in asks] == [500, 900]
    _, messages = asks[0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    reply = client.chat.completions.create(model="reference", messages=messages, max_tokens=1)
    assert reply.usage is not None and reply.usage.prompt_tokens == 500
    # Counting asked the tokenizer, never the model.
    assert httpx.get(f"{url}/statistics", timeout=WAIT_S).json()["requests"] == counting + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_arm_is_answered_and_gets_from_the_cache_what_it_wants(
    url: str, folder: Path, tmp_path: Path, third_party: ModuleType
) -> None:
    arms = ("warm", "cold", "branched", "free", "concat", "alone", "mirrored")
    third_party.in_every_arm(url, ENGINES["reference"], folder, tmp_path, arms)
