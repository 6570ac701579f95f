"""What of a training and its campaign is committed: recipe, log, hashes and results, never weights.

    make v32-publish PYTHON=python3
    python -m longrecall.runners.deepseek_v32.publish --model MODEL --log state/log.jsonl --run RUN \
        --agreement agreement.json --evidence evidence.json --out results/published/sglang-v32

Copies the reports (the model's path becomes MODEL), config, hashes, training log, agreement and evidence into one
folder, and writes beside_base.json: for each build and length, how many replies equal base's in their text and in every
log-probability, and how far the first token's lies from base's.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longrecall.needles.whole_file import write_text
from longrecall.results.run_folder import REPLAYS, load_replays

BASE = "base"


def beside_base(run: Path) -> dict[str, dict[str, Any]]:
    """By "build/rung", in the order of the replies' builds."""
    base, others = {}, {}
    for reply in load_replays(run):
        place = (reply.conversation_id, reply.probe_id, reply.rung, reply.arm, reply.repeat)
        if reply.build_id == BASE:
            base[place] = reply.response
        else:
            others[reply.build_id, place] = reply.response
    found: dict[str, dict[str, Any]] = {}
    for build, rung in sorted({(build, place[2]) for build, place in others}, key=lambda pair: (pair[0], pair[1])):
        pairs = [
            (base[place], said)
            for (who, place), said in others.items()
            if (who, place[2]) == (build, rung) and place in base and said.text is not None
        ]
        first = [
            abs(said.token_logprobs[0] - own.token_logprobs[0])
            for own, said in pairs
            if said.token_logprobs and own.token_logprobs
        ]
        found[f"{build}/{rung}"] = {
            "replies": len(pairs),
            "same_text": sum(own.text == said.text for own, said in pairs),
            "same_logprobs": sum(own.token_logprobs == said.token_logprobs for own, said in pairs),
            "first_token_median": float(np.median(first)) if first else None,
            "first_token_p95": float(np.quantile(first, 0.95)) if first else None,
            "first_token_max": max(first, default=None),
        }
    return found


def publish(model: Path, log: Path, run: Path, agreement: Path, evidence: Path, out: Path) -> list[str]:
    """Names of the files written.

    Raises:
        ValueError: one to be copied cannot be read, is partial, or is of other weights than the model's; nothing is
            written then.
    """
    texts = {
        "config.json": model / "config.json", "hashes.json": model / "hashes.json", "training.jsonl": log,
        "report.json": run / "report.json", "report.md": run / "report.md", "agreement.json": agreement,
        "evidence.json": evidence,
    }  # fmt: skip
    found = {}
    for name, path in texts.items():
        try:
            found[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as problem:
            raise ValueError(f"{path}: no text: {problem}") from None
    told = {name: _table(texts[name], text) for name, text in found.items() if name.endswith(".json")}
    report, agreed = told["report.json"], told["agreement.json"]
    if _value(report, texts["report.json"], "partial"):
        raise ValueError(f"{run}: the campaign is not finished; run it again, it goes on")
    asked, planned = (_value(agreed, agreement, key) for key in ("asked", "planned"))
    if asked != planned:
        raise ValueError(f"{agreement}: {asked} of {planned} prompts; run the agreement again, it goes on")
    served = _value(report, texts["report.json"], "builds", 0, "manifest", "server_info", "model_path")
    weights = told["hashes.json"].get("model.safetensors")
    manifest = report["builds"][0]["manifest"]
    for path, of in ((agreement, agreed.get("weights")), (texts["report.json"], manifest.get("weights_hash"))):
        if of is not None and of != weights:
            raise ValueError(f"{path}: of weights {str(of)[:12]}, where {model} holds {str(weights)[:12]}")
    beside = beside_base(run)
    if not beside:
        raise ValueError(f"{run / REPLAYS}: no replies of {BASE} and of another build to the same questions")
    for name in ("report.json", "report.md"):
        found[name] = found[name].replace(served, "MODEL")
    found["beside_base.json"] = json.dumps(beside, indent=1) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        write_text(out / name, text)
    return sorted(found)


def _table(path: Path, text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except ValueError as problem:
        raise ValueError(f"{path}: no JSON: {problem}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: no JSON object")
    return table


def _value(table: dict[str, Any], path: Path, *keys: str | int) -> Any:
    value: Any = table
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{path}: no {'.'.join(map(str, keys))} in it") from None
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, told in (
        ("model", "the exported folder"), ("log", "the training's log.jsonl"), ("run", "the campaign's run folder"),
        ("agreement", "of `agree`"), ("evidence", "of `evidence`"), ("out", "folder to write"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=Path, required=True, help=told)
    options = parser.parse_args(argv)
    try:
        written = publish(**vars(options))
    except (ValueError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    print(json.dumps({"out": str(options.out), "written": written}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
