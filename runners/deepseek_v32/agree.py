"""Do our torch model and SGLang say the same of a checkpoint? Next-token distributions of both on planted prompts.

    make v32-agree PYTHON=python3                                                    # serves it with the sglang here
    python -m longrecall.runners.deepseek_v32.agree MODEL --out agreement.json --minutes 4
    python -m longrecall.runners.deepseek_v32.agree MODEL --out agreement.json --run RUN     # without a server

Each prompt is a campaign's own (history, question, begun answer), 25 of each length. Reported per length: KL(torch fp32
| SGLang) over the whole vocabulary, the largest difference of a log-probability above -10, how often the most likely
token is the same, and the same three for what number formats alone do: torch in bf16, and in bf16 with the index
queries and keys rotated and rounded to fp8 as SGLang stores them. A prompt's row is kept in WORK/rows.jsonl as soon as
it is answered, lengths in turn; after `--minutes` the summary is written of what there is (exit code 3), and the same
command goes on.

With a run folder, the log-probabilities that its base gave the tokens it generated are held against torch's of the
same tokens after the same prompt (fp32; the served model computes in bf16, selects by fp8 index keys).
"""

import argparse
import hashlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longrecall.kernels.indexer.formats import fake_quantize
from longrecall.kernels.indexer.rotation import hadamard
from longrecall.needles.dataset import read_parquet
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler, messages_for
from longrecall.needles.whole_file import write_text
from longrecall.results.run_folder import load_replays
from longrecall.runners.deepseek_v32.export import load
from longrecall.runners.deepseek_v32.model import Select, V32Model, top_selection
from longrecall.runners.deepseek_v32.text import END
from longrecall.runners.divergence import Floats, dense, kl
from longrecall.runners.h200 import ServedBuildError, Server, find_site, make_tree, post

SERVER_ARGS = (
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--mm-feature-transport", "cpu",
    "--mem-fraction-static", "0.85", "--max-total-tokens", "65536", "--max-running-requests", "8",
    "--watchdog-timeout", "600", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
)  # fmt: skip
START_S = 240.0
COMPARED = ("sglang", "torch_bf16", "torch_bf16_fp8_index")


