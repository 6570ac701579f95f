"""A server is waited for with a bound, reported with its log, and never survives us."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longrecall.runners.processes import HeldPort, Server, ServerError, stop_all

LOOPBACK = Path(__file__).with_name("loopback_server.py")
ROOT = LOOPBACK.parent.parent.parent


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*args: str, name: str = "demo") -> Server:
        command = [sys.executable, str(LOOPBACK), "--port", "{port}", *args]
        server = Server(name, command, dict(os.environ), tmp_path / name, HeldPort())
        servers.append(server)
        server.start()
        return server

    yield make
    stop_all(servers)


def gone(pid: int, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ready_means_a_token_came(launch: Callable[..., Server]) -> None:
    server = launch()
    asyncio.run(server.wait_ready(120.0))
    server.check_alive()
    (child,) = children(server.pid)
    server.stop()
    assert gone(child) and server.exit_code() is not None


def test_a_server_that_dies_at_start_is_reported_with_its_log(launch: Callable[..., Server]) -> None:
    server = launch("--exit-at-start", "3")
    with pytest.raises(
        ServerError, match=r"build demo: the server ended with code 3(?s:.*)cannot load the weights: file is cut"
    ):
        asyncio.run(server.wait_ready(120.0))


def test_the_wait_is_bounded(launch: Callable[..., Server]) -> None:
    server = launch("--never-ready")
    with pytest.raises(ServerError, match=r"no token after \d+ s \(/health answered 503\)"):
        asyncio.run(server.wait_ready(3.0))


def test_a_server_that_answers_without_a_token_is_not_waited_for(launch: Callable[..., Server]) -> None:
    # An hour would be more than this test has.
    with pytest.raises(ServerError, match=r"chat/completions answered 500: .*precision is"):
        asyncio.run(launch("--no-token").wait_ready(3600.0))


def test_a_server_that_ignores_sigterm_is_killed(
    launch: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrecall.runners.processes.GRACE_S", 0.5)
    server = launch("--ignore-sigterm")
    asyncio.run(server.wait_ready(120.0))
    (child,) = children(server.pid)
    server.stop()
    assert gone(child)


def test_a_grandchild_in_its_own_session_is_ended_too(launch: Callable[..., Server], tmp_path: Path) -> None:
    note = tmp_path / "orphan.pid"
    server = launch("--orphan", str(note))
    asyncio.run(server.wait_ready(120.0))
    orphan = int(note.read_text())
    server.stop()
    assert gone(orphan)


@pytest.mark.parametrize("victim", ["campaign", "supervisor"])
def test_nothing_survives_kill_9(tmp_path: Path, victim: str) -> None:
    program = textwrap.dedent(f"""
        import os, sys, asyncio, time
        from pathlib import Path
        from longrecall.runners.processes import HeldPort, Server
        command = [sys.executable, {str(LOOPBACK)!r}, "--port", "{{port}}"]
        server = Server("demo", command, dict(os.environ), Path({str(tmp_path)!r}), HeldPort())
        server.start()
        asyncio.run(server.wait_ready(120.0))
        print(server.pid, flush=True)
        time.sleep(600)
    """)
    env = os.environ | {"PYTHONPATH": str(ROOT / ".ns")}
    campaign = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert campaign.stdout is not None
        supervisor = int(campaign.stdout.readline())
        (server,) = children(supervisor)
        os.kill(campaign.pid if victim == "campaign" else supervisor, signal.SIGKILL)
        assert gone(server) and gone(supervisor)
    finally:
        campaign.kill()
        campaign.wait()


def test_a_held_port_is_given_to_nobody_else_and_lets_its_server_in() -> None:
    held = HeldPort()
    try:
        others = [HeldPort() for _ in range(50)]
        assert held.port not in {other.port for other in others}
        for other in others:
            other.release()
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("127.0.0.1", held.port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", held.port))
            server.listen()
            with socket.create_connection(("127.0.0.1", held.port), timeout=5):
                pass
    finally:
        held.release()


def test_a_taken_port_is_an_error_that_names_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 is taken"):
            HeldPort(port)


def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    server = Server("demo", ["/no/such/program"], dict(os.environ), tmp_path, HeldPort())
    server.start()
    with pytest.raises(ServerError, match="/no/such/program"):
        asyncio.run(server.wait_ready(120.0))
    server.stop()
