"""`longrecall bench client`: processor time of the replay client per request, against the same request by bare httpx.

    longrecall bench client --requests 4000 --concurrency 64

The server is a process of its own that answers a fixed chat completion, so that the figures are the client's alone.
The last line on standard output is one JSON document; a row is the median of `--rounds` rounds.
"""

import asyncio
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer

PROMPT_TOKENS = 1000


def _answer() -> bytes:
    content = [{"token": "1", "logprob": -0.1, "bytes": [49], "top_logprobs": []} for _ in range(8)]
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 900}}
    choice = {
        "index": 0, "message": {"role": "assistant", "content": " 48213."}, "finish_reason": "stop",
        "logprobs": {"content": content},
    }  # fmt: skip
    body = json.dumps(
        {"id": "x", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    ).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def _serve(port: int) -> None:
    answer = _answer()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", port)
    await server.serve_forever()


async def _rounds(one: Callable[[], Awaitable[None]], requests: int, concurrency: int, rounds: int) -> list[float]:
    """Processor milliseconds per request, one figure a round."""
    figures = []
    for _ in range(rounds):
        left = requests

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await one()

        before = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        figures.append(1000 * spent / requests)
    return figures


async def _measure(url: str, requests: int, concurrency: int, rounds: int) -> list[dict[str, object]]:
    import httpx

    from longrecall.runners.client import Question, ask, connect
    from longrecall.runners.journal import Journal, Key
    from longrecall.runners.schema import Replay

    messages = [{"role": "user", "content": "The locker code of Ada is 48213. " * 125}]
    messages += [{"role": "assistant", "content": "The locker code of Ada is"}]
    question = Question(messages=messages, prompt_tokens=PROMPT_TOKENS, continue_final=True)
    rows: list[dict[str, object]] = []

    def row(name: str, figures: list[float]) -> None:
        rows.append(
            {"client": name, "cpu_ms_per_request": round(statistics.median(figures), 3), "rounds": len(figures)}
        )

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, limits=limits, trust_env=False) as bare:
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12, "logprobs": True}

        async def by_httpx() -> None:
            reply = await bare.post("/v1/chat/completions", json=body)
            reply.json()

        row("httpx", await _rounds(by_httpx, requests, concurrency, rounds))
    async with connect("b", url, model="m") as endpoint:
        rng = random.Random(0)

        async def by_client() -> None:
            response = await ask(endpoint, question, rng)
            if response.error:
                raise RuntimeError(response.error)

        row("longrecall", await _rounds(by_client, requests, concurrency, rounds))
        with tempfile.TemporaryDirectory() as folder:
            journal, number = Journal(Path(folder)), 0

            async def by_replay() -> None:
                nonlocal number
                number += 1
                key = Key("b", "c", f"p{number}", 1024, "warm", 0)
                (sent,) = await journal.sending([key])
                response = await ask(endpoint, question, rng)
                await journal.record(
                    Replay(
                        run_id="r", build_id="b", conversation_id="c", probe_id=key.probe_id, rung=1024, arm="warm",
                        repeat=0, send_order=sent.send_order, response=response,
                    )
                )  # fmt: skip

            row("longrecall with journal", await _rounds(by_replay, requests, concurrency, rounds))
            journal.close()
    return rows


def bench(
    requests: Annotated[int, typer.Option(min=64, help="Requests of one round.")] = 2000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests open at once.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is reported.")] = 3,
) -> None:
    """Processor time of the replay client per request, against bare httpx."""
    from longrecall.runners.processes import HeldPort

    port = HeldPort()
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, str(port.port)], env=os.environ | {"PYTHONSAFEPATH": "1"}
    )
    try:
        _wait_for(port.port)
        rows = asyncio.run(_measure(f"http://127.0.0.1:{port.port}", requests, concurrency, rounds))
    finally:
        server.kill()
        server.wait()
        port.release()
    for row in rows:
        typer.echo(f"{row['client']:<24} {row['cpu_ms_per_request']} ms", err=True)
    document = {"bench": "client", "requests": requests, "concurrency": concurrency, "unit": "ms of processor time",
                "machine": platform.machine(), "cores": os.cpu_count(), "rows": rows}  # fmt: skip
    typer.echo(json.dumps(document, separators=(",", ":")))


def _wait_for(port: int) -> None:
    import socket

    for _ in range(200):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the bench server did not come up on port {port}")


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
