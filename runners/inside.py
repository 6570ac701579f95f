"""A look inside served builds while they are up: prefill against decode, first tokens, selections, routed experts.

    longrecall eval patchsets/x.toml --inside 2       # two conversations, one question of each length

Of every build that speaks SGLang's /generate, the same prompts are asked as token ids: an answer with its
log-probabilities, then prompt and answer once more as a prompt, without anything from the cache. The same tokens,
computed by decode and by prefill: k3 = mean(exp(d) - 1 - d), d = prefill - decode, is about the KL of the two
(python/sglang/test/kl_multiturn_utils.py). Where a server returns the indexer's selection or the routed experts, they
are kept for some rows of the prompt on both sides of the onset and for every generated token.

    inside/<build>/<conversation>-<rung>.npz    arrays, compressed
    inside.json                                 what they say, build against base and base against itself
    inside-evidence.json                        the same as observations, which attribution and report read
"""

import asyncio
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai

from longrecall.needles.schema import Ask, Conversation
from longrecall.runners.client import Endpoint
from longrecall.runners.divergence import Ints, decode_topk, overlap, rows_to_keep
from longrecall.runners.prompts import Prompts

FOLDER, SUMMARY, EVIDENCE = "inside", "inside.json", "inside-evidence.json"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of the served model decides the shape of what comes back; None: it has none of it, or none is returned."""

    index_topk: int | None
    experts_per_token: int | None
    onset: int

    @classmethod
    def of(cls, model_folder: Path, info: Mapping[str, object] | None, onset: int | None) -> "Shape":
        """From the model's config.json, or what the server says of itself."""
        try:
            config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = {}
        told = {**config, **(info or {})}

        def number(name: str) -> int | None:
            value = told.get(name)
            return value if isinstance(value, int) and value > 0 else None

        topk = number("index_topk")
        return cls(index_topk=topk, experts_per_token=number("num_experts_per_tok"), onset=onset or topk or 2**31)


async def look(endpoint: Endpoint, ids: Sequence[int], tokens: int, shape: Shape) -> dict[str, Any]:
    """Arrays of one prompt: out, decode, prefill (log-probabilities of out), rows_*, topk_*, experts_*.

    Raises:
        ValueError, LookupError, TypeError, openai.OpenAIError, TimeoutError: the server does not answer as SGLang does.
    """
    asked = {
        "input_ids": list(ids), "sampling_params": {"temperature": 0, "max_new_tokens": tokens},
        "return_logprob": True, "logprob_start_len": len(ids) - 1,
    }  # fmt: skip
    wanted = {
        name: True
        for name, value in (
            ("return_indexer_topk", shape.index_topk),
            ("return_routed_experts", shape.experts_per_token),
        )
        if value is not None and name in endpoint.returns
    }
    said = await _post(endpoint, asked | wanted)
    meta, out = said["meta_info"], [int(token) for token in said["output_ids"]]
    decode = [float(entry[0]) for entry in meta["output_token_logprobs"]]
    again = await _post(
        endpoint,
        asked
        | {
            "input_ids": [*ids, *out], "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "cache_salt": f"inside-{endpoint.build_id}",
        },
    )  # fmt: skip
    entries = again["meta_info"]["input_token_logprobs"][-len(out) :]
    if [entry[1] for entry in entries] != out or len(decode) != len(out):
        raise ValueError("the log-probabilities that came back are of other tokens")
    arrays: dict[str, Any] = {
        "out": np.array(out, dtype=np.int32),
        "decode": np.array(decode, dtype=np.float32),
        "prefill": np.array([float(entry[0]) for entry in entries], dtype=np.float32),
    }
    num_rows = len(ids) + len(out) - 1
    for where, rows in rows_to_keep(len(ids), num_rows, shape.onset, 0).items():
        arrays[f"rows_{where}"] = np.array(rows, dtype=np.int32)
        if "indexer_topk" in meta and shape.index_topk is not None:
            arrays[f"topk_{where}"] = decode_topk(meta["indexer_topk"], shape.index_topk, num_rows)[rows]
        if "routed_experts" in meta and shape.experts_per_token is not None:
            arrays[f"experts_{where}"] = decode_topk(meta["routed_experts"], shape.experts_per_token, num_rows)[rows]
    return arrays


async def _post(endpoint: Endpoint, body: Mapping[str, Any]) -> Any:
    async with asyncio.timeout(endpoint.timeout_s):
        return json.loads(await endpoint.client.post(f"{endpoint.root}/generate", cast_to=bytes, body=dict(body)))


def examples(conversations: Sequence[Conversation], count: int) -> list[tuple[Conversation, Ask]]:
    """The prompts looked at: the first question of each length of the first conversations."""
    return [
        (conversation, next(ask for ask in conversation.asks if ask.rung == rung))
        for conversation in conversations[:count]
        for rung in sorted({ask.rung for ask in conversation.asks})
    ]


async def look_inside(
    endpoint: Endpoint,
    prompts: Prompts,
    conversations: Sequence[Conversation],
    count: int,
    run_dir: Path,
    shape: Shape,
    tokens: int,
) -> str | None:
    """Look at one build, prompt after prompt; what is on the disk already is not asked again.

    Returns what went wrong, None when nothing did.
    """
    assert prompts.encode is not None
    folder = run_dir / FOLDER / endpoint.build_id
    folder.mkdir(parents=True, exist_ok=True)
    for conversation, ask in examples(conversations, count):
        path = folder / f"{conversation.conversation_id}-{ask.rung}.npz"
        if path.is_file():
            continue
        ids = prompts.encode(prompts.messages(conversation, ask, "warm"))
        try:
            arrays = await look(endpoint, ids, tokens, shape)
        except (ValueError, LookupError, TypeError, TimeoutError, openai.OpenAIError) as problem:
            return f"{type(problem).__name__}: {problem}"[:300]
        part = path.with_suffix(".part")
        with part.open("wb") as stream:
            np.savez_compressed(stream, **arrays)
        os.replace(part, path)
    return None


