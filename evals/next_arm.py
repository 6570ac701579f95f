"""The next arm as a patchset that `longrecall eval` can serve: base and patch, each under one intervention."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import StrictInt, TypeAdapter, ValidationError

from longrecall.evals.attribute import AGAIN, ARMS, REPAIRS
from longrecall.evals.causes import IN_PROCESS
from longrecall.evals.schema import NextArm
from longrecall.evals.scores_file import ScoresError
from longrecall.needles.whole_file import write_text

RESIDUES = 4
"""Neighbouring prompt lengths of the residue arm: every residue modulo 4, and as many places in a page or chunk."""


@dataclass(frozen=True, kw_only=True)
class ArmSettings:
    """What is set to serve a build under one intervention; values in braces are filled in by `_values`."""

    args: tuple[str, ...] = ()
    override: tuple[tuple[str, str], ...] = ()
    """Keys of the model's configuration and their values, as JSON."""
    changes: tuple[str, ...] = ()


_REFERENCE_FACTOR = ("--json-model-override-args", '{{"routed_scaling_factor": {factor}}}')
ARM_SETTINGS: dict[str, dict[str, ArmSettings]] = {
    "reference": {
        "topk-x2": ArmSettings(args=("--index-topk", "{topk_all}"), changes=("index_topk",)),
        "scaling-1": ArmSettings(args=_REFERENCE_FACTOR, changes=("routed_scaling_factor",)),
        "scaling-sqrt": ArmSettings(args=_REFERENCE_FACTOR, changes=("routed_scaling_factor",)),
        "scaling-squared": ArmSettings(args=_REFERENCE_FACTOR, changes=("routed_scaling_factor",)),
        "decode-backend": ArmSettings(args=("--decode-backend", "dense")),
        "cache-off": ArmSettings(args=("--disable-radix-cache",)),
        "chunk": ArmSettings(args=("--chunked-prefill-size", "32768")),
    },
    "sglang": {
        "topk-x2": ArmSettings(override=(("index_topk", "{topk_x2}"),), changes=("index_topk",)),
        "scaling-1": ArmSettings(override=(("routed_scaling_factor", "{factor}"),)),
        "scaling-sqrt": ArmSettings(override=(("routed_scaling_factor", "{factor}"),)),
        "scaling-squared": ArmSettings(override=(("routed_scaling_factor", "{factor}"),)),
        "decode-backend": ArmSettings(
            args=("--dsa-decode-backend", "flashmla_sparse"), changes=("dsa_decode_backend",)
        ),
        "cache-off": ArmSettings(args=("--disable-radix-cache",)),
        "chunk": ArmSettings(args=("--chunked-prefill-size", "32768")),
    },
}
"""Arms that are missing cannot be served by flags alone. The reference build's indexer takes any k, so its doubling is
repeated until selection is the identity at every rung; SGLang's kernels are compiled for 512, 1024 and 2048."""


SEEN_BY_HAND = {"indexer_topk_changed", "selection_chance", "experts_changed", "decode_kl"}
"""Features that a server tells when asked for them; given as observations (`make h200` measures them on SGLang)."""


SGLANG_TOPK = 2048
"""The largest selection that SGLang's kernels are compiled for, as V3.2's is already."""


def unavailable(run: Path) -> set[str]:
    """Features that the command line of the run's engine cannot give; they can still be supplied as observations."""
    try:
        campaign = _campaign(run)
    except ScoresError:
        campaign, engine = {}, "unknown"
    else:
        engine = campaign["patchset"]["engine"]
    given = {ARMS[arm] for arm in ARM_SETTINGS.get(engine, {})}
    given |= ASKED_OTHERWISE
    if engine == "sglang" and 2 * _index_topk(campaign) > SGLANG_TOPK:
        given.discard(ARMS["topk-x2"])
    return (set(ARMS.values()) - given) | (set() if engine == "reference" else set(IN_PROCESS)) | SEEN_BY_HAND


def suffixes_of(feature: str, engine: str) -> tuple[str, ...]:
    """The arms of a feature that this engine can be served under."""
    if feature == "unrepeatable":
        return (AGAIN,)
    return tuple(s for s, f in ARMS.items() if f == feature and s in ARM_SETTINGS.get(engine, {}))


