"""What each fault does to the selection of the trained model, without a server: captured index activations, replayed.

    python -m longrecall.runners.deepseek_v32.evidence MODEL --out evidence.json

For prompts of a campaign's recipe the last query's index activations (after norm and rope, before rotation and
rounding) are replayed through `kernels.indexer.emulate` in each format and fault, per layer:

    value    of the attention on the value, how much lies on what is selected: its first token, where it was stated or
             echoed, and the four after it, whose first-layer heads look back on it
    mass     the same of the whole attention distribution

`answering_layer` is the one whose attention to the value is largest.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrecall.kernels.indexer.emulate import Activations, Pipeline, select
from longrecall.kernels.indexer.presets import PRESETS
from longrecall.runners.deepseek_v32.agree import prompts
from longrecall.runners.deepseek_v32.export import load
from longrecall.runners.deepseek_v32.model import V32Model, rope_of

PIPELINES: Mapping[str, Pipeline] = {
    "exact": Pipeline(),
    "index-keys-bf16": Pipeline(key_format="bf16", query_format="fp8_ue8m0"),
    "base (fp8)": Pipeline(key_format="fp8", query_format="fp8_ue8m0"),
    "one-sided-hadamard": Pipeline(key_format="fp8", query_format="fp8_ue8m0", rotate="q"),
    "rope-layout": Pipeline(key_format="fp8", query_format="fp8_ue8m0", rope="swapped"),
    "topk-truncating": Pipeline(
        key_format="fp8", query_format="fp8_ue8m0", topk_mode="truncating", topk_buffer=1024, topk_bits=8
    ),
    "fp4 keys": Pipeline(key_format="fp4", query_format="fp8_ue8m0"),
}


LOOKING_BACK = 4


@torch.no_grad()
def captured(model: V32Model, ids: Sequence[int], gold: int, device: torch.device) -> list[Activations]:
    """Per layer the last query's activations, with its attention distribution and the places of the value."""
    c = model.config
    tokens = torch.tensor([list(ids)], device=device)
    cos, sin = model.positions(1, len(ids), device)
    preset = replace(PRESETS["v3.2"], heads=c.index_n_heads, index_topk=c.index_topk, rope=rope_of(c))
    stated = (tokens[0] == gold).nonzero()
    needles = (stated + torch.arange(LOOKING_BACK + 1, device=device)).flatten().clamp(max=len(ids) - 1).unique()
    found = []

    def look(layer: int, normed: Tensor, latent_q: Tensor, q: Tensor, k: Tensor) -> None:
        iq, ik, weights = model.layers[layer].self_attn.indexer(normed, latent_q, cos, sin)
        scores = torch.einsum("hd,shd->hs", q[0, -1].float(), k[0].float()) * c.softmax_scale
        found.append(
            Activations(
                preset=preset, q=iq[-1:].float().cpu(), keys=ik.float().cpu(), weights=weights[-1:].float().cpu(),
                positions=torch.tensor([len(ids) - 1]), needles=needles[None].cpu(),
                attention=scores.softmax(-1).mean(0)[None].cpu(),
            )
        )  # fmt: skip

    model(tokens, look=look)
    return found


def measured(activations: Activations, pipeline: Pipeline) -> tuple[float, float]:
    """Kept of one query's attention: on the value, and of all."""
    chosen = select(activations, pipeline)[0]
    chosen = chosen[chosen >= 0].long()
    assert activations.needles is not None and activations.attention is not None
    places, attention = activations.needles[0].long(), activations.attention[0]
    kept = attention[places[torch.isin(places, chosen)]].sum() / attention[places].sum()
    return float(kept), float(attention[chosen].sum())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="patchsets/recipes/closed-world.toml")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--per-length", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = load(options.model, device).eval()
        asked = prompts(options.model, options.recipe, options.lengths, options.per_length, options.seed)
    except (ValueError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {}
    for length, rows in asked.items():
        table: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in PIPELINES}
        on_value = []
        for ids, gold in rows:
            layers = captured(model, ids, gold, device)
            on_value.append([float(a.attention[0, a.needles[0].long()].sum()) for a in layers])  # type: ignore[index]
            for name, pipeline in PIPELINES.items():
                table[name].append([measured(a, pipeline) for a in layers])
        value = torch.tensor(on_value).mean(0)
        result[str(length)] = {
            "attention_on_value": [round(x, 4) for x in value.tolist()],
            "answering_layer": int(value.argmax()),
            "builds": {
                name: {
                    "value": [round(x, 4) for x in torch.tensor(cells)[..., 0].mean(0).tolist()],
                    "mass": [round(x, 4) for x in torch.tensor(cells)[..., 1].mean(0).tolist()],
                }
                for name, cells in table.items()
            },
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
