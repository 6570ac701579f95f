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
from longrecall.results.run_folder import load_replays

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
    """Names of the files written; nothing is written where one to be copied is missing or says that it is partial."""
    texts = {
        "config.json": model / "config.json", "hashes.json": model / "hashes.json", "training.jsonl": log,
        "report.json": run / "report.json", "report.md": run / "report.md", "agreement.json": agreement,
        "evidence.json": evidence,
    }  # fmt: skip
    found = {name: path.read_text(encoding="utf-8") for name, path in texts.items()}
    report, agreed = json.loads(found["report.json"]), json.loads(found["agreement.json"])
    if report["partial"]:
        raise ValueError(f"{run}: the campaign is not finished; run it again, it goes on")
    if agreed["asked"] != agreed["planned"]:
        raise ValueError(
            f"{agreement}: {agreed['asked']} of {agreed['planned']} prompts; run the agreement again, it goes on"
        )
    served = report["builds"][0]["manifest"]["server_info"]["model_path"]
    for name in ("report.json", "report.md"):
        found[name] = found[name].replace(served, "MODEL")
    found["beside_base.json"] = json.dumps(beside_base(run), indent=1) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        write_text(out / name, text)
    return sorted(found)


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
    except (ValueError, KeyError, OSError) as problem:
        print(f"longrecall: error: {problem}", file=sys.stderr)
        return 2
    print(json.dumps({"out": str(options.out), "written": written}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