def prompts(folder: Path, recipe_name: str, lengths: Sequence[int], per_length: int, seed: int) -> dict[int, list[Any]]:
    """By length: (token ids, first token of the right answer)."""
    ruler = Ruler.from_folder(folder)
    conversations = list(
        make_conversations(recipe(recipe_name), ruler=ruler, rungs=lengths, count=(per_length + 1) // 2, seed=seed)
    )
    found: dict[int, list[Any]] = {length: [] for length in lengths}
    for conversation in conversations:
        probes = {probe.probe_id: probe for probe in conversation.probes}
        for length in lengths:
            for ask in [ask for ask in conversation.asks if ask.rung == length][:2]:
                ids = ruler.encode(messages_for(conversation, ask), continue_final_message=True)
                gold = ruler.tokenizer.encode(" " + probes[ask.probe_id].gold, add_special_tokens=False).ids
                found[length].append((ids, gold[0]))
    return {length: asked[:per_length] for length, asked in found.items()}


def fp8_selection(topk: int) -> Select:
    """As `top_selection`, of queries and keys as SGLang compares them: rotated, e4m3, a scale for each."""
    exact = top_selection(topk)

    def select(place: int, q: Tensor, k: Tensor, weights: Tensor) -> Tensor | None:
        if q.shape[1] <= topk:
            return None
        q, k = hadamard(q.float()), hadamard(k.float())
        return exact(place, fake_quantize(q, "fp8_ue8m0"), fake_quantize(k, "fp8"), weights.float())

    return select


@torch.no_grad()
def last_logprobs(
    model: V32Model, ids: Sequence[int], device: torch.device, *, bf16: bool, fp8: bool = False
) -> Floats:
    """[V] fp32, after the last token; top-k selection as the config has it, of fp8 index keys on demand."""
    tokens = torch.tensor([list(ids)], device=device)
    select = (fp8_selection if fp8 else top_selection)(model.config.index_topk)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        hidden, _ = model(tokens, select=select)
        logits = model.lm_head(hidden[:, -1]).float()[0]
    return logits.log_softmax(-1).cpu().numpy()


def compare(exact: Floats, other: Floats) -> dict[str, float]:
    seen = exact > -10
    return {
        "kl": float(kl(exact[None], other[None])[0]),
        "largest": float(np.abs(exact - other)[seen].max()),
        "same_argmax": float(exact.argmax() == other.argmax()),
    }


def summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    kls = [row["kl"] for row in rows]
    return {
        "n": len(rows),
        "kl_median": statistics.median(kls),
        "kl_max": max(kls),
        "largest_difference": max(row["largest"] for row in rows),
        "same_argmax": sum(row["same_argmax"] for row in rows) / len(rows),
    }


class Rows:
    """What is known of each prompt, a line each, below a line that says of what they are."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.done: dict[tuple[int, int], dict[str, Any]] = {}
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []  # a half line is no row
        try:
            rows = [json.loads(line) for line in lines]
            if rows and rows[0] != identity:
                raise ValueError(f"{path} is of another model or other prompts; give another --work, or remove it")
            self.done = {(row["length"], row["number"]): row for row in rows[1:]}
        except (json.JSONDecodeError, KeyError, TypeError) as problem:
            raise ValueError(f"{path} is damaged ({problem!r}); remove it") from None
        write_text(path, "\n".join(lines or [json.dumps(identity)]) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.done[row["length"], row["number"]] = row


def agree(options: argparse.Namespace) -> dict[str, Any]:
    """What all rows say, those of earlier pieces too."""
    end = time.monotonic() + options.minutes * 60
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    asked = prompts(options.model, options.recipe, options.lengths, options.per_length, options.seed)
    weights = hashlib.sha256((options.model / "model.safetensors").read_bytes()).hexdigest()
    identity = {
        "weights": weights, "recipe": options.recipe, "lengths": options.lengths, "per_length": options.per_length,
        "seed": options.seed,
    }  # fmt: skip
    rows = Rows(options.work / "rows.jsonl", identity)
    # lengths in turn, so that whatever the time allows says something of each
    order = [(length, n) for n in range(options.per_length) for length in options.lengths if n < len(asked[length])]
    left = [key for key in order if key not in rows.done]
    if left:
        ask_left(options, asked, rows, left, end, device)
    result = {**identity, "planned": len(order), "asked": len(rows.done), "lengths": {}}
    for length in options.lengths:
        own = [row for row in rows.done.values() if row["length"] == length]
        if own:
            result["lengths"][length] = {name: summary([row[name] for row in own]) for name in COMPARED} | {
                "first_token_right": {who: sum(row["right"][who] for row in own) for who in ("torch", "sglang")}
            }
    return result


def ask_left(
    options: argparse.Namespace, asked: Mapping[int, Sequence[Any]], rows: Rows, left: Sequence[tuple[int, int]],
    end: float, device: torch.device,
) -> None:  # fmt: skip
    """Torch answers while the server starts."""
    server = None
    try:
        if not options.running:
            site, tree = find_site(None).resolve(), options.work.resolve() / "tree"
            shutil.rmtree(tree, ignore_errors=True)
            make_tree(site, tree, ())
            server = Server("base", tree, site, options.model.resolve(), options.port, SERVER_ARGS, {})
        model = load(options.model, device).eval()
        mine: dict[tuple[int, int], list[Floats]] = {}

        def torch_says(key: tuple[int, int]) -> list[Floats]:
            if key not in mine:
                ids, _ = asked[key[0]][key[1]]
                ways = ((False, False), (True, False), (True, True))
                mine[key] = [last_logprobs(model, ids, device, bf16=bf16, fp8=fp8) for bf16, fp8 in ways]
            return mine[key]

        if server is not None:
            wait_for(server, (partial(torch_says, key) for key in left))
        for length, number in left:
            if time.monotonic() > end:
                return
            ids, gold = asked[length][number]
            exact, rounded, fp8 = torch_says((length, number))
            served = asked_of_server(options.port, ids, model.config.vocab_size)
            rows.add({
                "length": length, "number": number, "sglang": compare(exact, served),
                "torch_bf16": compare(exact, rounded), "torch_bf16_fp8_index": compare(exact, fp8),
                "right": {"torch": int(exact.argmax() == gold), "sglang": int(served.argmax() == gold)},
            })  # fmt: skip
    finally:
        if server is not None:
            server.stop()


def asked_of_server(port: int, ids: Sequence[int], vocab: int) -> Floats:
    """[V]: SGLang's log-probabilities after the prompt."""
    reply = post(
        port,
        "/generate",
        {
            "input_ids": list(ids), "return_logprob": True, "top_logprobs_num": vocab,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        },
    )  # fmt: skip
    meta = reply["meta_info"]
    if meta["prompt_tokens"] != len(ids):
        raise ServedBuildError(f"the server read {meta['prompt_tokens']} tokens of a prompt of {len(ids)}")
    served = dense(meta["output_top_logprobs"][0], vocab)
    if missing := int(np.isnan(served).sum()):
        raise ServedBuildError(f"the server gave {vocab - missing} of {vocab} log-probabilities")
    return served


def told_of_tokens(run: Path, build: str, folder: Path, lengths: Sequence[int], per_length: int) -> dict[str, Any]:
    """Torch against the log-probabilities stored with a run's replies.

    A reply whose text, cut again, has another number of tokens than it was generated in is left out and counted: words
    that a broken model puts together may be cut otherwise.

    Raises:
        ValueError: the run has no such replies of `build` at a length.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ruler = Ruler.from_folder(folder)
    conversations = {item.conversation_id: item for item in read_parquet(run / "conversations.parquet")}
    model = load(folder, device).eval()
    stored = load_replays(run)
    result: dict[str, Any] = {"run": run.name, "build": build, "lengths": {}}
    for length in lengths:
        replies = [
            reply for reply in stored
            if reply.build_id == build and reply.rung == length and reply.response.token_logprobs
        ]  # fmt: skip
        if not replies:
            has = sorted({f"{reply.build_id} at {reply.rung}" for reply in stored if reply.response.token_logprobs})
            raise ValueError(
                f"{run}: no log-probabilities of build {build!r} at {length} tokens; it has those of"
                f" {', '.join(has) or 'none'}"
            )
        replies = sorted(replies, key=lambda reply: (reply.probe_id, reply.conversation_id))
        step = max(1, len(replies) // per_length)
        differences, same, compared, left_out = [], 0, 0, 0
        for reply in replies[::step][:per_length]:
            conversation = conversations[reply.conversation_id]
            ask = next(a for a in conversation.asks if a.probe_id == reply.probe_id and a.rung == length)
            ids = ruler.encode(messages_for(conversation, ask), continue_final_message=True)
            said = ruler.tokenizer.encode(str(reply.response.text), add_special_tokens=False).ids
            if reply.response.finish_reason == "stop":
                said = [*said, END]
            own = reply.response.token_logprobs or ()
            if len(said) != len(own):
                left_out += 1
                continue
            mine = logprobs_of(model, ids, said, device)
            differences += [abs(a - b) for (a, _), b in zip(mine, own, strict=True)]
            same += sum(best for _, best in mine)
            compared += 1
        if not differences:
            raise ValueError(f"{run}: no reply of build {build!r} at {length} tokens can be cut as it was generated")
        result["lengths"][length] = {
            "n": compared, "left_out": left_out, "tokens": len(differences), "same_argmax": same / len(differences),
            "difference_median": statistics.median(differences), "difference_max": max(differences),
        }  # fmt: skip
        print(json.dumps({length: result["lengths"][length]}), flush=True)
    return result


@torch.no_grad()
def logprobs_of(
    model: V32Model, ids: Sequence[int], said: Sequence[int], device: torch.device
) -> list[tuple[float, bool]]:
    """Of each token said after the prompt: its log-probability, and whether it is the most likely one."""
    tokens = torch.tensor([[*ids, *said]], device=device)
    hidden, _ = model(tokens, select=top_selection(model.config.index_topk))
    logs = model.lm_head(hidden[0, len(ids) - 1 : -1]).float().log_softmax(-1)
    return [(float(row[token]), int(row.argmax()) == token) for row, token in zip(logs, said, strict=True)]


def wait_for(server: Server, meanwhile: Iterator[Callable[[], object]]) -> None:
    """Do what there is to do until the server is up."""
    deadline = time.monotonic() + START_S
    while not server.healthy():
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise ServedBuildError(f"the server did not get ready; its log ends:\n{server.tail()}")
        work = next(meanwhile, None)
        time.sleep(1) if work is None else work()


def at_least_one(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="patchsets/recipes/closed-world.toml")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 1792, 4096, 8192])
    parser.add_argument("--per-length", type=at_least_one, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=31900)
    parser.add_argument("--run", type=Path, help="a run folder whose stored replies are compared; nothing is served")
    parser.add_argument("--build", default="base", help="of that run")
    parser.add_argument("--running", action="store_true", help="a server is up at --port already")
    parser.add_argument("--work", type=Path, default=Path("results/runs/v32-agree"), help="rows kept, and the tree")
    parser.add_argument("--minutes", type=float, default=8.0, help="end this piece after so long")
    options = parser.parse_args(argv)
    try:
        if options.run is not None:
            result = told_of_tokens(options.run, options.build, options.model, options.lengths, options.per_length)
        else:
            result = agree(options)
        write_text(options.out, json.dumps(result, indent=1) + "\n")
    except (ValueError, ServedBuildError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0 if result.get("asked") == result.get("planned") else 3


if __name__ == "__main__":
    sys.exit(main())
