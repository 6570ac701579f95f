"""Where a patch shows: selection, logits, prefill against decode and cold against warm, of served SGLang builds.

    make h200 PYTHON=python3                                        # both tiny models, tables in results/runs/h200
    python -m longrecall.runners.h200 patchsets/sglang-h200.toml --model MODEL --work NEW --out table.json

For one GPU machine with an installed SGLang 0.5.17, which serves sparse attention (DeepSeek-V3.2, V4). Base, base
again and one build for each patch are made of hard links to the installed package plus the patch's diffs, served side
by side on the same GPU, and asked the same random tokens at each length. Weights may be random: nothing is recalled
here, the question is what a patch changes and where. Divergences are exact over the whole vocabulary, in nats:

    prefill          KL(base | build) at the last 8 prompt tokens and the first generated one
    decode           KL(base | build) at generated tokens, as long as the tokens before them agree
    prefill_decode   KL(decode | the same tokens prefilled after a flush), within one build
    cold_warm        KL(cold | the same prompt again from the prefix cache), within one build
    overlap          |base ∩ build| / |base| of the selected positions, by layer

`base-again` gives the floor of each; `divergence.py` says what counts as shown. MODEL may also be the name of a
built-in tiny model, which is served without a tokenizer; for dummy weights of sensible size give
`--base-diff patchsets/patches/sglang-h200-sane-dummy-weights.diff`, which every build, base included, then gets.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longrecall.runners.diffs import apply_diff
from longrecall.runners.divergence import Floats, compare, conclude, decode_topk, dense, rows_to_keep
from longrecall.runners.patchset import load_patchset, read_diffs
from longrecall.runners.schema import Patch, PatchSet

LENGTHS = (512, 2600, 1024, 4096, 1900, 6000)
NUM_GENERATED = 16
NUM_TAIL = 8
"""Prompt tokens at the end whose distributions are compared."""
_SERVER_KEYS = (
    "version", "attention_backend", "prefill_attention_backend", "decode_attention_backend", "dsa_prefill_backend",
    "dsa_decode_backend", "dsa_topk_backend", "moe_runner_backend", "kv_cache_dtype", "page_size",
    "disable_radix_cache", "chunked_prefill_size", "max_total_num_tokens",
)  # fmt: skip


_COMMON_CONFIG: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "ep_size": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "n_routed_experts": 16, "n_shared_experts": 1, "qk_rope_head_dim": 64,
    "index_head_dim": 128, "index_n_heads": 64, "max_position_embeddings": 65536, "vocab_size": 4096,
    "rope_theta": 10000.0, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
}  # fmt: skip
# The kernels fix head sizes, index heads and index_topk; hidden sizes, layers and experts are free.
TINY_MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v32-tiny": {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 512,
        "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 4, "first_k_dense_replace": 1,
        "num_key_value_heads": 64, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "q_lora_rank": 512, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "index_topk": 2048,
        "rope_scaling": {
            "type": "yarn", "factor": 16, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "deepseek-v4-tiny": {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
        "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 6, "num_key_value_heads": 1,
        "head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "index_topk": 512,
        "num_experts_per_tok": 6, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "num_hash_layers": 0,
        "sliding_window": 128, "compress_ratios": [0, 0, 4, 128, 4, 128], "compress_rope_theta": 160000,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "n_group": 1, "topk_group": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 4, "original_max_position_embeddings": 16384, "beta_fast": 32, "beta_slow": 1,
        },
    },
}  # fmt: skip


class ServedBuildError(RuntimeError):
    """A build that could not be made, served or asked; the message carries the end of its log."""


# --- builds and servers -------------------------------------------------------------------------------------------


def make_tree(site: Path, tree: Path, diffs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Hard links of SITE/sglang in `tree`, with the diffs applied exactly; returns the files changed."""
    shutil.copytree(site / "sglang", tree / "sglang", copy_function=_link)
    changed: tuple[str, ...] = ()
    for name, text in diffs:
        changed += apply_diff(tree, text, name)
    return changed


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def find_site(given: Path | None) -> Path:
    """The folder that holds the package sglang: the given one, else the one this Python would import from.

    Raises:
        ServedBuildError: there is none.
    """
    if given is None:
        found = importlib.util.find_spec("sglang")
        if found is None or not found.submodule_search_locations:
            raise ServedBuildError("this Python has no sglang: install sglang==0.5.17 here, or give --site")
        given = Path(next(iter(found.submodule_search_locations))).parent
    if not (given / "sglang").is_dir():
        raise ServedBuildError(f"{given}: holds no package sglang; give its site-packages folder")
    return given


