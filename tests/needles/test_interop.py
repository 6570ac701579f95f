"""A set is used without our runner: plain `datasets`, plain `openai`, a server that knows nothing of us."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from longrecall.needles.dataset import EXAMPLE as SHOWN
from longrecall.needles.dataset import from_row, read_parquet, write_set
from longrecall.needles.lint import lint
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import Element, Recipe, recipe
from longrecall.needles.render import Ruler, RulerError
from longrecall.needles.server_ruler import ServerRuler

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "run_needles_set.py"


class Server:
    """An OpenAI-compatible server on loopback whose "model" looks the answer up in the prompt."""

    def __init__(self, ruler: Ruler, *, tokenize: bool) -> None:
        self.ruler = ruler
        self.asked = 0
        self.lengths: list[int] = []
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        if tokenize:
            routes.append(Route("/tokenize", self.tokenize, methods=["POST"]))
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> str:
        self._thread.start()
        deadline = time.monotonic() + 120
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/v1"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    def _count(self, body: dict) -> int:  # type: ignore[type-arg]
        return len(
            self.ruler.encode(
                body["messages"],
                add_generation_prompt=body.get("add_generation_prompt", True),
                continue_final_message=body.get("continue_final_message", False),
            )
        )

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "lookup", "object": "model"}]})

    async def tokenize(self, request: Request) -> JSONResponse:
        return JSONResponse({"count": self._count(await request.json())})

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked += 1
        contents = [message["content"] for message in body["messages"]]
        name = re.findall(r"[A-Z]\w+", contents[-1])[-1]
        told = next((re.search(r"\d{5}", text) for text in contents[:-2] if name in text), None)
        self.lengths.append(self._count(body))
        usage = {"prompt_tokens": self._count(body), "completion_tokens": 1, "total_tokens": self._count(body) + 1}
        message = {"role": "assistant", "content": f" {told.group()}." if told else "?"}
        return JSONResponse(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "lookup",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": usage,
            }
        )


@pytest.fixture(params=[True, False], ids=["tokenize", "usage-only"])
def server(request: pytest.FixtureRequest, tekken: Ruler) -> Iterator[tuple[Server, str]]:
    served = Server(tekken, tokenize=request.param)
    yield served, served.start()
    served.stop()


def test_plain_load_dataset_reads_a_set(tmp_path: Path, tekken: Ruler) -> None:
    made = list(make_conversations(recipe("mixed"), ruler=tekken, rungs=[1300, 1800], count=3, seed=2))
    written = write_set(made, tmp_path / "set")
    by_folder = datasets.load_dataset(str(tmp_path / "set"), split="train", cache_dir=str(tmp_path / "cache"))
    by_file = datasets.load_dataset(
        "parquet", data_files=str(written.path), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert [from_row(row) for row in by_folder] == made
    assert [from_row(row) for row in by_file] == made
    card = (tmp_path / "set" / "README.md").read_text()
    assert written.suite_hash in card and "1300, 1800" in card


def test_the_example_runs_a_set_against_an_openai_server(tmp_path: Path, tekken: Ruler) -> None:
    served = Server(tekken, tokenize=False)
    url = served.start()
    plain = Recipe(name="plain", elements=(Element(count=4),), answer_prefix=True)
    made = make_conversations(plain, ruler=tekken, rungs=[700, 1200], count=2, seed=5)
    written = write_set(made, tmp_path / "set")
    try:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), str(written.path), url, "lookup"],
            capture_output=True,
            text=True,
            timeout=120,
            env={"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": ""},
        )
    finally:
        served.stop()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "16 of 16 prompts answered with the planted value"
    assert served.asked == 16
    assert served.lengths == [ask.prompt_tokens for c in read_parquet(written.path) for ask in c.asks]
    code = EXAMPLE.read_text()
    assert "import longrecall" not in code and "from longrecall" not in code
    lines = [line for line in code.split('"""')[2].splitlines() if line and not line.startswith("import ")]
    assert len(lines) == 10
    assert code.endswith(SHOWN) and SHOWN in (tmp_path / "set" / "README.md").read_text()


def test_the_python_shown_in_the_docs_makes_a_set(
    tmp_path: Path, tekken_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (EXAMPLE.parents[1] / "needles.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m").symlink_to(tekken_folder)
    assert "count=40" in code
    exec(compile(code.replace("count=40", "count=8"), "needles.md", "exec"), {})
    loaded = datasets.load_dataset("sets/mine", split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 8 and {ask["rung"] for row in loaded for ask in row["asks"]} == {1024, 4096}


def test_a_server_can_be_the_ruler(server: tuple[Server, str], tekken: Ruler) -> None:
    _, url = server
    ruler = ServerRuler(url)
    try:
        assert ruler.model == "lookup"
        made = list(make_conversations(recipe("single"), ruler=ruler, rungs=[500, 900], count=2, seed=3))
    finally:
        ruler.close()
    # The local ruler of the same model agrees on every length.
    assert lint(made, ruler=tekken) == []
    assert {ask.rung for conversation in made for ask in conversation.asks} == {500, 900}


def test_a_dead_server_is_one_clear_error() -> None:
    with pytest.raises(RulerError, match=r"no answer from http://127\.0\.0\.1:9/v1/models"):
        ServerRuler("http://127.0.0.1:9/v1", timeout_s=5)


def test_reading_back_gives_the_same_conversations(tmp_path: Path, tekken: Ruler) -> None:
    made = list(make_conversations(recipe("hops"), ruler=tekken, rungs=[900], count=3, seed=2))
    assert read_parquet(write_set(made, tmp_path / "s").path) == made
