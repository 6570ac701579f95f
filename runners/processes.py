"""Server processes: started on a port held for them, watched until they answer, and ended whatever becomes of us.

A server runs under runners/supervise.py, which holds the rule that nothing survives. Here: the port, the log, the
bounded wait for a generated token (an open port or a 200 on /health does not mean that a model answers), and stopping.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from longrecall.runners import supervise

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_TAIL_LINES = 15
_REFUSALS = 5


class ServerError(RuntimeError):
    """A server that did not start, did not answer, or ended; the message carries the end of its log."""


class HeldPort:
    """A free port of the loopback interface, held until `release`, so that no other process is given it.

    The socket is bound and never listens. Linux lets a second socket bind the same port when both set SO_REUSEADDR
    (asyncio and uvicorn do) or both set SO_REUSEPORT and neither listens yet; a bind to port 0 never returns it.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
        except OSError as problem:
            self._socket.close()
            raise ServerError(f"port {port} of 127.0.0.1 is taken: {problem.strerror}") from None
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()


def log_tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, for an error message; says so when there is nothing."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 16384))
            text = stream.read().decode("utf-8", "replace")
    except OSError as problem:
        return f"(log {path}: {problem.strerror})"
    tail = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"    {line}" for line in tail) if tail else f"(log {path} is empty)"


class Server:
    """One server process of one build. Start it from a thread that lives as long as the server is to live."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path, port: HeldPort) -> None:
        """`command` with "{port}" in it; runs in `folder`, logs to `folder`/server.log."""
        self.name = name
        self.folder = folder
        self.log = folder / "server.log"
        self.url = f"http://127.0.0.1:{port.port}"
        self._port = port
        self._command = [part.replace("{port}", str(port.port)) for part in command]
        self._env = dict(env)
        self._log_begins = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self.started = 0.0

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        read_end, self._lifeline = os.pipe()
        self.started = time.monotonic()
        try:
            with self.log.open("ab") as log:
                self._log_begins = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", supervise.__file__, str(read_end), str(GRACE_S), "--", *self._command],
                    cwd=self.folder,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end,),
                    # Its own session: a Ctrl-C at the terminal is for the campaign, which stops servers in order.
                    start_new_session=True,
                )
        except OSError as problem:
            os.close(self._lifeline)
            self._lifeline = None
            raise ServerError(f"build {self.name}: cannot start {self._command[0]}: {problem}") from None
        finally:
            os.close(read_end)

    def info_urls(self) -> dict[str, str]:
        """Where the server's own report is, by part; one part without a name for a server that is one process."""
        return {"": self.url}

    def log_of_this_start(self) -> str:
        """What this process has logged so far (the file may begin with earlier ones), at most 4 MB."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(self._log_begins)
                return stream.read(2**22).decode("utf-8", "replace")
        except OSError:
            return ""

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor."""
        return self._process.pid if self._process else None

    def exit_code(self) -> int | None:
        """None while the server runs."""
        return self._process.poll() if self._process else None

    def check_alive(self) -> None:
        """Raises ServerError with the end of the log when the server has ended."""
        code = self.exit_code()
        if code is not None:
            how = f"was ended by {signal.Signals(code - 128).name}" if 128 < code < 193 else f"ended with code {code}"
            if code == 128 + signal.SIGKILL:
                how += " (out of memory?)"
            raise ServerError(f"build {self.name}: the server {how}; its log {self.log} ends:\n{log_tail(self.log)}")

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server has generated a token.

        Raises:
            ServerError: it ended, or did not answer in `timeout_s`; with the end of its log.
        """
        deadline = self.started + timeout_s
        said = "nothing was listening"
        refusals = 0
        async with httpx.AsyncClient(base_url=self.url, timeout=10.0, trust_env=False) as client:
            delay = 0.05
            while time.monotonic() < deadline:
                self.check_alive()
                try:
                    reply = await client.get("/health")
                    said = f"/health answered {reply.status_code}"
                    if reply.status_code < 400 or reply.status_code == 404:
                        said = await first_token(client, max(1.0, deadline - time.monotonic()))
                        if not said:
                            self.check_alive()
                            return
                        # 503 means "not yet"; any other answer again and again will not become a token.
                        refusals = 0 if " answered 503" in said else refusals + 1
                        if refusals == _REFUSALS:
                            break
                except httpx.HTTPError as problem:
                    said = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
                await asyncio.sleep(delay)
                delay = min(0.5, delay * 1.5)
        waited_s = time.monotonic() - self.started
        raise ServerError(
            f"build {self.name}: no token after {waited_s:.0f} s ({said}); its log {self.log} ends:\n"
            + log_tail(self.log)
        )

    def stop(self) -> None:
        """End the server: SIGTERM, a bounded wait, SIGKILL. Safe to call twice."""
        self.ask_to_stop()
        process = self._process
        if process is not None:
            try:
                process.wait(GRACE_S + 3.0)
            except subprocess.TimeoutExpired:
                process.kill()  # the server itself then dies of PR_SET_PDEATHSIG
                process.wait(5.0)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        self._port.release()

    def ask_to_stop(self) -> None:
        """Signal only, so that several servers can end at the same time; `stop` waits."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()


async def first_token(client: httpx.AsyncClient, timeout_s: float) -> str:
    """Ask for one token; "" when one came, else what came instead."""
    models = await client.get("/v1/models")
    try:
        model = models.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        return f"/v1/models answered {models.status_code}: {models.text[:200]!r}"
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
    reply = await client.post("/v1/chat/completions", json=body, timeout=timeout_s)
    try:
        if reply.status_code == 200 and isinstance(reply.json()["choices"][0]["message"], dict):
            return ""
    except (ValueError, LookupError, TypeError):
        pass
    return f"/v1/chat/completions answered {reply.status_code}: {reply.text[:200]!r}"


def stop_all(servers: Sequence[Server]) -> None:
    """End several servers at once; all are signalled before the first is waited for."""
    for server in servers:
        server.ask_to_stop()
    for server in servers:
        server.stop()
