"""The suspects other than index keys, measured on the reference build: routed scaling, hyper-connections, split decode.

    python docs/benchmarks/reference_suspects.py            # writes reference_suspects.json and .md beside this file

Routed scaling: real activations of the base build go through each patched build's own MoE code, run from a patched
copy of the sources in a process of its own; `fit_parts` reads the exponent off the outputs and the contract tracer
reads it off the sources. Hyper-connections and split decode: divergence of the next-token distributions, beside the
divergence that a mere change of packing brings.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# (file, text that occurs once or more, what replaces its first occurrence)
PATCHES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "base": (),
    "double scaling in hash layers": (
        (
            "runners/reference/moe.py",
            "apply_routed_scaling_factor_on_output=False",
            "apply_routed_scaling_factor_on_output=True",
        ),
    ),
    "missing scaling": (
        (
            "runners/reference/moe.py",
            "moe_sum_reduce(expert_out[rows], topk_weights[rows], self.routed_scaling_factor)",
            "moe_sum_reduce(expert_out[rows], topk_weights[rows], 1.0)",
        ),
    ),
}
EXPECTED: dict[str, tuple[int, int]] = {
    "base": (1, 1),
    "double scaling in hash layers": (2, 1),
    "missing scaling": (0, 0),
}
"""Exponent of the hash layers and of the others."""


def prompt(folder: Path, lines: int, seed: int) -> list[int]:
    """Planted facts in plain chat, as tokens."""
    from longrecall.runners.reference.evidence import prompt_text, prompt_tokens

    return prompt_tokens(folder, prompt_text(lines, seed, begun="The access code of"))


def record(folder: Path, tokens: list[int], path: Path) -> None:
    """Save the inputs of every layer's MoE when the base build prefills `tokens`."""
    from longrecall.runners.reference.interface import Chunk
    from longrecall.runners.reference.model import ReferenceModel

    model = ReferenceModel.load(folder)
    seen: dict[str, Tensor] = {}
    for i, layer in enumerate(model.layers):
        inner = layer.mlp

        def mlp(x: Tensor, token_ids: Tensor, i: int = i, inner: Any = inner) -> Tensor:
            seen[f"x{i}"], seen["token_ids"] = x.clone(), token_ids.clone()
            return inner(x, token_ids)

        layer.mlp = mlp  # type: ignore[assignment]
    model.prefill([Chunk(tokens=tokens, cache=model.new_cache(), logits="none")])
    save_file(seen, path)


def replay(folder: Path, inputs: Path, outputs: Path) -> None:
    """In a patched tree's own process: that build's MoE outputs on the recorded inputs."""
    from longrecall.runners.reference.model import ReferenceModel

    model = ReferenceModel.load(folder)
    given = load_file(inputs)
    with torch.inference_mode():
        done = {
            f"out{i}": torch.cat(list(layer.mlp(given[f"x{i}"], given["token_ids"])))
            for i, layer in enumerate(model.layers)
        }
    save_file({name: t.contiguous() for name, t in done.items()}, outputs)