def write_next_patchset(run: Path, patch: str, arm: NextArm, path: Path) -> None:
    """Write the patchset of one arm.

    Raises ScoresError when the run does not know the patch or the engine has no flag for the arm.
    """
    if arm.feature in ASKED_OTHERWISE:
        write_arms(run, [(patch, "")], path, name=arm.feature, comment=arm.question)
        return
    campaign = _campaign(run)
    engine = campaign["patchset"]["engine"]
    suffixes = suffixes_of(arm.feature, engine)
    if _factor(campaign) is None:
        suffixes = tuple(s for s in suffixes if s not in REPAIRS)
    if not suffixes:
        if arm.feature in ARMS.values():
            raise ScoresError(f"engine {engine!r} has no flag for it: {arm.how}")
        raise ScoresError(f"{arm.feature} is measured in-process or by hand: {arm.how}")
    wanted = [(patch, suffix) for suffix in suffixes]
    wanted += [("base", suffix) for suffix in suffixes if suffix != AGAIN and suffix not in REPAIRS]
    write_arms(run, wanted, path, name=suffixes[0], comment=arm.question)


ASKED_OTHERWISE = frozenset({"residue", "concat_recovers"})
"""Features for which the builds stay as they are and the questions change: `next_rungs`, `next_client_arms`."""


def next_client_arms(feature: str) -> tuple[str, ...]:
    """The client's arms an arm of attribution is asked in."""
    return ("warm", "concat") if feature == "concat_recovers" else ("warm",)


def next_rungs(feature: str, rungs: Sequence[int]) -> tuple[int, ...]:
    """The rungs an arm is asked at: those of the run, or neighbouring lengths at its longest."""
    return tuple(rungs[-1] - i for i in reversed(range(RESIDUES))) if feature == "residue" else tuple(rungs)


def write_arms(run: Path, wanted: Sequence[tuple[str, str]], path: Path, *, name: str, comment: str) -> None:
    """Write a patchset of (patch or "base", arm) pairs of a stored run; the arm "" is the patch as it is.

    The patches themselves are not served again: their answers to the same questions are in the run.
    """
    campaign = _campaign(run)
    patchset: dict[str, Any] = campaign["patchset"]
    patches = {p["patch_id"]: p for p in patchset["patches"]}
    engine, onset, rungs = patchset["engine"], campaign.get("onset_tokens"), campaign["rungs"]
    folder = Path(patchset["path"]).parent
    title = f"{patchset['name']}-{name}"[:100]
    lines = [
        f"# {comment}",
        f"name = {json.dumps(title)}",
        f"engine = {json.dumps(engine)}",
    ]
    for key in ("source", "python", "margin"):
        if patchset.get(key) is not None:
            lines.append(f"{key} = {json.dumps(patchset[key])}")
    if onset:
        lines.append(f"onset_tokens = {onset}")
    if patchset.get("args"):
        lines.append(f"args = {json.dumps(list(patchset['args']))}")
    lines += _table_line("env", patchset.get("env") or {}) + _table_line(
        "model_override", patchset.get("model_override") or {}
    )
    for patch_id, suffix in wanted:
        if patch_id != "base" and patch_id not in patches:
            raise ScoresError(f"{run / 'campaign.json'}: no patch {patch_id!r}; it has {', '.join(patches)}")
        settings = ArmSettings() if suffix in ("", AGAIN) else ARM_SETTINGS[engine][suffix]
        values = _values(run, campaign, suffix, onset, rungs)
        source: dict[str, Any] = {} if patch_id == "base" else patches[patch_id]
        build_id = f"{patch_id}--{suffix}" if suffix else patch_id
        lines += ["", "[[patch]]", f"id = {json.dumps(build_id)}"]
        lines.append(f"title = {json.dumps(f'{patch_id} under {suffix}' if suffix else source.get('title', ''))}")
        diffs = [os.path.relpath(folder / d, path.parent) for d in source.get("diffs") or ()]
        if diffs:
            lines.append(f"diffs = {json.dumps(diffs)}")
        args = [*(source.get("args") or ()), *(a.format(**values) for a in settings.args)]
        if args:
            lines.append(f"args = {json.dumps(args)}")
        lines += _table_line("env", source.get("env") or {})
        override = dict(source.get("model_override") or {})
        override |= {key: json.loads(value.format(**values)) for key, value in settings.override}
        lines += _table_line("model_override", override)
        for key in ("build_command", "source_patcher"):
            if source.get(key):
                value = source[key]
                lines.append(f"{key} = {json.dumps(list(value) if not isinstance(value, str) else value)}")
        changes = [*(source.get("changes") or ()), *settings.changes]
        if changes:
            lines.append(f"changes = {json.dumps(sorted(set(changes)))}")
    write_text(path, "\n".join(lines) + "\n")


