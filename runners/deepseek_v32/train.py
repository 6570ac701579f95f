"""Train the DeepSeek-V3.2 model to recall planted facts; resumable, in pieces of any length.

    make train-v32                                                        # all of it on one H200, checkpoint exported
    python -m longrecall.runners.deepseek_v32.train --state DIR --minutes 8   # a piece; again until it says "finished"

The plan (`PLAN`): dense attention on conversations of 256 tokens, then longer ones up to 8K, until the answers are
right; the indexer's dense warm-up, everything else frozen: KL of the mean attention distribution over heads against the
softmax of the index scores; then sparse attention, top 2,048 by the trained indexer. Loss on every token, 60 times as
much on an answer. A step is 65,536 tokens. Same seed, same batches and start;
sums on a GPU are not bit-identical between runs.

DIR/state.pt is replaced after every `--save-s` seconds and at the end, DIR/log.jsonl grows by a line every 20 steps.
Killed at any moment, the same command goes on from the state, the log is cut back to it, and what follows is what would
have followed: on a CPU to the last bit.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from longrecall.runners.deepseek_v32.config import V32Config
from longrecall.runners.deepseek_v32.model import MoE, V32Model, index_scores, top_selection
from longrecall.runners.deepseek_v32.muon import Muon
from longrecall.runners.deepseek_v32.text import Batch, Shape, Texts, vocabulary
from longrecall.runners.supervise import die_with_parent

BIAS_STEP = 0.001
"""Of the gate's balancing bias, which follows the load (no balance loss)."""
WARM_UP = 40
"""Steps over which the rate rises at the start of a plan, and again after each change of what is trained."""
LOG_EVERY = 20
RANDOM_QUERIES, ANSWER_QUERIES = 96, 96


@dataclass(frozen=True, kw_only=True)
class Phase:
    name: str
    kind: Literal["dense", "indexer", "sparse"] = "dense"
    length: int
    rows: int
    steps: int
    probes: int
    facts: tuple[int, int]
    lr: tuple[float, float]
    """Factor of the rates at the first and last step, cosine between."""
    enough: float = 2.0
    """The phase ends early once the answers' accuracy over 60 steps reaches this."""
    interleaved: float = 0.5

    @property
    def shape(self) -> Shape:
        return Shape(length=self.length, probes=self.probes, facts=self.facts, interleaved=self.interleaved)


TOKENS_PER_STEP = 65_536


def _dense(length: int, steps: int, probes: int, facts: tuple[int, int], lr: tuple[float, float], **more: Any) -> Phase:
    rows = TOKENS_PER_STEP // length
    return Phase(
        name=f"dense-{length}", length=length, rows=rows, steps=steps, probes=probes, facts=facts, lr=lr, **more
    )


PLAN: tuple[Phase, ...] = (
    _dense(256, 400, 6, (2, 4), (1.0, 1.0), enough=0.97),
    _dense(1024, 400, 16, (6, 20), (1.0, 0.8), enough=0.985),
    _dense(4096, 400, 48, (8, 40), (0.8, 0.4), enough=0.99),
    _dense(8192, 450, 80, (8, 48), (0.4, 0.02)),
    Phase(
        name="indexer", kind="indexer", length=8192, rows=8, steps=100, probes=64, facts=(8, 48), lr=(1.0, 0.02),
        interleaved=0.3,
    ),
    Phase(name="sparse", kind="sparse", length=8192, rows=4, steps=10, probes=64, facts=(8, 48), lr=(0.05, 0.005)),
)  # fmt: skip
RATES = {"muon": 0.01, "adam": 0.002, "indexer": 0.002}


# --- data ----------------------------------------------------------------------------------------------------------

_texts: Texts | None = None


def _worker() -> None:
    global _texts
    die_with_parent()  # a killed trainer closes no pool
    torch.set_num_threads(1)
    _texts = Texts()


def _make(shape: Shape, rows: int, key: str) -> Batch:
    assert _texts is not None
    return _texts.batch(shape, rows, random.Random(key))


