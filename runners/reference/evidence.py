"""In-process evidence: what a patched reference build computes on the activations of the base, part by part.

    python -m longrecall.runners.reference.evidence measure FOLDER INPUTS OUTPUTS     in each build's own tree

The base build prefills a prompt with planted facts once, and what enters every part is recorded. Each build's own
sources, in a process of their own, then compute the parts from those inputs: MoE layers, mixing coefficients, index
selections, stored keys and values, and decode beside prefill. A fault shows in the part that it is in and in no other,
which no served reply can say. `rows_of` turns two builds' outputs into observations for `longrecall attribute
--evidence`.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from longrecall.kernels.moe import Parts
    from longrecall.runners.reference.config import ReferenceConfig
    from longrecall.runners.reference.model import ReferenceModel

MOE_LAYERS = (0, 1, 2, 3, 8, 14)
"""All hash layers and three others."""
MIXED_LAYERS = (0, 6, 12)
ROWS = 64
"""Last rows of the prompt: those that see the most keys."""
EVERY = 4
"""One token in so many goes through the MoE layers: enough for four digits of the exponent."""
DECODE_STEPS = 12
CHAINS = 4
"""Decode goes on from so many places of one history at once, as it does where several questions share a prefix."""
DECODE_AT = (300, 700)
"""Tokens before the decoded ones: below and beyond the onset of the selection."""
MEASURE_S = 300


def prompt_text(facts: int = 24, seed: int = 0, *, begun: str = "The code of") -> str:
    """Planted facts in plain chat: enough like a recall conversation for real activations."""
    g = torch.Generator().manual_seed(seed)
    names = ["Mara Lindqvist", "Owen Castell", "Priya Raman", "Tomas Berg", "Lucia Ferro", "Hana Sato", "Emil Novak"]
    filler = [
        "The ferry was late again this morning, so the meeting began without the harbour master.",
        "I read that the old mill by the river will become a library next spring.",
        "Nobody at the market could say when the road over the pass opens.",
    ]
    out = []
    for i in range(facts):
        code = int(torch.randint(10_000, 99_999, (1,), generator=g))
        name = names[i % len(names)]
        out.append(f"User: {filler[i % 3]} The access code of {name} is {code}.")
        out.append(f"Assistant: Noted, the access code of {name} is {code}.")
    return "\n".join([*out, f"User: What is the access code of {names[0]}?", f"Assistant: {begun} {names[0]} is"])


def prompt_tokens(folder: Path, text: str) -> list[int]:
    """The text's tokens behind one BOS."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids if ids[:1] == [2] else [2, *ids]


def record(folder: Path, path: Path) -> None:
    """Save what enters every part of the base build when it prefills the prompt."""
    from longrecall.runners.reference.interface import Chunk
    from longrecall.runners.reference.model import ReferenceModel

    model = ReferenceModel.load(folder)
    tokens = prompt_tokens(folder, prompt_text())
    seen: dict[str, Tensor] = {"tokens": torch.tensor(tokens)}
    for i, layer in enumerate(model.layers):
        _record_moe(layer, i, seen)
        if i in MIXED_LAYERS:
            _record_streams(layer, i, seen)
        if layer.indexer is not None:
            _record_index(layer.indexer, i, seen)
    model.prefill([Chunk(tokens=tokens, cache=model.new_cache(), logits="none")])
    save_file({name: t.contiguous() for name, t in seen.items()}, path)


def _record_moe(layer: Any, i: int, seen: dict[str, Tensor]) -> None:
    inner = layer.mlp

    def mlp(x: Tensor, token_ids: Tensor) -> Any:
        seen[f"moe{i}"], seen["token_ids"] = x[::EVERY].clone(), token_ids[::EVERY].clone()
        return inner(x, token_ids)

    layer.mlp = mlp


def _record_streams(layer: Any, i: int, seen: dict[str, Tensor]) -> None:
    for n, part in enumerate(layer.parts):
        inner = part.enter

        def enter(streams: Tensor, n: int = n, inner: Any = inner) -> Any:
            seen.setdefault(f"streams{i}.{n}", streams[:ROWS].clone())
            return inner(streams)

        part.enter = enter