@dataclass(frozen=True, kw_only=True)
class _Patch:
    patch_id: str
    diffs: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    model_override: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _PatchSet:
    engine: str
    path: str
    patches: tuple[_Patch, ...]
    args: tuple[str, ...] = ()
    env: dict[str, str] | None = None
    model_override: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    server_info: Any = None


@dataclass(frozen=True, kw_only=True)
class _Build:
    manifest: _Manifest | None = None


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """What is checked by type of a campaign; the rest is ignored."""

    patchset: _PatchSet
    rungs: tuple[StrictInt, ...]
    builds: tuple[_Build, ...] = ()
    onset_tokens: StrictInt | None = None
    max_tokens: StrictInt | None = None


_ADAPTER = TypeAdapter(_Checked)


def _campaign(run: Path) -> dict[str, Any]:
    path = run / "campaign.json"
    try:
        campaign: dict[str, Any] = json.loads(path.read_bytes())
        _ADAPTER.validate_python(campaign)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "it"
        raise ScoresError(
            f"{path}: no patchset in it that can be served: {place}: {fault['msg']} (got {str(fault['input'])[:80]!r})"
        ) from None
    except (OSError, ValueError) as error:
        raise ScoresError(f"{path}: no patchset in it ({error})") from None
    return campaign


def _values(
    run: Path, campaign: dict[str, Any], suffix: str, onset: int | None, rungs: Sequence[int]
) -> dict[str, float | int]:
    """What the settings of an arm name in braces."""
    if suffix == "topk-x2":
        if not onset:
            raise ScoresError(f"{run / 'campaign.json'}: onset_tokens is not known, so index_topk cannot be doubled")
        topk = _index_topk(campaign)
        if campaign["patchset"]["engine"] == "sglang" and 2 * topk > SGLANG_TOPK:
            raise ScoresError(f"{run / 'campaign.json'}: index_topk is {topk}; SGLang selects {SGLANG_TOPK} at most")
        room = max(rungs) + int(campaign.get("max_tokens") or 0)
        return {"topk_x2": 2 * topk, "topk_all": onset * 2 ** max(1, math.ceil(math.log2(room / onset)))}
    if suffix == "scaling-1":
        return {"factor": 1.0}
    if suffix in REPAIRS:
        factor = _factor(campaign)
        if factor is None:
            raise ScoresError(f"{run / 'campaign.json'}: no server told its routed_scaling_factor, needed for {suffix}")
        return {"factor": round(math.sqrt(factor) if suffix == "scaling-sqrt" else factor**2, 6)}
    return {}


def _factor(campaign: dict[str, Any]) -> float | None:
    return _told(campaign, "routed_scaling_factor")


def _index_topk(campaign: dict[str, Any]) -> int:
    """Entries selected for a query. An entry of V4 stands for four tokens, so the onset is only the next best guess."""
    return int(_told(campaign, "index_topk") or campaign.get("onset_tokens") or 0)


def _told(campaign: dict[str, Any], key: str) -> float | None:
    """A number above 0 of the model's configuration: of the patchset, else of base's server, else of config.json."""
    base: dict[str, Any] = next(iter(campaign.get("builds", ())), {})
    info = (base.get("manifest") or {}).get("server_info") or {}
    folder = campaign.get("model_folder") or info.get("model_path")
    told: list[Any] = [_config(folder), info, campaign["patchset"].get("model_override") or {}]
    while told:
        table = told.pop()
        if isinstance(table, dict):
            value = table.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
                return float(value)
            told += table.values()
    return None


def _config(folder: Any) -> Any:
    try:
        return json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return {}


def _table_line(key: str, table: dict[str, Any]) -> list[str]:
    pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table.items())
    return [f"{key} = {{ {pairs} }}"] if pairs else []