def prefill_decode(arrays: Mapping[str, Any]) -> float:
    """k3 estimate, in nats, of the KL between decode and prefill over the generated tokens."""
    d = arrays["prefill"].astype(np.float64) - arrays["decode"].astype(np.float64)
    return float(np.mean(np.exp(d) - 1 - d))


def summarise(run_dir: Path, builds: Sequence[str], base: str, again: str, onset: int | None) -> dict[str, Any]:
    """What the stored arrays say: {build: {rung: …}}, values of single prompts as lists."""
    result: dict[str, Any] = {}
    for build in builds:
        rungs: dict[str, dict[str, list[Any]]] = {}
        for path in sorted((run_dir / FOLDER / build).glob("*.npz")):
            ours = dict(np.load(path))
            said = rungs.setdefault(path.stem.rpartition("-")[2], {"prefill_decode_nats": []})
            said["prefill_decode_nats"].append(prefill_decode(ours))
            other = run_dir / FOLDER / base / path.name
            if build != base and other.is_file():
                theirs = dict(np.load(other))
                said.setdefault("first_token_shift_nats", []).append(_first_shift(theirs, ours))
                for what in ("topk", "experts"):
                    for where in ("below", "above"):
                        kept = _kept(theirs, ours, what, where)
                        if kept is not None:
                            said.setdefault(f"{what}_kept_{where}", []).append(kept)
        result[build] = rungs
    return {"base": base, "again": again, "onset_tokens": onset, "builds": result}


def _first_shift(base: Mapping[str, Any], build: Mapping[str, Any]) -> float | None:
    """Change of the first token's log-probability, where both generated the same one."""
    if not len(base["out"]) or not len(build["out"]) or base["out"][0] != build["out"][0]:
        return None
    return float(build["decode"][0] - base["decode"][0])


def _kept(base: Mapping[str, Any], build: Mapping[str, Any], what: str, where: str) -> list[float] | None:
    """By layer: the share of base's selection (or experts) that the build has too."""
    a, b = base.get(f"{what}_{where}"), build.get(f"{what}_{where}")
    if a is None or b is None or not len(a) or a.shape != b.shape:
        return None
    return [
        float(np.mean([overlap(x[layer], y[layer]) for x, y in zip(a, b, strict=True)])) for layer in range(a.shape[1])
    ]


def observations(run_dir: Path, summary: Mapping[str, Any], shape: Shape) -> list[dict[str, Any]]:
    """What the look says of each patch in the words of attribution: shares lost beyond what base against itself loses.

    decode_kl: nats between prefill and decode beyond the base's on the same prompts, 1 at most. selection_chance is 1
    where the selection beyond the onset is no better than chance, as independent draws of index_topk among the visible
    positions are.
    """
    made = []
    again = summary["builds"].get(summary["again"], {})
    for build, rungs in summary["builds"].items():
        if build in (summary["base"], summary["again"]):
            continue
        for what, feature in (("topk", "selection_chance"), ("experts", "experts_changed")):
            shares = []
            for rung, said in rungs.items():
                floor = _lost(again.get(rung, {}), what)
                room = 1.0 - (_chance(run_dir, build, rung, shape) if what == "topk" else 0.0)
                shares += [(lost - floor[0]) / room for lost in _lost(said, what) if floor and room > 0]
            if shares:
                spread = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.05
                made.append(
                    {"patch": build, "feature": feature, "estimate": statistics.mean(shares), "stderr": spread,
                     "n": len(shares), "source": "served", "detail": "beyond the onset, less base against base again"}
                )  # fmt: skip
        of_base = summary["builds"].get(summary["base"], {})
        excess = [
            min(max(own - base, 0.0), 1.0)
            for rung, said in rungs.items()
            for own, base in zip(
                said["prefill_decode_nats"], of_base.get(rung, {}).get("prefill_decode_nats", ()), strict=False
            )
        ]
        if excess:
            spread = statistics.stdev(excess) / len(excess) ** 0.5 if len(excess) > 1 else 0.05
            detail = "nats between prefill and decode of the same answer, beyond the base's"
            made.append(
                {"patch": build, "feature": "decode_kl", "estimate": statistics.mean(excess),
                 "stderr": max(spread, 0.01), "n": len(excess), "source": "served", "detail": detail}
            )  # fmt: skip
    return made


def _lost(said: Mapping[str, Any], what: str) -> list[float]:
    return [1.0 - statistics.mean(layers) for layers in said.get(f"{what}_kept_above", [])]


def _chance(run_dir: Path, build: str, rung: str, shape: Shape) -> float:
    """Overlap of two independent selections over the rows kept beyond the onset."""
    rows: list[Ints] = [np.load(path)["rows_above"] for path in (run_dir / FOLDER / build).glob(f"*-{rung}.npz")]
    seen = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)
    if shape.index_topk is None or not len(seen):
        return 1.0
    return float(np.mean(np.minimum(1.0, shape.index_topk / (seen + 1.0))))
