"""What each fault does to the selection of the trained model, without a server: captured index activations, replayed.

    python -m longrecall.runners.deepseek_v32.evidence MODEL --out evidence.json
    python -m longrecall.runners.deepseek_v32.evidence MODEL --out evidence.json --run RUN

For prompts of a campaign's recipe the last query's index activations (after norm and rope, before rotation and
rounding) are replayed through `kernels.indexer.emulate` in each format and fault, per layer:

    value    of the attention on the value, how much lies on what is selected: its first token, where it was stated or
             echoed, and the four after it, whose first-layer heads look back on it
    mass     the same of the whole attention distribution
    kept     of the selection that base makes, how much is selected

`answering_layer` is the one whose attention to the value is largest. With a run folder, what this says of the run's
patches is kept there for attribution and report (evidence-PATCH.json): the share of base's selection that is lost, and
how often the patched source applies the routed scaling factor, read by the tracer from --sglang and the run's diffs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longrecall.kernels.contract.routed_scaling import Scenario, trace
from longrecall.kernels.contract.source_tree import SourceTree, open_source
from longrecall.kernels.indexer.emulate import Activations, Pipeline, select
from longrecall.kernels.indexer.presets import PRESETS
from longrecall.needles.whole_file import write_text
from longrecall.results.run_folder import load_campaign
from longrecall.runners.deepseek_v32.agree import at_least_one, prompts
from longrecall.runners.deepseek_v32.export import load
from longrecall.runners.deepseek_v32.model import V32Model, rope_of
from longrecall.runners.diffs import with_diffs
from longrecall.runners.reference.evidence import observation

FP8 = "base (fp8)"
LOWEST = "topk-lowest"
"""Base's scores with their sign turned."""
PIPELINES: Mapping[str, Pipeline] = {
    "exact": Pipeline(),
    "index-keys-bf16": Pipeline(key_format="bf16", query_format="fp8_ue8m0"),
    FP8: Pipeline(key_format="fp8", query_format="fp8_ue8m0"),
    "one-sided-hadamard": Pipeline(key_format="fp8", query_format="fp8_ue8m0", rotate="q"),
    "rope-layout": Pipeline(key_format="fp8", query_format="fp8_ue8m0", rope="swapped"),
    "topk-truncating": Pipeline(
        key_format="fp8", query_format="fp8_ue8m0", topk_mode="truncating", topk_buffer=1024, topk_bits=8
    ),
    LOWEST: Pipeline(key_format="fp8", query_format="fp8_ue8m0"),
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


def chosen(activations: Activations, name: str) -> Tensor:
    """Positions that one query selects in the pipeline of this name."""
    if name == LOWEST:
        activations = replace(activations, weights=-activations.weights)
    picks = select(activations, PIPELINES[name])[0]
    return picks[picks >= 0].long()


def measured(activations: Activations, name: str, base: Tensor) -> tuple[float, float, float]:
    """Kept of one query's attention, on the value and of all, and of base's selection `base`."""
    picks = chosen(activations, name)
    assert activations.needles is not None and activations.attention is not None
    places, attention = activations.needles[0].long(), activations.attention[0]
    kept = attention[places[torch.isin(places, picks)]].sum() / attention[places].sum()
    return float(kept), float(attention[picks].sum()), float(torch.isin(base, picks).float().mean())


Rows = dict[str, list[dict[str, Any]]]
"""Observations by patch."""


def routed_scaling(run: Path, source: SourceTree) -> Rows:
    """How often each of the run's patched sources applies the routed scaling factor; nothing where it is not clear.

    Raises:
        SourceError: a diff that cannot be read or does not apply to `source`.
    """
    scenario = Scenario(model="deepseek_v2", quant="bf16", runner="triton")
    rows: Rows = {}
    for patch in load_campaign(run).patchset.patches:
        if not patch.diffs:
            continue
        diffs = [run / "patches" / Path(name).name for name in patch.diffs]
        counts = trace(with_diffs(source, diffs), scenario).layers["other"].routed
        rows[patch.patch_id] = []
        if counts is not None and (counts == (1,) or 1 not in counts):
            said = f"routed scaling factor to the power of {' or '.join(map(str, counts))} in the patched source"
            rows[patch.patch_id].append(
                observation(patch.patch_id, "scale_exponent", float(counts != (1,)), 0.01, 1, said)
            )
    return rows


def write_observations(run: Path, rows: Rows, kept: Mapping[str, Sequence[float]], detail: str) -> None:
    """evidence-PATCH.json of each patch of `rows` of which there is something to say.

    kept: by patch, the share of base's selection that each prompt keeps, two prompts at least.
    """
    for patch, found in rows.items():
        if patch in kept:
            lost = [1.0 - share for share in kept[patch]]
            mean, error = statistics.mean(lost), statistics.stdev(lost) / len(lost) ** 0.5
            said = f"{100 * mean:.1f} % of base's selection is lost on {detail}"
            found = [*found, observation(patch, "selection_shift", mean, max(error, 0.002), len(lost), said)]
        if found:
            write_text(run / f"evidence-{patch}.json", json.dumps(found, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="patchsets/recipes/closed-world.toml")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--per-length", type=at_least_one, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="a campaign's folder: what is said of its patches is kept there")
    parser.add_argument(
        "--sglang", default="installed", help="the source that was served, as `longrecall trace` takes it"
    )
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    routed: Rows = {}
    try:
        if options.run is not None:
            if len(options.lengths) * options.per_length < 2:
                raise ValueError("--per-length 1: what is kept of one prompt has no error; attribution needs two")
            # before anything is computed: a source that is not the one that was served shows here
            routed = routed_scaling(options.run, open_source(options.sglang))
        model = load(options.model, device).eval()
        asked = prompts(options.model, options.recipe, options.lengths, options.per_length, options.seed)
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {}
    kept: dict[str, list[float]] = {name: [] for name in PIPELINES}
    by_chance = []
    for length, rows in asked.items():
        table: dict[str, list[list[tuple[float, float, float]]]] = {name: [] for name in PIPELINES}
        on_value = []
        for ids, gold in rows:
            layers = captured(model, ids, gold, device)
            on_value.append([float(a.attention[0, a.needles[0].long()].sum()) for a in layers])  # type: ignore[index]
            bases = [chosen(a, FP8) for a in layers]
            for name in PIPELINES:
                table[name].append([measured(a, name, base) for a, base in zip(layers, bases, strict=True)])
                kept[name].append(statistics.mean(cell[2] for cell in table[name][-1]))
            by_chance.append(min(1.0, model.config.index_topk / len(ids)))
        value = torch.tensor(on_value).mean(0)
        result[str(length)] = {
            "attention_on_value": [round(x, 4) for x in value.tolist()],
            "answering_layer": int(value.argmax()),
            "builds": {
                name: {
                    "value": [round(x, 4) for x in torch.tensor(cells)[..., 0].mean(0).tolist()],
                    "mass": [round(x, 4) for x in torch.tensor(cells)[..., 1].mean(0).tolist()],
                    "kept": [round(x, 4) for x in torch.tensor(cells)[..., 2].mean(0).tolist()],
                }
                for name, cells in table.items()
            },
        }
    where = " and ".join(f"{length:,}" for length in options.lengths)
    chance = 100 * (1 - statistics.mean(by_chance))
    detail = f"{len(by_chance)} prompts' captured activations at {where} tokens ({chance:.0f} % by chance)"
    try:
        write_text(options.out, json.dumps(result, indent=1) + "\n")
        if options.run is not None:
            write_observations(options.run, routed, kept, detail)
    except OSError as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
