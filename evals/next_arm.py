"""The next arm as a patchset that `longrecall eval` can serve: base and patch, each under one intervention."""

import json
import os
from pathlib import Path
from typing import Any

from longrecall.evals.attribute import AGAIN, ARMS
from longrecall.evals.schema import NextArm
from longrecall.evals.scores_file import ScoresError

ARM_ARGS: dict[str, dict[str, tuple[str, ...]]] = {
    "reference": {
        "topk-x2": ("--index-topk", "{topk_x2}"),
        "cache-off": ("--disable-radix-cache",),
        "chunk": ("--chunked-prefill-size", "256"),
    },
    "sglang": {
        "topk-x2": ("--json-model-override-args", '{{"index_topk": {topk_x2}}}'),
        "cache-off": ("--disable-radix-cache",),
        "chunk": ("--chunked-prefill-size", "2048"),
    },
}
"""Launch arguments of each intervention, by engine. Arms that are missing cannot be served by flags alone."""


def unavailable(engine: str) -> set[str]:
    """Features that this engine's command line cannot give; they can still be supplied as observations."""
    given = {ARMS[arm] for arm in ARM_ARGS.get(engine, {})}
    return (set(ARMS.values()) - given) | {
        "residue",
        "indexer_topk_changed",
        "selection_chance",
        "experts_changed",
        "decode_kl",
    }


def write_next_patchset(run: Path, patch: str, arm: NextArm, path: Path) -> None:
    """Write the patchset of one arm, with the run's own base, patch and positive control.

    Raises ScoresError when the run does not know the patch or the engine has no flag for the arm.
    """
    campaign = run / "campaign.json"
    try:
        patchset: dict[str, Any] = json.loads(campaign.read_bytes())["patchset"]
        patches = {p["patch_id"]: p for p in patchset["patches"]}
        folder = Path(patchset["path"]).parent
        engine, onset = patchset["engine"], json.loads(campaign.read_bytes()).get("onset_tokens")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ScoresError(f"{campaign}: no patchset in it ({error})") from None
    if patch not in patches:
        raise ScoresError(f"{campaign}: no patch {patch!r}; it has {', '.join(patches)}")
    suffix = next((s for s, feature in ARMS.items() if feature == arm.feature), AGAIN)
    if suffix == AGAIN and arm.feature != "unrepeatable":
        raise ScoresError(f"{arm.feature} is measured in-process or by hand: {arm.how}")
    template = ARM_ARGS.get(engine, {}).get(suffix, ()) if suffix != AGAIN else ()
    if suffix != AGAIN and not template:
        raise ScoresError(f"engine {engine!r} has no flag for {suffix}: {arm.how}")
    if "topk" in suffix and not onset:
        raise ScoresError(f"{campaign}: onset_tokens is not known, so index_topk cannot be doubled")
    args = tuple(a.format(topk_x2=2 * int(onset or 0)) for a in template)

    def entry(patch_id: str, source: dict[str, Any] | None, extra: tuple[str, ...], title: str) -> list[str]:
        made = ["", "[[patch]]", f"id = {json.dumps(patch_id)}", f"title = {json.dumps(title)}"]
        if source is not None:
            if source.get("role", "suspect") != "suspect" and not extra:
                made.append(f"role = {json.dumps(source['role'])}")
            diffs = [os.path.relpath(folder / d, path.parent) for d in source.get("diffs", ())]
            if diffs:
                made.append(f"diffs = {json.dumps(diffs)}")
            if source.get("env"):
                pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in source["env"].items())
                made.append(f"env = {{ {pairs} }}")
        arguments = [*(source.get("args", ()) if source else ()), *extra]
        if arguments:
            made.append(f"args = {json.dumps(arguments)}")
        if source is not None and source.get("changes"):
            made.append(f"changes = {json.dumps(list(source['changes']))}")
        return made

    lines = [
        f"# {arm.question}",
        f"name = {json.dumps(str(patchset['name']) + '-' + suffix)}",
        f"engine = {json.dumps(engine)}",
    ]
    if patchset.get("margin") is not None:
        lines.append(f"margin = {patchset['margin']}")
    if onset:
        lines.append(f"onset_tokens = {onset}")
    if patchset.get("args"):
        lines.append(f"args = {json.dumps(list(patchset['args']))}")
    if patchset.get("env"):
        pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in patchset["env"].items())
        lines.append(f"env = {{ {pairs} }}")
    lines += entry(patch, patches[patch], (), patches[patch].get("title", ""))
    lines += entry(f"{patch}--{suffix}", patches[patch], args, f"{patch} under {suffix}")
    if suffix != AGAIN:
        lines += entry(f"base--{suffix}", None, args, f"base under {suffix}")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(temporary, path)