def _record_index(indexer: Any, i: int, seen: dict[str, Tensor]) -> None:
    inner = indexer.keys

    def keys(h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        seen[f"index{i}.h"], seen[f"index{i}.cos"], seen[f"index{i}.sin"] = h.clone(), cos.clone(), sin.clone()
        return inner(h, cos, sin)

    indexer.keys = keys


@torch.inference_mode()
def measure(folder: Path, inputs: Path, outputs: Path) -> None:
    """This build's parts on the recorded inputs."""
    from longrecall.kernels.mhc import mhc_coefficients, mhc_mix, mhc_post
    from longrecall.runners.reference import model as module

    model = module.ReferenceModel.load(folder)
    given = load_file(inputs)
    done: dict[str, Tensor] = {}
    for i in MOE_LAYERS:
        done[f"moe{i}"] = torch.cat(list(model.layers[i].mlp(given[f"moe{i}"], given["token_ids"])))
    for i in MIXED_LAYERS:
        for n, part in enumerate(model.layers[i].parts):
            c, precision = model.config, module.MHC_PRECISION
            streams = given[f"streams{i}.{n}"]
            u, logits = mhc_mix(streams, part.fn, part.scale, part.base, precision=precision)
            post, comb = mhc_coefficients(logits, c.hc_mult, sinkhorn_steps=c.hc_sinkhorn_iters, precision=precision)
            # by themselves: beside u, of 640 channels far larger than 1, no error of the coefficients would show
            mixed = {"u": u, "post": post, "comb": comb, "streams": mhc_post(streams, u, post, comb)}
            done |= {f"mix{i}.{n}.{name}": value.float() for name, value in mixed.items()}
    for i, layer in enumerate(model.layers):
        if layer.indexer is not None:
            h, cos, sin = (given[f"index{i}.{name}"] for name in ("h", "cos", "sin"))
            keys = layer.indexer.keys(h, cos, sin).to(h.dtype)
            q, weights = layer.indexer.queries(h, cos, sin)
            visible = torch.arange(1, len(h) + 1)[-ROWS:]
            done[f"selected{i}"] = layer.indexer.select(q[-ROWS:].to(h.dtype), keys, weights[-ROWS:], visible)
    done |= _decoded(model, given["tokens"].tolist())
    save_file({name: t.contiguous() for name, t in done.items()}, outputs)


def _decoded(model: "ReferenceModel", tokens: list[int]) -> dict[str, Tensor]:
    """Total variation between prefill and decode at the same positions, and layer 0's stored keys and values.

    And between prefill in one piece and in the pieces that decode works on: a model that another fault has broken turns
    every rounding into another distribution.
    """
    from longrecall.runners.reference.interface import Chunk

    made = {}
    history = model.new_cache()
    for length in DECODE_AT:
        model.prefill([Chunk(tokens=tokens[history.length : length], cache=history, logits="none")])
        rest = tokens[length : length + DECODE_STEPS]
        (prefilled,) = model.prefill([Chunk(tokens=rest, cache=history, logits="all")])
        steps = DECODE_STEPS // CHAINS
        chains = [history.fork(length + steps * i) for i in range(CHAINS)]
        pieces = [
            Chunk(tokens=rest[i * steps : (i + 1) * steps], cache=history.fork(length + steps * i), logits="all")
            for i in range(CHAINS)
        ]
        decoded = torch.stack([model.decode(rest[step::steps], chains) for step in range(steps)], 1).flatten(0, 1)
        made[f"decode{length}"] = _apart(prefilled, decoded)
        made[f"packed{length}"] = _apart(prefilled, torch.cat(model.prefill(pieces)))
    block = history.tail or history.base
    assert block is not None
    made["kv"] = torch.stack((block.k[0, : history.length], block.v[0, : history.length])).float()
    return made


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Total variation of the distributions behind two rows of logits."""
    return (a.softmax(-1) - b.softmax(-1)).abs().sum(-1) / 2


def reference_parts(mlp: Any, x: Tensor, token_ids: Tensor) -> "Parts":
    """Parts of a `ReferenceMoE` in fp64 from its weights: before any factor, behind the layer's own norm."""
    from longrecall.kernels.moe import Parts
    from longrecall.kernels.moe.routing import hash_topk, topk

    config = mlp.config
    logits = F.linear(x.float(), mlp.gate_weight)
    if hasattr(mlp.topk, "tid2eid"):
        chosen = hash_topk(logits, token_ids, mlp.topk.tid2eid)
    else:
        chosen = topk(logits, mlp.topk.correction_bias, config.num_experts_per_tok, config.scoring_func)
    x = x.double()

    def expert(rows: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = F.linear(rows, w13.double()).chunk(2, -1)
        return F.linear(F.gelu(gate, approximate="tanh") * up, w2.double())

    routed = torch.zeros_like(x)
    for e in chosen.idx.unique().tolist():
        token, slot = (chosen.idx == e).nonzero(as_tuple=True)
        rows = expert(x[token], mlp.w13[e], mlp.w2[e]) * chosen.weights[token, slot].double()[:, None]
        routed.index_add_(0, token, rows)
    shared = expert(x, mlp.shared_gate_up, mlp.shared_down)
    nominal = shared + config.trained_routed_scaling_factor * routed
    norm = (nominal.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * mlp.norm_weight.double()
    return Parts(routed * norm, shared * norm)


@torch.inference_mode()
def parts_of_base(folder: Path, inputs: Path) -> dict[int, "Parts"]:
    """What the exponents of every build are read against: the base's weights on the recorded inputs."""
    from longrecall.runners.reference.model import ReferenceModel

    model, given = ReferenceModel.load(folder), load_file(inputs)
    return {i: reference_parts(model.layers[i].mlp, given[f"moe{i}"], given["token_ids"]) for i in MOE_LAYERS}


def run_build(python: str, env: Mapping[str, str], folder: Path, inputs: Path, outputs: Path) -> None:
    """`measure` in a build's own tree; RuntimeError carries the end of what it said."""
    command = [python, "-m", "longrecall.runners.reference.evidence", "measure", *map(str, (folder, inputs, outputs))]
    try:
        done = subprocess.run(
            command, env={**os.environ, **env}, capture_output=True, text=True, timeout=MEASURE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"in-process evidence was not there after {MEASURE_S} s: {' '.join(command)}") from None
    if done.returncode:
        raise RuntimeError(f"in-process evidence failed: {' '.join(done.stderr.strip().splitlines()[-3:])}")


def rows_of(
    patch: str,
    base: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    parts: Mapping[int, "Parts"],
    config: "ReferenceConfig",
) -> list[dict[str, object]]:
    """Observations of one build, as `longrecall attribute --evidence` reads them."""
    made = [_exponent_row(patch, own, parts, config.routed_scaling_factor, config.num_hash_layers)]
    shifts = {name: _relative(own[name], base[name]) for name in base if name.startswith("mix")}
    where = max(shifts, key=lambda name: shifts[name])
    worst, what = shifts[where], where.rpartition(".")[2]
    made.append(
        observation(patch, "mhc_shift", min(worst, 1.0), 0.002, len(shifts), f"mixing moves by {worst:.1e} ({what})")
    )
    made.append(_selection_row(patch, base, own, config.index_topk))
    apart = {
        n: tuple(float(x.mean()) for x in (own[f"decode{n}"], base[f"decode{n}"], own[f"packed{n}"])) for n in DECODE_AT
    }
    told = ", ".join(f"{a:.3f} at {n} tokens (base {b:.3f}, repacked {c:.3f})" for n, (a, b, c) in apart.items())
    excess = max(max(a - 2 * max(b, c), 0.0) for a, b, c in apart.values())
    made.append(
        observation(
            patch, "decode_shift", excess, 0.02, len(DECODE_AT) * DECODE_STEPS, f"prefill and decode apart by {told}"
        )
    )
    moved = _relative(own["kv"], base["kv"])
    made.append(
        observation(patch, "kv_shift", min(moved, 1.0), 0.002, own["kv"].shape[1], f"stored rows move by {moved:.1e}")
    )
    return made


def _exponent_row(
    patch: str, own: Mapping[str, Tensor], parts: Mapping[int, "Parts"], factor: float, hash_layers: int
) -> dict[str, object]:
    from longrecall.kernels.moe import combine_layers, fit_parts

    read = {i: fit_parts(own[f"moe{i}"], parts[i], factor) for i in MOE_LAYERS}
    told, off, error = [], 0.0, 0.01
    for kind, wanted in (("hash", lambda i: i < hash_layers), ("other", lambda i: i >= hash_layers)):
        exponent = combine_layers({str(i): e for i, e in read.items() if wanted(i)}).relative
        if exponent.value is not None:
            told.append(f"{kind} layers {exponent.value:.3f}")
            off = max(off, abs(exponent.value - 1.0))
            error = max(error, exponent.stderr or 0.0)
    return observation(patch, "scale_exponent", min(off, 1.0), error, len(read), f"exponent {', '.join(told)}")


def _selection_row(patch: str, base: Mapping[str, Tensor], own: Mapping[str, Tensor], topk: int) -> dict[str, object]:
    """How much of the base's selection a build loses on the base's own inputs, beside what chance would lose."""
    lost, chance = [], []
    for name in base:
        if name.startswith("selected"):
            visible = int(base[name].max()) + 1
            chance.append(1 - topk / max(visible, topk))
            for a, b in zip(base[name], own[name], strict=True):
                kept = len((set(a.tolist()) & set(b.tolist())) - {-1})
                lost.append(1 - kept / max(int((a >= 0).sum()), 1))
    change, by_chance = sum(lost) / len(lost), sum(chance) / len(chance)
    detail = (
        f"{100 * change:.0f} % of the base's selection is lost on its own inputs ({100 * by_chance:.0f} % by chance)"
    )
    return observation(patch, "selection_shift", change, 0.02, len(lost), detail)


def _relative(own: Tensor, base: Tensor) -> float:
    if own.shape != base.shape:
        return 1.0
    return float((own - base).norm() / base.norm())


def observation(patch: str, feature: str, estimate: float, stderr: float, n: int, detail: str) -> dict[str, object]:
    """What was measured in-process, as `longrecall attribute --evidence` reads it."""
    value = estimate if math.isfinite(estimate) else 1.0
    return {
        "patch": patch, "feature": feature, "estimate": value, "stderr": stderr, "n": n, "source": "in-process",
        "detail": detail,
    }  # fmt: skip


def gather(
    folder: Path, builds: Mapping[str, tuple[str, Mapping[str, str]]], work: Path
) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """(build, its observations), each as soon as it is measured; `builds` maps a build to its interpreter and
    environment, "base" among them.

    work: an empty folder for what the processes exchange. Raises RuntimeError in the end, when all others are measured,
    for builds that failed.
    """
    from longrecall.runners.reference.config import ReferenceConfig

    config = ReferenceConfig.from_file(folder / "config.json")
    inputs = work / "inputs.safetensors"
    record(folder, inputs)
    parts = parts_of_base(folder, inputs)
    names = sorted(builds, key=lambda n: n != "base")
    paths = {name: work / f"{number}.safetensors" for number, name in enumerate(names)}

    def run(name: str) -> None:
        python, env = builds[name]
        run_build(python, env, folder, inputs, paths[name])

    failed = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # one thread a build, in a process of its own
        done = {name: pool.submit(run, name) for name in names}
        try:
            done.pop("base").result()
            base = load_file(paths["base"])
            for name, measured in done.items():
                try:
                    measured.result()
                except RuntimeError as error:
                    failed.append(f"{name}: {error}")
                    continue
                yield name, rows_of(name, base, load_file(paths[name]), parts, config)
                paths[name].unlink()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # nothing more is begun for a caller that is gone
    if failed:
        raise RuntimeError("; ".join(failed))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("record", "measure"))
    parser.add_argument("paths", nargs="+", type=Path)
    given = parser.parse_args(argv)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if given.what == "record":
        record(*given.paths)
    else:
        measure(*given.paths)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr)
        sys.exit(2)