def find_model(name: str, work: Path) -> tuple[Path, tuple[str, ...]]:
    """The model folder and the launch arguments that it needs.

    Raises:
        ServedBuildError: neither a folder with a config.json nor a built-in name.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name).resolve(), ()
    if name not in TINY_MODELS:
        raise ServedBuildError(f"--model {name}: no folder with a config.json, and none of {', '.join(TINY_MODELS)}")
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON_CONFIG, **TINY_MODELS[name]}, indent=1) + "\n")
    return folder, ("--skip-tokenizer-init",)


class Server:
    """One served build: its process group, its log and what it said of itself."""

    def __init__(
        self, name: str, tree: Path, site: Path, model: Path, port: int, args: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.name, self.port, self.log = name, port, tree / "server.log"
        self.args, self.env = tuple(args), dict(env)
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
            "--port", str(port), "--nccl-port", str(port + 1), *args,
        ]  # fmt: skip
        whole = {**os.environ, **env, "PYTHONPATH": f"{tree}:{site}", "PYTHONUNBUFFERED": "1"}
        whole.pop("PYTHONSAFEPATH", None)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=whole, cwd=tree, start_new_session=True
            )

    def healthy(self) -> bool:
        try:
            with _opener().open(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(timeout=3)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(port: int, path: str, body: Mapping[str, Any], timeout: float = 120) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _opener().open(request, timeout=timeout) as reply:
            text = reply.read()
    except urllib.error.HTTPError as problem:
        raise ServedBuildError(f"{path}: HTTP {problem.code}: {problem.read()[:500]!r}") from None
    return json.loads(text) if text.startswith(b"{") else text


def prompt(length: int, number: int, vocab_size: int) -> list[int]:
    """Random tokens; the same for every build."""
    draw = random.Random(f"{length}-{number}")
    return [draw.randrange(10, vocab_size) for _ in range(length)]


def _generate(port: int, ids: Sequence[int], num: int, start: int, vocab_size: int, topk: bool = False) -> Any:
    return post(
        port,
        "/generate",
        {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": num, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": vocab_size,
            "return_indexer_topk": topk,
        },
    )


def _prompt_rows(reply: Any, num: int, vocab_size: int) -> Floats:
    """[num, V]: the distributions of the last `num` prompt tokens. The first entry of the reply is empty."""
    return np.stack([dense(top, vocab_size) for top in reply["meta_info"]["input_top_logprobs"][-num:]])


def _generated_rows(reply: Any, vocab_size: int) -> Floats:
    return np.stack([dense(top, vocab_size) for top in reply["meta_info"]["output_top_logprobs"]])


def measure_one(
    port: int, length: int, number: int, *, vocab_size: int, index_topk: int, onset: int, dense_up_to: int, topk: bool
) -> dict[str, Any]:
    """Ask one server one prompt cold, warm and, with what it generated, again after a flush; arrays to compare."""
    ids = prompt(length, number, vocab_size)
    start = length - NUM_TAIL - 1
    cold = _generate(port, ids, NUM_GENERATED, start, vocab_size, topk)
    warm = _generate(port, ids, 1, start, vocab_size)
    post(port, "/flush_cache?timeout=20", {})
    out = [int(token) for token in cold["output_ids"]]
    replay = _generate(port, ids + out[:-1], 1, length - 2, vocab_size)
    arrays: dict[str, Any] = {
        "cold_tail": _prompt_rows(cold, NUM_TAIL, vocab_size),
        "cold_out": _generated_rows(cold, vocab_size),
        "warm_tail": _prompt_rows(warm, NUM_TAIL, vocab_size),
        "warm_out": _generated_rows(warm, vocab_size),
        "replay": np.concatenate([_prompt_rows(replay, len(out) - 1, vocab_size), _generated_rows(replay, vocab_size)]),
        "out": np.array(out, dtype=np.int32),
        "cached": np.array([r["meta_info"]["cached_tokens"] for r in (cold, warm, replay)], dtype=np.int32),
    }
    if topk:
        num_rows = length + len(out) - 1
        selected = decode_topk(cold["meta_info"]["indexer_topk"], index_topk, num_rows)
        for where, rows in rows_to_keep(length, num_rows, onset, dense_up_to).items():
            arrays[f"rows_{where}"] = np.array(rows, dtype=np.int32)
            arrays[f"topk_{where}"] = selected[rows]
    return arrays


def measure(port: int, folder: Path, lengths: Sequence[int], num_prompts: int, how: Mapping[str, Any]) -> None:
    """Measure one server, length by length, one .npz each; a failure is written to error.txt."""
    try:
        for number in range(num_prompts):
            for length in lengths:
                arrays = measure_one(port, length, number, topk=number == 0, **how)
                part = folder / f"{length}-{number}.part"
                with part.open("wb") as stream:
                    np.savez(stream, **arrays)
                part.rename(part.with_suffix(".npz"))
    except Exception:
        (folder / "error.txt").write_text(traceback.format_exc())
        raise


class Table:
    """What has been measured so far, compared with base; each prompt is read and compared once."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = dict(folders)
        self._compared: dict[tuple[str, str], dict[str, Any]] = {}

    def compared(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """{build: {length: [what `compare` says of each prompt]}}; a prompt that cannot be compared says why."""
        for name, folder in self.folders.items():
            for file in sorted(folder.glob("*.npz")):
                base = self.folders["base"] / file.name
                if (name, file.stem) not in self._compared and base.exists():
                    self._compared[name, file.stem] = self._compare(base, file)
        result: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in self.folders}
        for (name, stem), said in sorted(self._compared.items()):
            result[name].setdefault(stem.split("-")[0], []).append(said)
        return result

    @staticmethod
    def _compare(base: Path, file: Path) -> dict[str, Any]:
        with np.load(base) as ours, np.load(file) as theirs:
            try:
                return compare(dict(ours), dict(theirs))
            except ValueError as problem:
                return {"problem": str(problem)}


