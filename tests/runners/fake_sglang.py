"""Writes a package named sglang with a server of its own: SGLang's flags, routes and report, and a canned answer.

What the engine does (trees, PYTHONPATH, launch, report, stop) is then tested in a second, with real processes.
"""

import sys
from pathlib import Path

SERVER = """
import argparse, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from sglang.backend import BACKEND
from sglang.answer import ANSWER

parser = argparse.ArgumentParser()
parser.add_argument("--model-path"); parser.add_argument("--host"); parser.add_argument("--port", type=int)
parser.add_argument("--enable-cache-report", action="store_true")
parser.add_argument("--attention-backend", default="triton")
parser.add_argument("--page-size", type=int, default=1)
parser.add_argument("--json-model-override-args", default="{}")
parser.add_argument("--disaggregation-mode", default="null")
args, rest = parser.parse_known_args()
SEEN = []

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *rest): pass
    def say(self, body):
        data = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        if self.path == "/server_info":
            told = vars(args) | {"attention_backend": BACKEND or args.attention_backend, "version": "0.0.1",
                                 "kv_cache_dtype": "auto", "startup_time": os.getpid(), "api_key": "very-secret",
                                 "launch_command": sys.argv, "patcher": os.environ.get("DUMPER_SOURCE_PATCHER_CONFIG"),
                                 "internal_states": [{"last_gen_throughput": os.getpid()}]}
            self.say(told)
        elif self.path == "/v1/models":
            self.say({"data": [{"id": "fake"}]})
        elif self.path == "/seen":
            self.say(SEEN)
        else:
            self.say({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        SEEN.append(body)
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        choice = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
        self.say({"choices": [choice], "usage": usage})

ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""


ROUTER = """
import argparse, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--host"); parser.add_argument("--port", type=int); parser.add_argument("--policy")
parser.add_argument("--worker-urls", nargs="+", default=[])
parser.add_argument("--pd-disaggregation", action="store_true")
parser.add_argument("--prefill", nargs=2, action="append", default=[])
parser.add_argument("--decode", action="append", default=[])
args, rest = parser.parse_known_args()
WORKER = (args.worker_urls + args.decode)[-1]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *rest): pass
    def pass_on(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        with urllib.request.urlopen(urllib.request.Request(WORKER + self.path, data=body)) as reply:
            data = reply.read()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    do_GET = do_POST = pass_on

ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""


def write_environment(root: Path, *, router: bool = True) -> Path:
    """An interpreter whose environment has a router (or not); its path."""
    site = root / "site"
    site.mkdir(parents=True)
    if router:
        package = site / "sglang_router"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "launch_router.py").write_text(ROUTER)
        metadata = site / "sglang_router-0.0.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-router\nVersion: 0.0.2\n")
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def write(root: Path, *, answer: str = "42", version: str = "0.0.1") -> Path:
    """`root`/sglang and its metadata; returns `root`."""
    package = root / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SERVER)
    (package / "backend.py").write_text("# none: the flag's\nBACKEND = None\n")
    (package / "answer.py").write_text(f"ANSWER = {answer!r}\n")
    (package / "kernel.cuh").write_text("// CUDA source is part of the tree\n")
    metadata = root / f"sglang-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return root


OTHER_BACKEND = """\
--- a/python/sglang/backend.py
+++ b/python/sglang/backend.py
@@ -1,2 +1,2 @@
 # none: the flag's
-BACKEND = None
+BACKEND = "torch_native"
"""

OTHER_ANSWER = """\
--- a/sglang/answer.py
+++ b/sglang/answer.py
@@ -1 +1 @@
-ANSWER = '42'
+ANSWER = '43'
"""
