"""Do our torch model and SGLang say the same of a checkpoint? Next-token distributions of both on planted prompts.

    python -m longrecall.runners.deepseek_v32.agree MODEL --out agreement.json        # serves it with the sglang here
    python -m longrecall.runners.deepseek_v32.agree MODEL --out agreement.json --run RUN     # without a server

With a run folder, the log-probabilities that its base gave the tokens it generated are held against torch's of the
same tokens after the same prompt (fp32; the served model computes in bf16, selects by fp8 index keys).

Each prompt is a campaign's own (history, question, begun answer). Reported per length: KL(torch fp32 | SGLang) over the
whole vocabulary, the same for torch in bf16 (the noise of the number format), the largest difference of a
log-probability above -10, and how often the most likely token is the same.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longrecall.needles.dataset import read_parquet
from longrecall.needles.plant import make_conversations
from longrecall.needles.recipes import recipe
from longrecall.needles.render import Ruler, messages_for
from longrecall.results.run_folder import load_replays
from longrecall.runners.deepseek_v32.export import load
from longrecall.runners.deepseek_v32.model import V32Model, top_selection
from longrecall.runners.deepseek_v32.text import END
from longrecall.runners.divergence import Floats, dense, kl
from longrecall.runners.h200 import ServedBuildError, Server, find_site, make_tree, post

SERVER_ARGS = (
    "--sampling-backend", "pytorch", "--grammar-backend", "none", "--mm-feature-transport", "cpu",
    "--mem-fraction-static", "0.85", "--max-total-tokens", "65536", "--max-running-requests", "8",
    "--watchdog-timeout", "600", "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled",
)  # fmt: skip
START_S = 240.0


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


@torch.no_grad()
def last_logprobs(model: V32Model, ids: Sequence[int], device: torch.device, *, bf16: bool) -> Floats:
    """[V] fp32, after the last token; top-k selection as the config has it."""
    tokens = torch.tensor([list(ids)], device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        hidden, _ = model(tokens, select=top_selection(model.config.index_topk))
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


def agree(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    asked = prompts(options.model, options.recipe, options.lengths, options.per_length, options.seed)
    model = load(options.model, device).eval()
    vocab = model.config.vocab_size
    server, url_port = None, options.port
    result: dict[str, Any] = {"lengths": {}}
    try:
        if not options.running:
            site = find_site(None).resolve()
            tree = options.work.resolve()
            make_tree(site, tree, ())
            server = Server("base", tree, site, options.model.resolve(), options.port, SERVER_ARGS, {})
        mine = {
            length: [
                (last_logprobs(model, ids, device, bf16=False), last_logprobs(model, ids, device, bf16=True))
                for ids, _ in rows
            ]
            for length, rows in asked.items()
        }
        del model
        if server is not None:
            wait_for(server)
        for length, rows in asked.items():
            theirs, noise, right = [], [], {"torch": 0, "sglang": 0}
            for (ids, gold), (exact, rounded) in zip(rows, mine[length], strict=True):
                reply = post(
                    url_port,
                    "/generate",
                    {
                        "input_ids": list(ids), "return_logprob": True, "top_logprobs_num": vocab,
                        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
                    },
                )  # fmt: skip
                served = dense(reply["meta_info"]["output_top_logprobs"][0], vocab)
                theirs.append(compare(exact, served))
                noise.append(compare(exact, rounded))
                right["torch"] += int(exact.argmax() == gold)
                right["sglang"] += int(served.argmax() == gold)
            result["lengths"][length] = {
                "sglang": summary(theirs), "torch_bf16": summary(noise), "first_token_right": right,
            }  # fmt: skip
    finally:
        if server is not None:
            server.stop()
    return result


def told_of_tokens(run: Path, build: str, folder: Path, lengths: Sequence[int], per_length: int) -> dict[str, Any]:
    """Torch against the log-probabilities stored with a run's replies."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ruler = Ruler.from_folder(folder)
    conversations = {item.conversation_id: item for item in read_parquet(run / "conversations.parquet")}
    model = load(folder, device).eval()
    result: dict[str, Any] = {"run": run.name, "build": build, "lengths": {}}
    for length in lengths:
        replies = [
            reply for reply in load_replays(run)
            if reply.build_id == build and reply.rung == length and reply.response.token_logprobs
        ]  # fmt: skip
        replies = sorted(replies, key=lambda reply: (reply.probe_id, reply.conversation_id))
        step = max(1, len(replies) // per_length)
        differences, same, tokens = [], 0, 0
        for reply in replies[::step][:per_length]:
            conversation = conversations[reply.conversation_id]
            ask = next(a for a in conversation.asks if a.probe_id == reply.probe_id and a.rung == length)
            ids = ruler.encode(messages_for(conversation, ask), continue_final_message=True)
            said = ruler.tokenizer.encode(str(reply.response.text), add_special_tokens=False).ids
            if reply.response.finish_reason == "stop":
                said = [*said, END]
            stored = reply.response.token_logprobs or ()
            if len(said) != len(stored):
                raise ValueError(f"{run}: {reply.probe_id}: {len(stored)} log-probabilities for {len(said)} tokens")
            mine = logprobs_of(model, ids, said, device)
            differences += [abs(a - b) for (a, _), b in zip(mine, stored, strict=True)]
            same += sum(best for _, best in mine)
            tokens += len(said)
        result["lengths"][length] = {
            "n": min(per_length, len(replies[::step])), "tokens": tokens, "same_argmax": same / max(tokens, 1),
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


def wait_for(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while not server.healthy():
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise ServedBuildError(f"the server did not get ready; its log ends:\n{server.tail()}")
        time.sleep(1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="patchsets/recipes/closed-world.toml")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 1792, 4096, 8192])
    parser.add_argument("--per-length", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=31900)
    parser.add_argument("--run", type=Path, help="a run folder whose stored replies are compared; nothing is served")
    parser.add_argument("--build", default="base", help="of that run")
    parser.add_argument("--running", action="store_true", help="a server is up at --port already")
    parser.add_argument("--work", type=Path, default=Path("results/runs/agree-v32"), help="a new folder for its tree")
    options = parser.parse_args(argv)
    try:
        if options.run is not None:
            result = told_of_tokens(options.run, options.build, options.model, options.lengths, options.per_length)
        else:
            result = agree(options)
    except (ValueError, ServedBuildError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