def _gpu() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as problem:
        return f"unknown ({problem})"


def _packages(site: Path) -> dict[str, str]:
    wanted = (
        "sglang",
        "sglang-kernel",
        "sgl-deep-gemm",
        "apache-tvm-ffi",
        "transformers",
        "torch",
        "triton",
        "flashinfer-python",
    )
    paths = [str(site), *sys.path]
    found: dict[str, str] = {}
    for name in wanted:
        for distribution in importlib.metadata.distributions(name=name, path=paths):
            found.setdefault(name, distribution.version)
    return found


def run(patchset: PatchSet, options: argparse.Namespace) -> dict[str, Any]:
    """Serve and measure every build until done or until the deadline; the table so far is written as it grows."""
    site, out, work = options.site, options.out, options.work
    model, model_args = find_model(options.model, work)
    shared = [(file.name, file.read_text(encoding="utf-8")) for file in options.base_diff]
    began = time.monotonic()
    config = json.loads((model / "config.json").read_text())
    how = {
        "vocab_size": int(config["vocab_size"]),
        "index_topk": int(config["index_topk"]),
        "onset": patchset.onset_tokens or int(config["index_topk"]),
        "dense_up_to": options.dense_prefill_tokens,
    }
    none = Patch(patch_id="base")
    patches = {"base": none, "base-again": none, **{patch.patch_id: patch for patch in patchset.patches}}
    folders = {name: work / "measured" / name for name in patches}
    servers: dict[str, Server] = {}
    asking: dict[str, multiprocessing.Process] = {}
    about: dict[str, dict[str, Any]] = {name: {} for name in patches}
    result: dict[str, Any] = {}

    def write() -> None:
        result.update(
            patchset=patchset.name,
            model={k: v for k, v in config.items() if isinstance(v, int | float | str)},
            base_diffs=[file.name for file in options.base_diff],
            lengths=sorted(options.lengths),
            prompts=options.prompts,
            onset_tokens=how["onset"],
            gpu=gpu,
            packages=packages,
            args=list(patchset.args),
            env=patchset.env,
            builds=about,
            seconds=round(time.monotonic() - began, 1),
            compared=table.compared(),
        )
        result["concluded"] = conclude(result["compared"], how["onset"])
        partial = out.with_suffix(".part")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(out)

    gpu, packages, table = _gpu(), _packages(site), Table(folders)
    try:
        for number, (name, patch) in enumerate(patches.items()):
            folders[name].mkdir(parents=True)
            tree = work / "trees" / name
            about[name]["changed"] = list(make_tree(site, tree, (*shared, *read_diffs(patchset, patch))))
            about[name]["title"] = patch.title
            args = [*model_args, *patchset.args, *patch.args]
            servers[name] = Server(
                name, tree, site, model, options.port + 10 * number, args, {**patchset.env, **patch.env}
            )
        last = 0
        while True:
            now = time.monotonic() - began
            for name, server in servers.items():
                if name in asking or "error" in about[name]:
                    continue
                if server.process.poll() is not None:
                    about[name]["error"] = f"ended with {server.process.returncode} before it was ready"
                elif server.healthy():
                    about[name]["ready_s"] = round(now, 1)
                    info = json.loads(_opener().open(f"http://127.0.0.1:{server.port}/server_info", timeout=60).read())
                    about[name]["server"] = {key: info[key] for key in _SERVER_KEYS if key in info}
                    print(f"{now:6.1f} s  {name} is ready", flush=True)
                    asking[name] = multiprocessing.Process(
                        target=measure, args=(server.port, folders[name], options.lengths, options.prompts, how)
                    )
                    asking[name].start()
            done = sum(len(list(folder.glob("*.npz"))) for folder in folders.values())
            if done >= last + 2 * len(patches):
                last = done
                print(f"{now:6.1f} s  {done} prompts measured", flush=True)
                write()
            waiting = [
                name for name in patches
                if "error" not in about[name] and (name not in asking or asking[name].is_alive())
            ]  # fmt: skip
            if not waiting or now > options.deadline_s:
                break
            time.sleep(0.5)
        for name in waiting:
            about[name]["error"] = "unfinished at the deadline"
    finally:
        for process in asking.values():
            process.kill()
        for server in servers.values():
            server.stop()
        for name, server in servers.items():
            if (folders[name] / "error.txt").exists():
                about[name]["error"] = (folders[name] / "error.txt").read_text()[-1500:]
            if "error" in about[name]:
                about[name]["log"] = server.tail()
        write()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patchset", type=Path)
    parser.add_argument("--site", type=Path, help="folder that holds the package sglang; default: this Python's")
    parser.add_argument("--model", required=True, help=f"model folder, or one of {', '.join(TINY_MODELS)}")
    parser.add_argument("--out", type=Path, required=True, help="the table, as JSON")
    parser.add_argument("--work", type=Path, required=True, help="a new folder for trees, logs and arrays")
    parser.add_argument("--base-diff", type=Path, action="append", default=[], help="applied to every build first")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--deadline-s", type=float, default=1800)
    parser.add_argument(
        "--dense-prefill-tokens", type=int, default=0,
        help="prompts of up to this length are prefilled densely (V3.2: 2048), so that nothing is selected for them",
    )  # fmt: skip
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        patchset = load_patchset(options.patchset)
        # Servers start in a folder of their own.
        options.site, options.work = find_site(options.site).resolve(), options.work.resolve()
        options.work.mkdir(parents=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = run(patchset, options)
    except (ValueError, ServedBuildError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    failed = {name: about["error"] for name, about in result["builds"].items() if "error" in about}
    for name, error in failed.items():
        print(f"longrecall: error: build {name}: {error}", file=sys.stderr)
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
