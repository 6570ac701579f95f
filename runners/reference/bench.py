"""`longrecall bench reference`: what one conversation costs the reference model, without the server around it.

    longrecall bench reference                                   # one conversation of `make eval`: 2048 + 24 × (20 + 6)
    longrecall bench reference --history 8192 --branches 8 --repeats 1
    longrecall bench reference --threads 2

A history is prefilled in chunks, branches fork off it, each is prefilled with a short question, all decode together.
Before anything is timed, decode must agree with prefill on the same tokens. Wall-clock and CPU seconds are both
given: on a busy machine only the second says what the model costs. Times are the best of `repeats`. The last line on
standard output is one JSON document.
"""

import itertools
import json
import platform
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer


class Timed(NamedTuple):
    """One phase, best of the repeats."""

    wall_s: float
    cpu_s: float


def _check(model: Any, tokens: list[int]) -> float:
    """Mean KL between decode's and prefill's answer over 8 tokens; RuntimeError when they are different functions."""
    import torch

    from longrecall.runners.reference.interface import Chunk

    (expected,) = model.prefill([Chunk(tokens=tokens, cache=model.new_cache(), logits="all")])
    cache = model.new_cache()
    model.prefill([Chunk(tokens=tokens[:-8], cache=cache, logits="none")])
    decoded = torch.cat([model.decode([token], [cache]) for token in tokens[-8:]])
    left, right = expected[-8:].log_softmax(-1), decoded.log_softmax(-1)
    divergence = float((left.exp() * (left - right)).sum(-1).mean())
    # bf16 rounding on the way: .002 measured; a wrong mask or a lost split is above .5
    if not divergence < 0.05:
        raise RuntimeError(f"decode and prefill disagree (mean KL {divergence:.3g}); nothing was timed")
    return divergence


def _conversation(
    model: Any, tokens: list[int], history: int, branches: int, question: int, answer: int, chunk: int
) -> list[Timed]:
    from longrecall.runners.reference.interface import Chunk

    marks = [(time.perf_counter(), time.process_time())]
    cache = model.new_cache()
    for start in range(0, history, chunk):
        part = tokens[start : min(history, start + chunk)]
        model.prefill([Chunk(tokens=part, cache=cache, logits="none")])
    marks.append((time.perf_counter(), time.process_time()))
    forks = [cache.fork(history) for _ in range(branches)]
    asked = [tokens[history + n * question : history + (n + 1) * question] for n in range(branches)]
    chunks = [Chunk(tokens=own, cache=fork, logits="last") for own, fork in zip(asked, forks, strict=True)]
    last = [int(logits[-1].argmax()) for logits in model.prefill(chunks)]
    marks.append((time.perf_counter(), time.process_time()))
    for _ in range(answer):
        last = model.decode(last, forks).argmax(-1).tolist()
    marks.append((time.perf_counter(), time.process_time()))
    return [Timed(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]


def bench(
    history: Annotated[int, typer.Option(min=1, help="Tokens of the history.")] = 2048,
    branches: Annotated[int, typer.Option(min=1, help="Questions that branch off it.")] = 24,
    question: Annotated[int, typer.Option(min=1, help="Tokens of each question.")] = 20,
    answer: Annotated[int, typer.Option(min=1, help="Tokens decoded for each.")] = 6,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one prefill call; the server's default.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    folder: Annotated[Path | None, typer.Option(help="Model folder; default: the converted reference.")] = None,
) -> None:
    """Prefill and decode speed of the reference model, one conversation at a time."""
    import torch

    from longrecall.runners.reference.convert import reference_folder
    from longrecall.runners.reference.model import ReferenceModel

    torch.set_num_threads(threads)
    started = time.perf_counter()
    model = ReferenceModel.load(folder or reference_folder())
    load_s = time.perf_counter() - started
    generator = torch.Generator().manual_seed(0)
    size = history + branches * question
    tokens = [2, *torch.randint(1000, 200_000, (size,), generator=generator).tolist()][:size]
    divergence = _check(model, tokens[: min(size, 700)])
    runs = [_conversation(model, tokens, history, branches, question, answer, chunk) for _ in range(repeats)]
    prefill, ask, decode = (Timed(min(r[i].wall_s for r in runs), min(r[i].cpu_s for r in runs)) for i in range(3))
    result = {
        "bench": "reference",
        "prefill_tokens_per_s": round(history / prefill.wall_s, 1),
        "prefill_tokens_per_cpu_s": round(history / prefill.cpu_s, 1),
        "branch_prefill_tokens_per_s": round(branches * question / ask.wall_s, 1),
        "decode_tokens_per_s": round(branches * answer / decode.wall_s, 1),
        "decode_tokens_per_cpu_s": round(branches * answer / decode.cpu_s, 1),
        "decode_step_ms": round(decode.wall_s / answer * 1e3, 1),
        "conversation_s": round(sum(part.wall_s for part in (prefill, ask, decode)), 3),
        "conversation_cpu_s": round(sum(part.cpu_s for part in (prefill, ask, decode)), 3),
        "load_s": round(load_s, 2),
        "decode_vs_prefill_kl": round(divergence, 6),
        "shape": {"history": history, "branches": branches, "question": question, "answer": answer, "chunk": chunk},
        "repeats": repeats,
        "threads": threads,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    for name in ("prefill_tokens_per_s", "branch_prefill_tokens_per_s", "decode_tokens_per_s", "conversation_s"):
        typer.echo(f"{name:32} {result[name]}")
    typer.echo(json.dumps(result))