class Feed:
    """Batches by (phase, step), made ahead by processes of its own; which process makes one does not matter."""

    def __init__(self, seed: int, workers: int) -> None:
        self.seed, self.ahead = seed, max(2, 2 * workers)
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_worker)

    def batches(self, phase: Phase, first: int) -> Iterator[Batch]:
        waiting: deque[Future[Batch]] = deque()
        following = first
        while True:
            while len(waiting) < self.ahead:
                waiting.append(
                    self.pool.submit(_make, phase.shape, phase.rows, f"{self.seed}:{phase.name}:{following}")
                )
                following += 1
            yield waiting.popleft().result()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def on_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """ids int64 [B, S], weights fp32 [B, S], answers int64 [B, S]."""
    ids, weights, answers = (
        torch.from_numpy(part.astype("int32")) for part in (batch.ids, batch.weights, batch.answers)
    )
    if device.type == "cuda":
        ids, weights, answers = (part.pin_memory().to(device, non_blocking=True) for part in (ids, weights, answers))
    return ids.long(), weights.float(), answers.long()


# --- one step ------------------------------------------------------------------------------------------------------


def language_loss(
    model: V32Model, ids: Tensor, weights: Tensor, answers: Tensor, **how: Any
) -> tuple[Tensor, Tensor, Any]:
    """Weighted mean cross entropy; right and asked counts [2, 2] of first and second answer tokens; expert loads."""
    hidden, loads = model(ids, **how)
    logits = model.lm_head(hidden[:, :-1]).float()
    targets, weights, answers = ids[:, 1:], weights[:, 1:], answers[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    with torch.no_grad():
        right = logits.argmax(-1) == targets
        counts = torch.stack(
            [torch.stack(((right & (answers == kind)).sum(), (answers == kind).sum())) for kind in (2, 1)]
        )
    return loss, counts, loads


def query_places(answers: Tensor, generator: torch.Generator) -> Tensor:
    """Positions [Q] of one row's queries to learn from: those that predict an answer's tokens, and random ones."""
    length = answers.shape[0]
    asking = (answers[1:] > 0).nonzero()[:, 0]
    if len(asking) > ANSWER_QUERIES:
        asking = asking[torch.randperm(len(asking), generator=generator, device=generator.device)[:ANSWER_QUERIES]]
    others = torch.randint(0, length, (RANDOM_QUERIES,), generator=generator, device=generator.device)
    return torch.cat((asking, others)).to(answers.device)


def indexer_loss(model: V32Model, ids: Tensor, answers: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Per layer: mean KL in nats of the attention distribution (mean over heads) from the index scores' softmax."""
    c = model.config
    rows, length = ids.shape
    places = [query_places(row, generator) for row in answers]
    kept: list[tuple[Tensor, Tensor, list[Tensor]]] = []

    def look(layer: int, normed: Tensor, latent_q: Tensor, q: Tensor, k: Tensor) -> None:
        targets = []
        for row, at in enumerate(places):
            scores = torch.einsum("qhd,shd->hqs", q[row, at], k[row]).float() * c.softmax_scale
            hidden = torch.arange(length, device=ids.device) > at[:, None]
            targets.append(scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(0).bfloat16())
        kept.append((normed.detach(), latent_q.detach(), targets))

    with torch.no_grad():
        model(ids, look=look)
    cos, sin = model.positions(rows, length, ids.device)
    losses = []
    for layer, (normed, latent_q, targets) in zip(model.layers, kept, strict=True):
        q, k, weights = layer.self_attn.indexer(normed, latent_q, cos, sin)
        q, k, weights = (t.view(rows, length, *t.shape[1:]) for t in (q, k, weights))
        total = torch.zeros((), device=ids.device)
        for row, (at, target) in enumerate(zip(places, targets, strict=True)):
            hidden = torch.arange(length, device=ids.device) > at[:, None]
            scores = index_scores(q[row, at], k[row], weights[row, at]).masked_fill(hidden, -torch.inf)
            logs = scores.log_softmax(-1).masked_fill(hidden, 0.0)
            wide = target.float()
            total = total + (torch.special.xlogy(wide, wide) - wide * logs).sum(-1).mean()
        losses.append(total / rows)
    return losses


# --- the trainer ---------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(
        self,
        config: V32Config,
        plan: Sequence[Phase],
        *,
        seed: int,
        device: torch.device,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.config, self.plan, self.seed, self.device = config, plan, seed, device
        self.model = V32Model(config)
        self.model.initialise(seed)
        self.model.to(device)
        self.phase, self.step, self.steps, self.tokens, self.seconds = 0, 0, 0, 0, 0.0
        self.window: deque[tuple[Tensor, Tensor]] = deque(maxlen=LOG_EVERY)
        """Loss and counts of the phase's last steps."""
        self.recent: deque[float] = deque(maxlen=3)
        """The answers' accuracy in the phase's last logged windows."""
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.rates = {**RATES, **(rates or {})}
        self.kind = ""
        self.enter()

    def enter(self) -> None:
        """Set up what the current phase trains."""
        kind = self.plan[self.phase].kind if self.phase < len(self.plan) else ""
        if kind == self.kind or not kind:
            return
        self.kind = kind
        for name, value in self.model.named_parameters():
            value.requires_grad_(("indexer" in name) == (kind == "indexer"))
            value.grad = None  # else clipping would go on counting it
        named = [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]
        if kind == "indexer":
            self.optimizers = {"indexer": torch.optim.AdamW([v for _, v in named], betas=(0.9, 0.98), weight_decay=0.0)}
            return
        matrices = [v for name, v in named if v.dim() >= 2 and not _is_adam(name)]
        others = [v for name, v in named if v.dim() < 2 or _is_adam(name)]
        self.optimizers = {
            "muon": Muon(matrices, lr=RATES["muon"], weight_decay=0.01),
            "adam": torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
        }

    def rate(self) -> float:
        import math

        phase = self.plan[self.phase]
        first, last = phase.lr
        along = min(self.step / max(1, phase.steps - 1), 1.0)
        factor = last + (first - last) * 0.5 * (1 + math.cos(math.pi * along))
        fresh = self.phase == 0 or self.plan[self.phase - 1].kind != phase.kind
        return factor * min(1.0, (self.step + 1) / WARM_UP) if fresh else factor

    def train_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss, and counts [2, 2] of right and asked answers (zeros while the indexer is trained)."""
        phase = self.plan[self.phase]
        ids, weights, answers = on_device(batch, self.device)
        rate = self.rate()
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.rates[name] * rate
            optimizer.zero_grad(set_to_none=True)
        loads: list[Tensor] = []
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            if phase.kind == "indexer":
                generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + self.step)
                loss = torch.stack(indexer_loss(self.model, ids, answers, generator)).mean()
                counts = torch.zeros(2, 2, device=self.device)
            elif phase.kind == "sparse":
                # Row by row: a mask of 8K x 8K for each.
                counts = torch.zeros(2, 2, device=self.device)
                loss = torch.zeros((), device=self.device)
                for row in range(len(ids)):
                    part, some, loads = language_loss(
                        self.model, ids[row : row + 1], weights[row : row + 1], answers[row : row + 1],
                        select=top_selection(self.config.index_topk),
                    )  # fmt: skip
                    (part / len(ids)).backward()
                    loss, counts = loss + part.detach() / len(ids), counts + some
            else:
                loss, counts, loads = language_loss(self.model, ids, weights, answers)
        if phase.kind != "sparse":
            loss.backward()
        torch.nn.utils.clip_grad_norm_([v for v in self.model.parameters() if v.grad is not None], 1.0)
        for optimizer in self.optimizers.values():
            optimizer.step()
        moes = [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, MoE)]
        for moe, load in zip(moes, loads, strict=False):
            moe.gate.e_score_correction_bias.add_(BIAS_STEP * rate * (load.mean() - load).sign())
        self.step += 1
        self.steps += 1
        self.tokens += ids.numel()
        return loss.detach(), counts

    def next_phase(self) -> None:
        self.phase, self.step = self.phase + 1, 0
        self.window.clear()
        self.recent.clear()
        self.enter()

    def identity(self) -> dict[str, Any]:
        """What a state must have been trained with, to go on from it."""
        return {
            "config": asdict(self.config), "seed": self.seed, "plan": [json.dumps(asdict(p)) for p in self.plan],
            "rates": self.rates,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        return {
            **self.identity(), "phase": self.phase, "step": self.step,
            "window": [(float(loss), counts.tolist()) for loss, counts in self.window], "recent": list(self.recent),
            "steps": self.steps, "tokens": self.tokens, "seconds": self.seconds, "model": self.model.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "kind": self.kind,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        self.phase, self.step, self.steps = state["phase"], state["step"], state["steps"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self.window.extend(
            (torch.tensor(loss, device=self.device), torch.tensor(counts, device=self.device))
            for loss, counts in state["window"]
        )
        self.recent.extend(state["recent"])
        self.model.load_state_dict(state["model"])
        self.enter()
        if self.kind == state["kind"]:
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(state["optimizers"][name])


def _is_adam(name: str) -> bool:
    return any(part in name for part in ("embed_tokens", "lm_head", "gate.weight", "weights_proj"))


@torch.no_grad()
def judge(
    model: V32Model, texts: Texts, lengths: Sequence[int], device: torch.device, *, questions: int = 256, sparse: bool
) -> dict[int, float]:
    """Share of questions answered in full (both tokens, each given what is before it), 16 facts a conversation."""
    found = {}
    for length in lengths:
        rows = max(1, questions // 16)
        shape = Shape(length=length, probes=18, facts=(16, 16), interleaved=0.0)
        batch = texts.batch(shape, rows, random.Random(f"judge:{length}"))
        right = asked = 0
        for start in range(0, rows, 2):
            part = Batch(
                ids=batch.ids[start : start + 2], weights=batch.weights[start : start + 2],
                answers=batch.answers[start : start + 2],
            )  # fmt: skip
            ids, _, answers = on_device(part, device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                hidden, _ = model(ids, select=top_selection(model.config.index_topk) if sparse else None)
                hits = model.lm_head(hidden[:, :-1]).argmax(-1) == ids[:, 1:]
            first = answers[:, 1:] == 2
            first[:, -1] = False
            whole = hits[:, :-1] & hits[:, 1:] & first[:, :-1]
            right, asked = right + int(whole.sum()), asked + int(first[:, :-1].sum())
        found[length] = round(right / max(asked, 1), 4)
    return found


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """
    Raises:
        ValueError: it cannot be read, or lacks what this version keeps.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        missing = {"plan", "rates", "window", "recent", "log_bytes"} - state.keys()
    except Exception as problem:  # zip, pickle and torch each raise their own
        lines = str(problem).splitlines() or [""]
        raise ValueError(f"{path} cannot be read ({lines[0]}); remove it, or give another --state") from problem
    if missing:
        raise ValueError(f"{path} is of another version; remove it, or give another --state")
    return dict(state)


def train(options: argparse.Namespace, plan: Sequence[Phase] = PLAN, config: V32Config | None = None) -> bool:
    """Go on until the plan or the time ends; True when the plan is done."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    state_dir: Path = options.state
    state_dir.mkdir(parents=True, exist_ok=True)
    config = config or V32Config(vocab_size=len(vocabulary()))
    trainer = Trainer(config, plan, seed=options.seed, device=device, rates={"muon": options.muon_rate})
    kept = state_dir / "state.pt"
    log_bytes = 0
    if kept.is_file():
        state = read_state(kept, device)
        others = [key for key, value in trainer.identity().items() if state[key] != value]
        if others:
            raise ValueError(f"{kept} has another {' and '.join(others)}; give another --state, or remove it")
        trainer.restore(state)
        if trainer.phase >= len(plan):
            return True
        log_bytes = state["log_bytes"]
    if options.compile:
        trainer.model.compile_parts()
    texts = Texts()
    feed = Feed(options.seed, options.workers)
    log = (state_dir / "log.jsonl").open("ab")
    log.truncate(min(log_bytes, log.tell()))  # what was logged after the state was kept will be logged again
    log.seek(0, os.SEEK_END)

    def say(**line: Any) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        log.write(text.encode() + b"\n")
        log.flush()

    def save() -> None:
        part = kept.with_suffix(".part")
        torch.save({**trainer.state(), "log_bytes": log.tell()}, part)
        os.replace(part, kept)

    def elapsed() -> float:
        return time.monotonic() - began

    paid, saved = trainer.seconds, time.monotonic()
    try:
        while trainer.phase < len(plan):
            phase = plan[trainer.phase]
            window, recent, begun_at = trainer.window, trainer.recent, trainer.step
            marked, stop = time.monotonic(), False
            for batch in feed.batches(phase, trainer.step):
                window.append(trainer.train_step(batch))
                done = trainer.step >= phase.steps
                if trainer.step % LOG_EVERY == 0 or done:
                    counts = torch.stack([c for _, c in window]).sum(0).tolist()
                    first, second = (right / asked if asked else 0.0 for right, asked in counts)
                    now = time.monotonic()
                    say(
                        step=trainer.steps, phase=phase.name, at=trainer.step,
                        loss=round(float(torch.stack([loss for loss, _ in window]).mean()), 4), first=round(first, 4),
                        second=round(second, 4), rate=round(trainer.rate() if not done else phase.lr[1], 4),
                        tokens_per_s=round((trainer.step - begun_at) * phase.rows * phase.length / (now - marked)),
                        tokens=trainer.tokens, seconds=round(paid + elapsed(), 1),
                    )  # fmt: skip
                    marked, begun_at = now, trainer.step
                    recent.append(min(first, second))
                    done = done or (len(recent) == 3 and min(recent) >= phase.enough)
                trainer.seconds = paid + elapsed()
                stop = elapsed() > options.minutes * 60
                if done:
                    break
                if stop:
                    break
                if time.monotonic() - saved > options.save_s:
                    save()
                    saved = time.monotonic()
            if done:
                lengths = [n for n in options.judge if n <= max(phase.length, 1024)]
                said = judge(trainer.model, texts, lengths, device, sparse=False) if phase.kind == "dense" else {}
                if phase.kind != "dense":
                    lengths = [n for n in lengths if n > config.index_topk] or lengths[-1:]
                    said = judge(trainer.model, texts, lengths, device, sparse=True)
                say(judged=phase.name, kind="sparse" if phase.kind != "dense" else "dense", recall=said)
                trainer.next_phase()
            trainer.seconds = paid + elapsed()
            finished = trainer.phase >= len(plan)
            if finished:
                say(finished=True, steps=trainer.steps, tokens=trainer.tokens, seconds=round(trainer.seconds, 1))
            elif stop:
                say(stopped=plan[trainer.phase].name, at=trainer.step, seconds=round(trainer.seconds, 1))
            save()
            if stop and not finished:
                return False
        return True
    finally:
        feed.close()
        log.close()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--state", type=Path, default=Path("results/runs/train-v32"), help="where training is kept")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--muon-rate", type=float, default=RATES["muon"], help="of the hidden matrices, at its highest")
    made.add_argument("--minutes", type=float, default=25.0, help="end this piece after so long")
    made.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    made.add_argument("--save-s", type=float, default=60.0)
    made.add_argument("--scale", type=float, default=1.0, help="factor of every phase's steps")
    made.add_argument("--judge", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    made.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    made.add_argument("--export", type=Path, help="write the checkpoint here when the plan is finished")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    plan = [replace(phase, steps=max(1, round(phase.steps * options.scale))) for phase in PLAN]
    try:
        finished = train(options, plan)
        if not finished:
            print("not finished; the same command goes on", file=sys.stderr)
            return 3
        if options.export:
            from longrecall.runners.deepseek_v32.export import export

            export(options.state / "state.pt", options.export)
    except (ValueError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