def patched_tree(name: str, into: Path) -> Path:
    """Copy the sources and apply one of PATCHES; the tree's PYTHONPATH entry is <into>/.ns."""
    for part in ("kernels", "runners", "needles"):
        shutil.copytree(ROOT / part, into / part, ignore=shutil.ignore_patterns("__pycache__"))
    (into / ".ns" / "longrecall").mkdir(parents=True)
    for part in ("kernels", "runners", "needles"):
        (into / ".ns" / "longrecall" / part).symlink_to(into / part)
    for file, old, new in PATCHES[name]:
        text = (into / file).read_text(encoding="utf-8")
        if old not in text:
            raise RuntimeError(f"{file} no longer holds {old!r}: adapt PATCHES")
        (into / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    return into


def traced(tree: Path) -> tuple[int | None, int | None]:
    """What the contract tracer reads off a tree's sources: the routed exponents of hash layers and others."""
    from longrecall.kernels.contract.routed_scaling import Scenario, trace
    from longrecall.kernels.contract.source_tree import SourceTree

    files = [*(tree / "kernels").rglob("*.py"), *(tree / "runners" / "reference").rglob("*.py")]
    texts = {f"longrecall/{path.relative_to(tree)}": path.read_text(encoding="utf-8") for path in files}
    found = trace(SourceTree("longrecall", "patched reference build", texts), Scenario(model="reference"))
    return found.exponent("hash"), found.exponent("other")


def measure_exponents(folder: Path, *, lines: int = 12, layers: list[int] | None = None) -> list[dict[str, Any]]:
    """One row per patched build: exponents from outputs (hash layers, others) and from source."""
    from longrecall.kernels.moe import combine_layers, fit_parts
    from longrecall.runners.reference.evidence import reference_parts
    from longrecall.runners.reference.model import ReferenceModel

    rows = []
    with tempfile.TemporaryDirectory(prefix="longrecall-suspects-") as scratch:
        work = Path(scratch)
        inputs = work / "inputs.safetensors"
        record(folder, prompt(folder, lines, 0), inputs)
        given = load_file(inputs)
        model = ReferenceModel.load(folder)
        wanted = layers or list(range(len(model.layers)))
        with torch.inference_mode():
            parts = {i: reference_parts(model.layers[i].mlp, given[f"x{i}"], given["token_ids"]) for i in wanted}
        factor, hash_layers = model.config.routed_scaling_factor, model.config.num_hash_layers
        for number, name in enumerate(PATCHES):
            tree = patched_tree(name, work / str(number))
            outputs = work / f"{number}.safetensors"
            environment = {**os.environ, "PYTHONPATH": str(tree / ".ns"), "PYTHONSAFEPATH": "1"}
            command = [sys.executable, __file__, "--replay", str(folder), str(inputs), str(outputs)]
            subprocess.run(command, env=environment, check=True, timeout=300)
            out = load_file(outputs)
            read = {i: fit_parts(out[f"out{i}"], parts[i], factor) for i in wanted}
            kinds = {
                "hash": combine_layers({str(i): e for i, e in read.items() if i < hash_layers}),
                "other": combine_layers({str(i): e for i, e in read.items() if i >= hash_layers}),
                "all": combine_layers({str(i): e for i, e in read.items()}),
            }
            from_source = traced(tree)
            rows.append(
                {
                    "build": name,
                    "expected": EXPECTED[name],
                    "traced": from_source,
                    **{
                        kind: {part: dataclasses.asdict(getattr(e, part)) for part in ("relative", "routed", "shared")}
                        | {"residual": e.residual}
                        for kind, e in kinds.items()
                    },
                }
            )
    return rows


def measure_mhc(
    folder: Path,
    *,
    prompts: int = 4,
    lines: int = 14,
    tail: int = 64,
    dtype: torch.dtype | None = None,
    precisions: tuple[str, ...] = ("tf32-weights", "bf16-weights", "bf16-in-out", "bf16-after-sinkhorn"),
) -> list[Any]:
    """KL from the fp32 mixing to each precision over the last `tail` positions, beside a change of packing alone."""
    from longrecall.kernels.sparse_attention import logits_kl
    from longrecall.runners.reference import model as module
    from longrecall.runners.reference.interface import Chunk

    model = module.ReferenceModel.load(folder, dtype=dtype)
    texts = [prompt(folder, lines, seed) for seed in range(prompts)]

    def run(precision: Any, chunk: int | None = None) -> list[Tensor]:
        module.MHC_PRECISION = precision
        try:
            logits = []
            for tokens in texts:
                cache, history = model.new_cache(), tokens[:-tail]
                step = chunk or len(history)
                for i in range(0, len(history), step):
                    model.prefill([Chunk(tokens=history[i : i + step], cache=cache, logits="none")])
                logits.append(model.prefill([Chunk(tokens=tokens[-tail:], cache=cache, logits="all")])[0][:, :32_768])
            return logits
        finally:
            module.MHC_PRECISION = "fp32"

    base = run("fp32")
    variants = [("packing only: chunks of 192 tokens", run("fp32", 192))]
    variants += [(p, run(p)) for p in precisions]
    rows = []
    for name, other in variants:
        kl = torch.cat([logits_kl(a, b) for a, b in zip(base, other, strict=True)])
        flips = torch.cat([a.argmax(-1) != b.argmax(-1) for a, b in zip(base, other, strict=True)]).double()
        rows.append(
            {
                "variant": name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "kl_mean_nats": float(kl.mean()),
                "kl_p99_nats": float(kl.quantile(0.99)),
                "argmax_changed_pct": 100 * float(flips.mean()),
                "positions": kl.numel(),
            }
        )
    return rows


def measure_drift() -> list[dict[str, Any]]:
    """Error of the streams through V4-Flash's 43 layers of random hyper-connections, against fp64."""
    from longrecall.kernels.mhc import drift_through_layers

    rows = []
    for streams_bf16 in (False, True):
        drifts = drift_through_layers(
            layers=43, hidden=256, tokens=32, generator=torch.Generator().manual_seed(0), streams_bf16=streams_bf16
        )
        for d in drifts:
            rows.append(
                {"precision": d.precision, "streams": "bf16" if streams_bf16 else "fp32", "per_layer": d.per_layer}
            )
    return rows


def measure_decode(folder: Path, *, lengths: tuple[int, ...] = (300, 700, 1400), steps: int = 12) -> list[Any]:
    """KL between prefill and decode at the same teacher-forced positions, healthy and with each decode fault."""
    from functools import partial

    from longrecall.kernels.sparse_attention import decode_with_fault, logits_kl
    from longrecall.runners.reference import model as module
    from longrecall.runners.reference.interface import Chunk

    model = module.ReferenceModel.load(folder)
    healthy, split = module.sparse_decode, module.DECODE_SPLIT_SIZE
    variants: list[tuple[str, Any, int | None]] = [
        ("split 256, merged by fp32 LSE (as served)", healthy, 256),
        ("one split", healthy, None),
        ("split 64", healthy, 64),
    ]
    variants += [
        (f"fault: {name}", partial(decode_with_fault, name), 64)
        for name in ("lse_base2", "stale_lengths", "garbage_padding")
    ]
    rows = []
    for length in lengths:
        tokens = prompt(folder, length // 40 + 4, 1)[: length + steps]
        if len(tokens) < length + steps:
            raise RuntimeError(f"the probe text has {len(tokens)} tokens; {length + steps} are needed")
        history = model.new_cache()
        model.prefill([Chunk(tokens=tokens[:length], cache=history, logits="none")])
        branch = history.fork(length)
        prefilled = model.prefill([Chunk(tokens=tokens[length:], cache=branch, logits="all")])[0]
        for name, function, size in variants:
            module.sparse_decode, module.DECODE_SPLIT_SIZE = function, size  # type: ignore[assignment]
            try:
                cache = history.fork(length)
                decoded = torch.cat([model.decode([t], [cache]) for t in tokens[length:]])
            finally:
                module.sparse_decode, module.DECODE_SPLIT_SIZE = healthy, split
            kl = logits_kl(prefilled, decoded)
            rows.append(
                {
                    "variant": name,
                    "length_tokens": length,
                    "kl_mean_nats": float(kl.mean()),
                    "kl_max_nats": float(kl.max()),
                    "argmax_changed": int((prefilled.argmax(-1) != decoded.argmax(-1)).sum()),
                    "positions": kl.numel(),
                }
            )
    return rows


def _exponent(e: dict[str, Any]) -> str:
    return "–" if e["value"] is None else f"{e['value'] + 0:.4f} ± {e['stderr']:.4f}"


def _number(value: float) -> str:
    return f"{value:.1e}"


def _mhc_section(rows: list[Any], dtype: str) -> list[str]:
    lines = [
        "",
        f"## Hyper-connections in lower precision, {dtype} weights",
        "",
        f"""KL from fp32 mixing to each variant at the next-token distribution (first 32,768 tokens of the vocabulary),
{rows[0]["positions"]} positions. The first row changes no arithmetic, only how the tokens are packed into chunks: it
shows the rounding that every served run has.""",
        "",
        "| mixing | KL mean, nats | KL 99th percentile | most likely token changed |",
        "|---|---|---|---|",
    ]
    for r in rows:
        mean, high = _number(r["kl_mean_nats"]), _number(r["kl_p99_nats"])
        lines.append(f"| {r['variant']} | {mean} | {high} | {r['argmax_changed_pct']:.1f} % |")
    return lines


def _drift_section(rows: list[Any]) -> list[str]:
    lines = [
        "",
        """The reference build is made so that the mean of its streams does not depend on the mixes as long as `comb`
is doubly stochastic and `post` antisymmetric (that is how it stays Gemma). Errors made before the Sinkhorn steps
therefore show here only as differently rounded bf16, and only `bf16-after-sinkhorn`, which breaks the sums, can do
more. So the same precisions through 43 layers of random hyper-connections (hidden 256, 32 tokens), where everything
depends on the mixes: relative error of the streams against fp64.""",
        "",
        "| mixing | streams | after layer 1 | layer 11 | layer 43 |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        cells = " | ".join(_number(r["per_layer"][i]) for i in (0, 10, 42))
        lines.append(f"| {r['precision']} | {r['streams']} | {cells} |")
    return lines


def as_markdown(result: dict[str, Any]) -> str:
    commit = (result["commit"] or "unknown")[:12]
    lines = [
        "# The other suspects on the reference build",
        "",
        f"""Written by `docs/benchmarks/reference_suspects.py`;
torch {result["torch"]}, {result["device"]}, commit {commit}.

## How often is the routed scaling factor applied?

n in factor^n (factor 2.5), read off each build's MoE outputs on the base build's real activations. The layer ends in
a norm, so the exponent is that of the routed part over the shared part: once = 1. Last columns: the contract tracer,
which reads each build's sources and runs nothing.
""",
        "| build | hash layers, measured | other layers, measured | all layers | traced: hash | traced: other |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["exponents"]:
        measured = " | ".join(_exponent(row[kind]["relative"]) for kind in ("hash", "other"))
        reading = row["all"]["relative"]["reading"]
        lines.append(f"| {row['build']} | {measured} | {reading} | {row['traced'][0]} | {row['traced'][1]} |")
    for dtype in ("bfloat16", "float32"):
        chosen = [row for row in result["mhc"] if row["dtype"] == dtype]
        if chosen:
            lines += _mhc_section(chosen, dtype)
    lines += _drift_section(result["drift"])
    lines += [
        "",
        "## Split-KV decode",
        "",
        "KL from prefill to decode at the same teacher-forced positions, nats; in brackets how often the most likely",
        f"token changed, of {result['decode'][0]['positions']}. The onset of the sparse selection is 512 tokens.",
        "",
        "| decode | " + " | ".join(f"{n} tokens" for n in result["lengths"]) + " |",
        "|---|" + "---|" * len(result["lengths"]),
    ]
    by_variant: dict[str, list[str]] = {}
    for row in result["decode"]:
        text = f"{_number(row['kl_mean_nats'])} ({row['argmax_changed']})"
        by_variant.setdefault(row["variant"], []).append(text)
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in by_variant.items()]
    return "\n".join([*lines, "", result["conclusion"], ""])


def _conclude(result: dict[str, Any]) -> str:
    served = [r for r in result["mhc"] if r["dtype"] == "bfloat16"]
    floor = next(r for r in served if r["variant"].startswith("packing"))["kl_mean_nats"]
    worst = max((r for r in served if "bf16" in r["variant"]), key=lambda r: r["kl_mean_nats"])
    drift = {(d["precision"], d["streams"]): d["per_layer"][-1] for d in result["drift"]}
    short, long = result["lengths"][0], result["lengths"][-1]
    at = {(r["variant"], r["length_tokens"]): r["kl_mean_nats"] for r in result["decode"]}
    healthy = _number(max(kl for (name, n), kl in at.items() if n == short and not name.startswith("fault")))
    base2, garbage = _number(at["fault: lse_base2", short]), _number(at["fault: garbage_padding", short])
    apart = _number(at["split 256, merged by fp32 LSE (as served)", long])
    moved, packed = _number(worst["kl_mean_nats"]), _number(floor)
    streams, gemm = _number(drift["fp32", "bf16"]), _number(drift["bf16-in-out", "fp32"])
    after = _number(drift["bf16-after-sinkhorn", "fp32"])
    return f"""## What follows

- Routed scaling: outputs and sources agree on every build and kind of layer.
- Hyper-connections in bf16 are cleared. Served in bf16, the worst mixing ({worst["variant"]})
  moves the next-token distribution by {moved} nats, a change of packing alone by {packed}. With
  random mixes, bf16 streams and exact mixing drift by {streams} over 43 layers; a bf16 GEMM alone
  drifts by {gemm}, bf16 after Sinkhorn by {after}.
- Split-KV decode is cleared. Below the onset decode and prefill agree to {healthy} nats whatever the
  split; merging with base-2 lse gives {base2} there, garbage in the padding {garbage}. Stale lengths
  cannot act while the list is mostly padding, nor garbage once it is full. At {long} tokens healthy
  decode is {apart} nats from prefill (rounding can move near-tied selections; not separated here),
  so only larger faults stand out: the measure is sharpest below the onset."""


def main() -> None:
    from longrecall.runners.reference.convert import reference_folder

    folder = reference_folder()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    lengths = (300, 700, 1400)
    result: dict[str, Any] = {
        "commit": commit.stdout.strip() or None,
        "torch": torch.__version__,
        "device": f"CPU, {torch.get_num_threads()} thread(s)",
        "exponents": measure_exponents(folder),
        "mhc": measure_mhc(folder) + measure_mhc(folder, prompts=1, dtype=torch.float32),
        "drift": measure_drift(),
        "lengths": lengths,
        "decode": measure_decode(folder, lengths=lengths),
    }
    result["conclusion"] = _conclude(result)
    (HERE / "reference_suspects.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "reference_suspects.md").write_text(as_markdown(result))
    print(as_markdown(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replay", nargs=3, type=Path, metavar=("FOLDER", "INPUTS", "OUTPUTS"))
    arguments = parser.parse_args()
    if arguments.replay:
        replay(*arguments.replay)
    else:
        main()
