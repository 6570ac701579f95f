"""Inspect AI logs: read back by its own library, and shown by its own viewer."""

import functools
import http.server
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

inspect_log = pytest.importorskip(
    "inspect_ai.log", reason="inspect_ai is not installed: pip install 'longrecall[inspect]'"
)


@pytest.fixture(scope="module")
def logs(
    tmp_path_factory: pytest.TempPathFactory, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> Path:
    from longrecall.results.report import export_logs

    folder = tmp_path_factory.mktemp("inspect")
    campaign = simulated(conversations=3, probes=2, losses={"base": (0, 0), "base-again": (0, 0), "worse": (0, 1.0)})
    export_logs(run_writer(folder / "run", campaign), folder / "logs")
    return folder / "logs"


def test_logs_read_back_with_every_reply(logs: Path) -> None:
    read = {path.name.rsplit("_", 1)[1]: inspect_log.read_eval_log(str(path)) for path in logs.glob("*.eval")}
    assert set(read) == {"base.eval", "base-again.eval", "worse.eval"}
    for log in read.values():
        assert len(log.samples) == 3 * 2 * 3
        assert all(sample.scores["recall"].explanation == sample.metadata["outcome"] for sample in log.samples)
        assert all(len(sample.messages) > 4 for sample in log.samples)
    right = [s.scores["recall"].value for s in read["worse.eval"].samples if s.metadata["rung"] > 512]
    assert all(value == 0 or math.isnan(value) for value in right if value != 1) and sum(right) < len(right) / 2


def test_inspect_viewer_shows_them(browser: Any, logs: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "inspect_ai", "view", "bundle", "--log-dir", str(logs), "--output-dir", str(site)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *arguments: None  # type: ignore[attr-defined]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page = browser.open_url(f"http://127.0.0.1:{server.server_port}/index.html")
        shown = page.js(
            "new Promise(done => { let n = 0; const look = () => { const text = document.body.innerText;"
            " text.includes('longrecall') || n++ > 300 ? done(text) : setTimeout(look, 100) }; look() })"
        )
        assert "longrecall" in shown
    finally:
        server.shutdown()
