"""The trained state as a checkpoint that SGLang and transformers load: HuggingFace's deepseek_v32 names, bf16.

python -m longrecall.runners.deepseek_v32.export results/runs/train-v32/state.pt MODEL
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrecall.runners.deepseek_v32.config import V32Config
from longrecall.runners.deepseek_v32.text import write_tokenizer


def hf_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each of an expert's matrices; the gate's bias and the index key norm stay fp32."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.detach().cpu()
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for place, both in enumerate(value):
                gate, up = both.chunk(2, dim=0)
                out[f"{stem}{place}.gate_proj.weight"], out[f"{stem}{place}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            for place, down in enumerate(value):
                out[f"{stem}{place}.down_proj.weight"] = down
        else:
            out[name] = value
    fp32 = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")
    return {k: (v.float() if k.endswith(fp32) else v.bfloat16()).contiguous() for k, v in out.items()}


def torch_state(tensors: Mapping[str, Tensor], config: V32Config) -> dict[str, Tensor]:
    """The reverse of `hf_tensors`, as `V32Model` loads it."""
    out = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        stem = f"model.layers.{layer}.mlp.experts."
        each = range(config.n_routed_experts)
        out[f"{stem}gate_up_proj"] = torch.stack(
            [torch.cat((tensors[f"{stem}{e}.gate_proj.weight"], tensors[f"{stem}{e}.up_proj.weight"])) for e in each]
        )
        out[f"{stem}down_proj"] = torch.stack([tensors[f"{stem}{e}.down_proj.weight"] for e in each])
    return out


def export(state_file: Path, folder: Path) -> dict[str, str]:
    """Write the model folder; returns the sha256 of each file, which is also written to hashes.json."""
    from safetensors.torch import save_file

    state: dict[str, Any] = torch.load(state_file, map_location="cpu", weights_only=True)
    config = V32Config(**state["config"])
    write_tokenizer(folder)
    save_file(hf_tensors(state["model"]), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.hf_config(), indent=1) + "\n", encoding="utf-8")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")
    trained = {key: state[key] for key in ("seed", "phase", "step", "steps", "tokens", "seconds")}
    (folder / "training.json").write_text(json.dumps(trained, indent=1) + "\n", encoding="utf-8")
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.name != "hashes.json":
            hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    return hashes


def load(folder: Path, device: torch.device | str = "cpu") -> Any:
    """A `V32Model` of an exported folder, its weights as stored."""
    from safetensors.torch import load_file

    from longrecall.runners.deepseek_v32.model import V32Model

    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = told["rope_scaling"]
    told |= {"rope_factor": rope["factor"], "rope_original": rope["original_max_position_embeddings"]}
    config = V32Config(**{name: told[name] for name in V32Config.__dataclass_fields__})
    model = V32Model(config)
    model.load_state_dict(torch_state(load_file(folder / "model.safetensors"), config))
    return model.to(device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    try:
        hashes = export(options.state, options.folder)
    except (OSError, KeyError, ValueError) as problem:
        print(f"longrecall: error: {options.state}: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(hashes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
