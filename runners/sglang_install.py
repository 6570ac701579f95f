"""An environment of its own with SGLang for machines without a GPU: `make sglang-cpu`.

    python -m longrecall.runners.sglang_install .venv-sglang

SGLang's CPU packages need a compiled `sgl_kernel` and a compiler on the way. A dense text model on the `torch_native`
attention backend calls nothing of it, so SGLang itself is installed from its wheel without its dependencies, the ones
that such a server imports are installed by name, and `sglang_shim.py` answers for the rest. SGLang's own source stays
as released; that the shim stands in is written into the report of every campaign (manifest, package `sgl_kernel`).

About 2.7 GB and a few minutes. Never an environment that is used for anything else: SGLang pins what it needs.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SGLANG_VERSION = "0.5.23"
SHIM = Path(__file__).with_name("sglang_shim.py")
SHIM_MODULE = "longrecall_sglang_shim"
MARKER = "longrecall-sglang.json"
TORCH = ("torch==2.13.0", "triton==3.9.0", "numpy", "scipy")
"""0.5.23 asks for torch 2.14.1, of which not every index has a CPU build; 2.13.0 serves the same."""
WITHOUT_DEPENDENCIES = (f"sglang=={SGLANG_VERSION}", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "dill")
"""Their dependencies are CUDA packages, or another torch."""
IMPORTED = (
    # the model and its tokenizer
    "transformers==5.19.0", "tokenizers==0.23.2", "compressed-tensors==0.18.0", "sentencepiece==0.2.1", "tiktoken",
    "gguf", "einops", "pillow",
    # the server and the messages between its processes
    "fastapi", "uvicorn>=0.51", "uvloop", "aiohttp", "httpx", "requests", "python-multipart", "pyzmq", "msgspec",
    "orjson", "pybase64", "pydantic", "jsonschema", "watchfiles", "openai==2.8.0", "openai-harmony==0.0.4",
    "sglang-router==0.3.2",
    # imported at start-up whether or not they are used
    "prometheus-client", "setproctitle", "psutil", "packaging", "partial_json_parser", "interegular",
    "llguidance>=1.7.6,<2", "regex", "tqdm", "xxhash", "zstandard", "IPython", "soundfile==0.13.1", "easydict",
    "blobfile==3.0.0", "distro", "py-spy",
)  # fmt: skip


_TRIES = 3
_PAUSE_S = 10.0
_STEP_S = 1800.0
"""torch and Triton are a gigabyte and a half to fetch and unpack."""


class SglangInstallError(RuntimeError):
    """The environment could not be made; the message says which step failed and how its output ends."""


def python_of(venv: Path) -> Path:
    """The interpreter of an environment."""
    return venv / "bin" / "python"


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_STEP_S)
    except subprocess.TimeoutExpired:
        raise SglangInstallError(f"{what} was not done after {_STEP_S:.0f} s") from None
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise SglangInstallError(f"{what} failed with code {done.returncode}:\n{tail}")
    return done.stdout


def _fetch(command: Sequence[str], what: str) -> None:
    """Run pip; again where it failed, since what most often fails is a download. What it has fetched it keeps."""
    for left in reversed(range(_TRIES)):
        try:
            _run(command, what)
            return
        except SglangInstallError as problem:
            if not left:
                raise SglangInstallError(f"{problem}\n(tried {_TRIES} times)") from None
            print(f"{problem}\nonce more in {_PAUSE_S:.0f} s", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S)


def content() -> str:
    """Hash of all that decides what the environment holds."""
    what = json.dumps([TORCH, WITHOUT_DEPENDENCIES, IMPORTED]).encode() + SHIM.read_bytes()
    return hashlib.sha256(what).hexdigest()


def is_complete(venv: Path) -> bool:
    """Whether `venv` is what this module would make now."""
    try:
        return bool(json.loads((venv / MARKER).read_text())["content"] == content()) and python_of(venv).exists()
    except (OSError, ValueError, LookupError, TypeError):
        return False


def put_shim(venv: Path) -> None:
    """Copy the shim into the environment and have its Python import it at start-up."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_run([str(python_of(venv)), "-I", "-c", ask], "asking for site-packages").strip())
    (site / f"{SHIM_MODULE}.py").write_bytes(SHIM.read_bytes())
    (site / f"{SHIM_MODULE}.pth").write_text(f"import {SHIM_MODULE}; {SHIM_MODULE}.install()\n")


def install(venv: Path, *, torch_index: str | None = None, say: bool = True) -> Path:
    """Make or complete the environment; returns its interpreter.

    Args:
        torch_index: index with CPU builds of torch, where the default index has only CUDA builds.

    Raises:
        SglangInstallError: `venv` is the environment this runs in, or a step failed.
    """
    if venv.resolve() == Path(sys.prefix).resolve():
        raise SglangInstallError(f"{venv} is the environment of longrecall itself; SGLang gets one of its own")
    python = python_of(venv)
    if is_complete(venv):
        return python
    (venv / MARKER).unlink(missing_ok=True)
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(venv)], f"making {venv}")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = (
        ("torch for the CPU", [*pip, *(["--index-url", torch_index] if torch_index else []), *TORCH]),
        ("SGLang", [*pip, "--no-deps", *WITHOUT_DEPENDENCIES]),
        ("what SGLang imports", [*pip, *IMPORTED]),
    )
    for what, command in steps:
        if say:
            print(f"installing {what}", flush=True)
        _fetch(command, f"installing {what}")
    put_shim(venv)
    check = "import sgl_kernel, torchvision, sglang.version, torch; print(sglang.version.__version__)"
    told = _run([str(python), "-c", check], "importing SGLang").strip()
    if told != SGLANG_VERSION:
        raise SglangInstallError(f"{venv} holds sglang {told}, not {SGLANG_VERSION}")
    (venv / MARKER).write_text(json.dumps({"sglang": told, "content": content()}) + "\n")
    return python


def main(argv: Sequence[str] | None = None) -> int:
    """Make the environment and the served model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch-index", help="package index with CPU builds of torch")
    parser.add_argument("--no-model", action="store_true", help="leave the served model to the first campaign")
    args = parser.parse_args(argv)
    try:
        print(f"SGLang {SGLANG_VERSION}: {install(args.venv, torch_index=args.torch_index)}")
    except SglangInstallError as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 3
    if not args.no_model:
        from longrecall.runners.sglang_model import sglang_folder

        print(f"model: {sglang_folder()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
