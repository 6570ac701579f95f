"""The page of the H200 tables: writes sglang_h200.md from sglang_h200.json, both beside this file.

    python docs/benchmarks/sglang_h200.py                          # the page again
    python docs/benchmarks/sglang_h200.py v32.json v4.json         # take these tables of `make h200` in first

What shows is concluded here from the measured values, so that page and code cannot drift apart.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from longrecall.runners.divergence import ALPHA, MISS_RATIO, conclude, rows_to_keep

TEMPLATE = """\
# Patches to SGLang on an H200: where each shows

Written by `docs/benchmarks/sglang_h200.py` from `sglang_h200.json`, which `make h200` measures. One run, 2026-11-29:
{{gpu}}; {{packages}}.

A server of SGLang for each build, all at once on one GPU, tiny models of the real architectures with random weights.
Such weights recall nothing, so this is no measure of recall: it shows that a patch is seen where it acts, and nowhere
else. Random prompts of 512, 1,024, 1,900, 2,600, 4,096 and 6,000 tokens, three each, 16 tokens generated; the
selection from one prompt of each length. Up to the onset the selection holds every token, so that nothing about index
keys can matter there.

A cell is the median and the largest of nine prompts of KL in nats over the whole vocabulary; `prefill` and `decode`
against base, the other two within one build. The row `base, base again` is the floor. Bold: larger than the floor
(within a build: apart from it) by an exact rank-sum test, p < {{alpha}}. A layer's selection shows when it misses
more than {{ratio}} times what base again misses at every length. The means of single prompts have a heavy tail: where
a near-tie sends a token to another expert, one position of nine moves a prompt from 1e-4 to 1e-2.

## DeepSeek-V3.2 architecture (2,048 of all tokens selected, 4 layers)

Backend dsa, prefill flashmla_sparse (dense up to 2,048 tokens), decode fa3, bf16 KV, page 64.

{{table sglang-h200}}

- Below the onset both index patches and the no-op are equal to base to the last bit, in prefill and in decode.
- Above it, base does not repeat itself: it selects the same set in the first layer and hands it to attention in
  another order, and from the second layer on the sets differ by 0.2 to 4 %.
- bf16 keys change 0.3 to 0.9 % of the first layer's selection, where base repeats itself exactly; in the logits they
  cannot be told from base again (prefill above, p = {{p bf16}}).
- The rotation taken off one side selects by chance, within .006: the row `chance` is what independent draws
  would share over the same positions.
- Two things were predicted otherwise. The other decode backend does not show in prefill-versus-decode KL: both
  backends are equally far from prefill (5.7e-05 at the median), so that measure sees a broken decode and not another
  sound one; direct comparison of the generated tokens' distributions shows it, exactly zero becoming 5.6e-05. Above
  the onset, differences in decode drown in what base again shows, or the first token already differs and nothing is
  left to compare.

## DeepSeek-V4 architecture (512 of the 4-token entries selected, 2 index layers)

Backend dsv4, fp8 KV, page 256.

{{table sglang-h200-v4}}

**The prefill columns of this table are void, and they show a fault of SGLang 0.5.17 itself.** The one-sided rotation
changes up to 44 % of the selection, and the KL of prefill stays exactly zero in 8 of 9 prompts; base differs from
itself by up to 0.11 at 512 tokens; decode is .02 away from prefill everywhere. Reading the source explains all three:
with `--enable-return-indexer-topk` the indexer writes its selection to a new buffer, and sparse prefill attends to
another, `c4_sparse_raw_indices`, which stays as `torch.empty_like` left it. 0.5.18 reads the same; 0.5.21 and 0.5.23
take that buffer first. `patches/sglang-h200-v4-captured-selection.diff` does so for 0.5.17, and `make h200` now puts
it into every V4 build; it has not been run since. Until then: do not serve V4 on 0.5.17 or 0.5.18 with that flag while
measuring recall. What decode shows stands, on caches that such a prefill filled.

## What is not as in production

- RMSNorm, LayerNorm and V3.2's gate take their path without flashinfer; V4's Sinkhorn steps run in torch; kernel
  libraries hold sm90 only, FlashAttention 3 only bf16 with head sizes 64/512, 192/128 and 128.
- Dummy weights of sensible size (normal, fan-in^-1/2; norms 1): SGLang's own are within 1e-3, and index scores tie.
- CUDA graphs off. V3.2 with SGLANG_DSA_FUSE_TOPK=0, so that the selection comes back as positions: top-k is then the
  unfused kernel in prefill and decode, not the fused one.
- bf16 keys: DeepGEMM scores fp8 and fp4 keys only, so the patch scores with torch, exact products and fp32 sums,
  queries still fp8; keys in a buffer of their own, which transfers between servers do not know.
- V4's one-sided rotation rotates the quantised query back and quantises it again.
- `return_indexer_topk` returns leftovers for prompts that V3.2 prefills densely (up to 2,048 tokens); those rows are
  not used here.
- `make h200` now gives the models and the weights by itself, the models without a tokenizer; the run above had the
  same configuration and weights prepared beforehand, with a tokenizer.
