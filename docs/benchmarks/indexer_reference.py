"""Key formats and faults on the reference build's own index activations: writes indexer_reference.json and .md here.

    python docs/benchmarks/indexer_reference.py --conversations 4 --rung 2048

Each probe's prompt is run through the healthy build with a capture hook on its three indexers; the query that begins
the answer is replayed through every format and fault. The needle is the tokens of the value where it was planted; the
healthy build does not select all of them either, so the share of them that is selected stands beside its own share.
"""

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

from longrecall.kernels.faults import catalogue
from longrecall.kernels.indexer import measures
from longrecall.kernels.indexer.capture import CaptureWriter, attach, read_capture
from longrecall.kernels.indexer.emulate import Pipeline, scores, select
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler, continues, messages_for
from longrecall.runners.reference.convert import reference_folder
from longrecall.runners.reference.interface import Chunk
from longrecall.runners.reference.model import ReferenceModel

HERE = Path(__file__).parent
FORMATS = ("bf16", "fp8", "fp8_ue8m0", "fp4", "fp4_ties_down", "nvfp4")
LEFT_OUT = {"compressor-tail": "no compressor in this build", "topk-overflow": "no crowded bins at this length"}


def capture_probes(conversations: int, rung: int, folder: Path) -> list[Path]:
    """One capture file per probe."""
    ruler = Ruler.from_folder(reference_folder())
    model = ReferenceModel.load(reference_folder())
    indexers = {n: layer.indexer for n, layer in enumerate(model.layers) if layer.indexer is not None}
    paths = []
    for made in make_conversations(recipe("reference"), ruler=ruler, rungs=[rung], count=conversations, seed=11):
        asks = [ask for ask in made.asks if ask.fact_span is not None]
        facts = {fact.fact_id: fact for fact in made.facts}
        live = {probe.probe_id: probe.live_fact for probe in made.probes}
        prompts, needles = [], []
        for ask in asks:
            messages = messages_for(made, ask)
            fact = facts[live[ask.probe_id] or ""]
            found = ruler.find(messages, fact.turn_index, fact.value)
            assert found is not None, f"{ask.probe_id}: the value is not in its turn"
            needles.append(torch.arange(*found).unsqueeze(0))
            begun = continues(messages)
            prompts.append(ruler.encode(messages, add_generation_prompt=not begun, continue_final_message=begun))
        shared = min(len(p) for p in prompts) - 1
        while any(p[:shared] != prompts[0][:shared] for p in prompts):
            shared -= 1
        history = model.new_cache()
        model.prefill([Chunk(tokens=prompts[0][:shared], cache=history, logits="none")])
        for ask, prompt, needle in zip(asks, prompts, needles, strict=True):
            writer = CaptureWriter(
                path=folder / f"{made.conversation_id}-{ask.probe_id}.safetensors", preset="reference",
                model="reference build", source=ask.probe_id, wanted=frozenset({len(prompt) - 1}),
            )  # fmt: skip
            detach = attach(writer, indexers)
            model.prefill([Chunk(tokens=prompt[shared:], cache=history.fork(shared), logits="none")])
            detach()
            paths.append(writer.close(needles=needle))
    return paths


def measured(paths: list[Path]) -> list[dict[str, float | int | str]]:
    arms = {fmt: Pipeline(key_format=fmt) for fmt in FORMATS}
    arms |= {
        f.name: Pipeline(key_format="fp8").with_switch(f.switch) for f in catalogue("indexer") if f.name not in LEFT_OUT
    }
    kept: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    for path in paths:
        for layer, given in read_capture(path):
            assert given.needles is not None
            exact = select(given, Pipeline())
            for name, pipeline in arms.items():
                picks = select(given, pipeline, index_scores=scores(given, pipeline))
                share = float(torch.isin(given.needles, picks).float().mean())
                healthy = float(torch.isin(given.needles, exact).float().mean())
                kept[name, layer].append((float(measures.set_recall(picks, exact)), share, healthy))
    rows: list[dict[str, float | int | str]] = []
    for (name, layer), values in kept.items():
        recall, share, healthy = (sum(v) / len(v) for v in zip(*values, strict=True))
        rows.append({
            "arm": name, "layer": layer, "probes": len(values), "set_recall": round(recall, 4),
            "value_tokens_selected": round(share, 4), "value_tokens_selected_exact": round(healthy, 4),
        })  # fmt: skip
    return rows


def markdown(document: dict[str, object], rows: list[dict[str, float | int | str]]) -> str:
    layers = sorted({int(row["layer"]) for row in rows})
    exact = {int(r["layer"]): r["value_tokens_selected_exact"] for r in rows}
    lines = [
        "# Index key formats and faults on the reference build's activations",
        "",
        "Written by `docs/benchmarks/indexer_reference.py`; "
        f"commit {document['commit']}, torch {document['torch']}, CPU.",
        f"{document['probes']} probes of {document['conversations']} conversations at {document['rung']} tokens "
        "(every token is selected up to 512), the query that begins the answer.",
        "",
        "Per layer: set recall against the exact fp32 selection / share of the planted value's tokens selected.",
        "",
        "| keys | " + " | ".join(f"layer {n}" for n in layers) + " |",
        "|---|" + "---|" * len(layers),
        "| exact fp32 | " + " | ".join(f"1 / {exact[n]:.2f}" for n in layers) + " |",
    ]
    for arm in dict.fromkeys(str(row["arm"]) for row in rows):
        cells = {int(r["layer"]): r for r in rows if r["arm"] == arm}
        shown = [f"{cells[n]['set_recall']:.3f} / {cells[n]['value_tokens_selected']:.2f}" for n in layers]
        lines.append(f"| {arm} | " + " | ".join(shown) + " |")
    lines += ["", "Left out: " + "; ".join(f"{name} ({why})" for name, why in LEFT_OUT.items()) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--rung", type=int, default=2048)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = capture_probes(arguments.conversations, arguments.rung, Path(folder))
        rows = measured(paths)
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=HERE)
    document: dict[str, object] = {
        "schema_version": 1, "commit": commit.stdout.strip() or None, "torch": torch.__version__,
        "conversations": arguments.conversations, "rung": arguments.rung, "probes": len(paths), "rows": rows,
    }  # fmt: skip
    (HERE / "indexer_reference.json").write_text(json.dumps(document, indent=1) + "\n")
    text = markdown(document, rows)
    (HERE / "indexer_reference.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
