"""The reference build as a server process, over OpenAI's and SGLang's HTTP contract.

    python -m longrecall.runners.reference.server --port 8000
    python -m longrecall.runners.reference.server --folder ~/.cache/longrecall/reference-… --port 0 --threads 1
    python -m longrecall.runners.reference.server --index-topk 1024 --chunked-prefill-size 512

When it serves, one JSON line goes to standard output: {"port": …}. SIGTERM ends it within a few seconds.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from longrecall.runners.reference.engine import Engine
    from longrecall.runners.reference.protocol import Limits
    from longrecall.runners.reference.tokenizer import TextTokenizer

DTYPES = ("auto", "bfloat16", "float32")
DECODE_BACKENDS = ("sparse", "dense")
GRACE_S = 1  # running requests get this long after SIGTERM


class ServerError(RuntimeError):
    """The server cannot start; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Launch arguments; each is a flag of the same name and is reported by /server_info."""

    folder: Path | None = None
    """Model folder; None: the packaged one, made when it is not there."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""
    served_model_name: str = "reference"
    device: str = "cpu"
    dtype: str = "auto"
    """auto, bfloat16 or float32; auto: bfloat16 where the device multiplies it in hardware."""
    threads: int = 1
    """Threads of the model: a campaign serves several builds side by side, one core each."""
    index_topk: int | None = None
    decode_backend: str = "sparse"
    """sparse, or dense: decode by prefill's code."""
    json_model_override_args: str = "{}"
    """JSON object of configuration fields to change, as SGLang's flag."""
    context_length: int | None = None
    """Longest prompt and completion together; None: the model's own."""
    chunked_prefill_size: int = 2048
    max_running_requests: int = 32
    max_queued_requests: int = 256
    max_total_tokens: int = 131_072
    prefix_cache_mb: int = 1024
    disable_radix_cache: bool = False
    batch_window_ms: float = 4.0
    """An idle engine starts once no request has come for this long (at most 25 times as long): requests sent together
    then make the same batches on every build, and so the same rounding."""
    random_seed: int = 0
    die_with_parent: bool = False
    """End when the process that started this one ends (Linux)."""

    def __post_init__(self) -> None:
        for name in ("threads", "chunked_prefill_size", "max_running_requests", "max_total_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: choose one of {', '.join(DTYPES)}")
        if self.decode_backend not in DECODE_BACKENDS:
            raise ValueError(f"--decode-backend {self.decode_backend}: choose one of {', '.join(DECODE_BACKENDS)}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port {self.port}: must be from 0 to 65535")


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """The arguments of a command line; argparse exits with 2 on an unknown or malformed one."""
    parser = argparse.ArgumentParser(
        prog="python -m longrecall.runners.reference.server", description=(__doc__ or "").splitlines()[0]
    )
    defaults = ServerArgs()
    kinds: dict[str, Any] = {"folder": Path, "index_topk": int, "context_length": int}
    for f in dataclasses.fields(ServerArgs):
        flag, default = "--" + f.name.replace("_", "-"), getattr(defaults, f.name)
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            shown = "" if default is None else f"default {default}"
            parser.add_argument(flag, type=kinds.get(f.name, type(default)), default=default, help=shown)
    given = parser.parse_args(argv)
    try:
        return ServerArgs(**vars(given))
    except ValueError as error:
        parser.error(str(error))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent goes."""
    if sys.platform != "linux":
        raise ServerError("--die-with-parent needs Linux")
    parent = os.getppid()
    pr_set_pdeathsig = 1
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0):
        raise ServerError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port is known before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ServerError(f"cannot serve on {host} port {port}: {error.strerror}; choose another --port") from error
    return bound


def _overrides(args: ServerArgs) -> dict[str, Any]:
    try:
        overrides = json.loads(args.json_model_override_args)
    except ValueError as error:
        raise ServerError(f"--json-model-override-args is not JSON: {error}") from error
    if not isinstance(overrides, dict):
        raise ServerError("--json-model-override-args must be a JSON object")
    if args.index_topk is not None:
        overrides["index_topk"] = args.index_topk
    return overrides


def _version() -> str | None:
    try:
        return metadata.version("longrecall")
    except metadata.PackageNotFoundError:  # run from a build tree, not installed
        return None


def server_info(
    args: ServerArgs, tokenizer: "TextTokenizer", limits: "Limits", model: Any, folder: Path
) -> dict[str, object]:
    """What two builds must agree on but for their patch: resolved arguments first, as SGLang's /server_info."""
    from longrecall.runners.reference import indexer

    try:
        hashes = json.loads((folder / "hashes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServerError(f"{folder}/hashes.json cannot be read: {error}") from error
    resolved = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    return {
        "version": _version(),
        "model_path": str(folder),
        **resolved,
        "folder": str(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "page_size": 1,
        "context_length": limits.context_length,
        "index_topk": model.config.index_topk,
        "key_format": indexer.KEY_FORMAT,
        "model_config": dataclasses.asdict(model.config),
        "weights_hash": hashes.get("model.safetensors"),
        "tokenizer_hash": tokenizer.tokenizer_hash,
        "template_hash": tokenizer.template_hash,
    }


MALLOC = "glibc.malloc."
TUNABLES = {
    "hugetlb": 1,
    "arena_max": 1,
    "mmap_max": 0,
    "trim_threshold": 2**32,
    "top_pad": 64 * 2**20,
}
"""Freed memory stays, in huge pages: a forward pass frees and takes hundreds of megabytes, and faulting them in again
page by page was a third of its time. An idle engine gives it back where memory is short."""


def with_huge_pages() -> None:
    """Start this process again, as it is, with glibc's allocator set (read only at start); other libcs ignore it.

    A program read from standard input is gone by now, and an interpreter that cannot be found again serves as it is.
    """
    given = os.environ.get("GLIBC_TUNABLES", "")
    from_stdin = getattr(sys.modules["__main__"], "__file__", None) == "<stdin>"
    if sys.platform == "linux" and MALLOC not in given and not from_stdin:
        ours = ":".join(f"{MALLOC}{name}={value}" for name, value in TUNABLES.items())
        os.environ["GLIBC_TUNABLES"] = f"{given}:{ours}".lstrip(":")
        with suppress(OSError):
            os.execv(sys.executable or "", sys.orig_argv)


def serve(args: ServerArgs) -> None:
    """Load, and serve until SIGTERM or SIGINT."""
    if args.die_with_parent:
        die_with_parent()
    started = time.time()
    bound = bind(args.host, args.port)
    # before torch is imported: OpenMP reads it once, and an unset value means every core of the machine
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))

    import torch

    from longrecall.runners.reference.app import Api
    from longrecall.runners.reference.convert import reference_folder
    from longrecall.runners.reference.engine import Engine, Settings
    from longrecall.runners.reference.model import ReferenceModel
    from longrecall.runners.reference.protocol import Limits
    from longrecall.runners.reference.tokenizer import TextTokenizer

    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    folder = args.folder or reference_folder()
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    model = ReferenceModel.load(folder, device=args.device, dtype=dtype, **_overrides(args))
    model.decode_backend = "dense" if args.decode_backend == "dense" else "sparse"
    tokenizer = TextTokenizer.from_folder(folder)
    longest = model.config.max_position_embeddings
    context = args.context_length or longest
    if not 1 <= context <= longest:
        raise ServerError(f"--context-length {context}: the model holds 1 to {longest} tokens")
    limits = Limits(
        context_length=min(context, args.max_total_tokens),
        vocab_size=model.config.vocab_size,
        model_name=args.served_model_name,
    )
    settings = Settings(
        chunked_prefill_size=args.chunked_prefill_size,
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        max_total_tokens=args.max_total_tokens,
        prefix_cache_bytes=0 if args.disable_radix_cache else args.prefix_cache_mb * 2**20,
        batch_window_s=args.batch_window_ms / 1000,
        max_batch_window_s=25 * args.batch_window_ms / 1000,
        random_seed=args.random_seed,
    )
    engine = Engine(model, tokenizer, settings, on_thread_start=lambda: torch.set_num_threads(args.threads))
    port = bound.getsockname()[1]
    fixed = {
        **server_info(args, tokenizer, limits, model, folder),
        "port": port,
        "pid": os.getpid(),
        "startup_time": time.time() - started,
    }
    engine.start()
    run_http(Api(engine, limits, lambda: fixed).app(), bound, engine, port)


def run_http(app: Any, bound: socket.socket, engine: "Engine", port: int) -> None:
    """Serve until a signal; announces the port once connections are accepted."""
    import uvicorn

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            print(json.dumps({"port": port}), flush=True)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        backlog=2048,
        timeout_keep_alive=300,  # longer than a client keeps an idle connection: the client closes first
        timeout_graceful_shutdown=GRACE_S,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again once it has shut down, for the handler that was there before
        signal.signal(number, lambda *_: None)
    server = Announcing(config)
    try:
        server.run(sockets=[bound])
    finally:
        engine.stop(timeout_s=GRACE_S)


def run(args: ServerArgs) -> NoReturn:
    """Serve, then end the process. Exit codes: 0 stopped by a signal, 2 wrong arguments or files, 3 cannot serve."""
    with_huge_pages()
    code = 0
    try:
        serve(args)
    except KeyboardInterrupt:
        pass
    except (ValueError, ServerError) as error:
        print(f"longrecall: error: {error}", file=sys.stderr)
        code = 3 if isinstance(error, ServerError) else 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the model's thread may be inside a step, and interpreter shutdown would trip over it


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; see the module's docstring."""
    run(parse_args(argv))


if __name__ == "__main__":
    main()