"""
HERE = Path(__file__).resolve().parent
CELLS = ("selection", "prefill below", "prefill above", "decode below", "decode above", "prefill_decode")
# What was expected before the run, as cells: index patches nothing below the onset and something above, the factor
# everywhere (the selection through later layers), the decode kernel in decode alone, the no-op nowhere.
PREDICTED: dict[str, dict[str, tuple[bool, ...]]] = {
    name: {
        "index-rotation-one-sided": (True, False, True, False, True, False),
        "index-keys-bf16": (True, False, True, False, True, False),
        "routed-scaling-twice": (True, True, True, True, True, False),
        "decode-backend": (False, False, False, True, True, True),
        "noop": (False, False, False, False, False, False),
    }
    for name in ("sglang-h200", "sglang-h200-v4")
}


def seen(told: dict[str, Any]) -> tuple[bool | None, ...]:
    """What showed, in the order of CELLS; None where nothing could be compared."""
    within = [told["prefill_decode"][side]["shows"] for side in ("below", "above")]
    return (
        told["selection"]["shows_above"],
        *(told[measure][side]["shows"] for measure in ("prefill", "decode") for side in ("below", "above")),
        any(within) if None not in within else None,
    )


def number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"


def cell(told: dict[str, Any]) -> str:
    """median, largest (n), in bold where it shows."""
    if not told["prompts"]:
        return "–"
    text = f"{number(told['median'])}, {number(told['largest'])}"
    if told["prompts"] < 9:
        text += f" (of {told['prompts']})"
    return f"**{text}**" if told["shows"] else text


def floor_cell(told: dict[str, Any]) -> str:
    return f"{number(told['floor_median'])}, {number(told['floor_largest'])}"


def chance(length: int, onset: int, model: dict[str, Any]) -> float:
    """Share of base's selection that an independent draw of as many would keep, over the compared prompt positions."""
    per_entry = 4 if model["model_type"] == "deepseek_v4" else 1
    rows = rows_to_keep(length, length, onset, 0)["above"]
    return sum(min(1.0, model["index_topk"] / ((row + 1) // per_entry)) for row in rows) / len(rows)


def section(table: dict[str, Any]) -> list[str]:
    told = conclude(table["compared"], table["onset_tokens"])
    patches = [name for name in told if name != "base-again"]
    lines = [
        "| build | prefill, below | prefill, above | decode, below | decode, above | prefill vs decode, below | above"
        " | cold vs warm, below | above |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    columns = [(m, s) for m in ("prefill", "decode", "prefill_decode", "cold_warm") for s in ("below", "above")]
    any_patch = told[patches[0]]
    lines.append("| base, base again | " + " | ".join(floor_cell(any_patch[m][s]) for m, s in columns) + " |")
    lines += [f"| {name} | " + " | ".join(cell(told[name][m][s]) for m, s in columns) + " |" for name in patches]
    lengths = sorted(any_patch["selection"]["above"], key=int)
    lines += ["", "Share of base's selection kept, by index layer:", ""]
    lines += [
        "| build | " + " | ".join(f"{int(n):,} tokens" for n in lengths) + " | shows in layers | below the onset |"
    ]
    lines += ["|---|" + "---|" * (len(lengths) + 2)]
    shares = [f"{chance(int(n), table['onset_tokens'], table['model']):.3f}" for n in lengths]
    lines.append("| chance | " + " | ".join(shares) + " | – | – |")
    for name in ("base-again", *patches):
        chosen = told[name]["selection"]
        shares = [
            " ".join(f"{share:.3f}" for share in chosen["above"][n]) if n in chosen["above"] else "–" for n in lengths
        ]
        layers = ", ".join(map(str, chosen["layers"])) or "none"
        below = "identical" if chosen["lowest_below"] == 1 else f"{chosen['lowest_below']:.3f}"
        lines.append(f"| {name} | " + " | ".join(shares) + f" | {layers if name != 'base-again' else '–'} | {below} |")
    lines += ["", "Predicted against seen (✓ shows, · does not, – not comparable):", ""]
    lines += ["| build | " + " | ".join(CELLS) + " |", "|---|" + "---|" * len(CELLS)]
    for name in patches:
        marks = []
        for expected, found in zip(PREDICTED[table["patchset"]][name], seen(told[name]), strict=True):
            mark = {True: "✓", False: "·", None: "–"}
            agree = "" if found is None or found == expected else f" (predicted {mark[expected]})"
            marks.append(mark[found] + agree)
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    return lines


def page(tables: dict[str, dict[str, Any]], text: str) -> str:
    """`text` with each {{table NAME}} replaced by the section of that table."""
    for name, table in tables.items():
        text = text.replace(f"{{{{table {name}}}}}", "\n".join(section(table)))
    first = tables["sglang-h200"]
    bf16 = conclude(first["compared"], first["onset_tokens"])["index-keys-bf16"]["prefill"]["above"]["p"]
    packages = ", ".join(f"{name} {version}" for name, version in first["packages"].items())
    return (
        text.replace("{{packages}}", packages)
        .replace("{{gpu}}", first["gpu"])
        .replace("{{alpha}}", str(ALPHA))
        .replace("{{p bf16}}", f"{bf16:.2g}")
        .replace("{{ratio}}", f"{MISS_RATIO:g}")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*")
    store = HERE / "sglang_h200.json"
    tables: dict[str, dict[str, Any]] = json.loads(store.read_text()) if store.exists() else {}
    for file in parser.parse_args().tables:
        table = json.loads(file.read_text())
        table.pop("shows", None)
        table["concluded"] = conclude(table["compared"], table["onset_tokens"])
        tables[table["patchset"]] = table
    store.write_text(json.dumps(tables, indent=1) + "\n")
    (HERE / "sglang_h200.md").write_text(page(tables, TEMPLATE))


if __name__ == "__main__":
    main()
