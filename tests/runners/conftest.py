"""Fixtures shared by the runner tests: planted conversations and loopback servers that end with the test."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from longrecall.runners.processes import HeldPort, Server, stop_all

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"runner_tests_{name}", HERE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    return _load("planted")


@pytest.fixture(scope="session")
def third_party() -> ModuleType:
    return _load("third_party")


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`loopback("--faults", …, name="b")`: a running loopback server."""
    servers: list[Server] = []

    def make(*args: str, name: str = "demo") -> Server:
        command = [sys.executable, str(HERE / "loopback_server.py"), "--port", "{port}", *args]
        server = Server(name, command, dict(os.environ), tmp_path / f"server-{name}", HeldPort())
        servers.append(server)
        server.start()
        asyncio.run(server.wait_ready(120.0))
        return server

    yield make
    stop_all(servers)
