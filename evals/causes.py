"""Known causes of lost recall in a served DeepSeek-style model, each with the signature it must show.

Top-k selection is the identity up to the onset, so nothing that acts through the index keys can act there; the routed
scaling factor acts at every length. From that and the table of public bugs (docs/statistics.md lists them) each cause
predicts a level for each feature; a feature it says nothing about is left open. Levels are densities over the share
of recall lost (or recovered, or changed), not verdicts: `attribute.py` weighs them against what was measured.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

Level = Literal["none", "small", "some", "large", "any"]

LEVELS: dict[Level, tuple[float, float]] = {
    "none": (-0.015, 0.015),
    "small": (0.0, 0.15),
    "some": (0.04, 1.0),
    "large": (0.35, 1.05),
    "any": (-0.1, 1.1),
}
"""Each level spreads its probability evenly over this range of true values; "any" gives half of it to "none".

A cause that says nothing of a feature mostly leaves it as it is: were exactly nothing as unlikely as any other value, a
cause would be held to lose against each that happens to predict "none"."""


def level_log_density(level: Level, estimate: float, stderr: float) -> float:
    """log density of an estimate with normal error when the true value is spread over the level's range."""
    if level == "any":
        nothing, anything = level_log_density("none", estimate, stderr), _even_log_density("any", estimate, stderr)
        return float(np.logaddexp(nothing, anything)) - math.log(2)
    return _even_log_density(level, estimate, stderr)


def _even_log_density(level: Level, estimate: float, stderr: float) -> float:
    low, high = LEVELS[level]
    error = max(stderr, 0.004)  # nothing served is known more exactly than a few replies in a thousand
    upper, lower = (high - estimate) / error, (low - estimate) / error
    if lower > 0:  # compute in the tail that keeps its digits
        upper, lower = -lower, -upper
    below = float(special.log_ndtr(upper))
    log_mass = below + math.log1p(-math.exp(min(float(special.log_ndtr(lower)) - below, -1e-12)))
    return max(log_mass, -1e3) - math.log(high - low)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that can be measured about a patch."""

    name: str
    question: str
    how: str
    cost: float
    """Builds served at one rung with the prefix cache on; 0: every campaign has it, in-process: a little."""


FEATURES: dict[str, Feature] = {
    f.name: f
    for f in (
        Feature(
            name="short",
            question="Is recall lost where top-k selection is the identity?",
            how="rungs at or below the onset",
            cost=0.0,
        ),
        Feature(name="long", question="Is recall lost beyond the onset?", how="rungs beyond the onset", cost=0.0),
        Feature(
            name="growth",
            question="Does the loss grow from below the onset to beyond it?",
            how="the same facts asked on both sides of the onset",
            cost=0.0,
        ),
        Feature(
            name="topk_recovers",
            question="Does recall come back when index_topk is doubled, so that selection is the identity further out?",
            how="serve base and patch with index_topk doubled; ask a rung between the old and the new onset",
            cost=2.0,
        ),
        Feature(
            name="scaling_recovers",
            question="Does the loss go when the routed scaling factor is overridden (1: no power matters; √f: 2x)?",
            how="serve base and patch with routed_scaling_factor set to 1, the patch also with √f and f²",
            cost=2.0,
        ),
        Feature(
            name="decode_recovers",
            question="Does recall come back with another decode backend?",
            how="serve base and patch with the decode backend swapped, prefill unchanged",
            cost=2.0,
        ),
        Feature(
            name="cache_off_recovers",
            question="Does recall come back when no prefix is reused?",
            how="serve base and patch with the prefix cache disabled (arm cold)",
            cost=6.0,
        ),
        Feature(
            name="concat_recovers",
            question="Does recall come back when the same facts stand in one turn?",
            how="ask the concat twin of the conversations",
            cost=4.0,
        ),
        Feature(
            name="residue",
            question="Does the loss depend on the prompt length modulo 4, 64, 128 or the page?",
            how="ask the same probes at 4 neighbouring prompt lengths",
            cost=8.0,
        ),
        Feature(
            name="age",
            question="Does the loss grow with the requests that the server has answered?",
            how="conversations in a random order, the later half against the earlier",
            cost=0.0,
        ),
        Feature(
            name="reuse_changed",
            question="Does the build reuse more or fewer tokens from its prefix cache than the base?",
            how="cached_tokens of the same requests",
            cost=0.0,
        ),
        Feature(
            name="chunk_recovers",
            question="Does recall come back with another prefill chunk size?",
            how="serve base and patch with chunked_prefill_size changed",
            cost=2.0,
        ),
        Feature(
            name="unrepeatable",
            question="Do two runs of the patched build disagree more than two runs of the base?",
            how="serve the patched build twice",
            cost=1.0,
        ),
        Feature(
            name="indexer_topk_changed",
            question="Does the indexer select other entries?",
            how="return_indexer_topk on a few prompts, compared as sets",
            cost=0.3,
        ),
        Feature(
            name="selection_chance",
            question="Is the selection no better than chance?",
            how="return_indexer_topk: share of the healthy selection that is lost",
            cost=0.3,
        ),
        Feature(
            name="experts_changed",
            question="Do layers behind the hash layers route to other experts?",
            how="return_routed_experts on a few prompts",
            cost=0.3,
        ),
        Feature(
            name="decode_kl",
            question="Do log-probabilities of one text differ between prefill and decode?",
            how="score the base's answers by prefill and by decode on the patched build",
            cost=0.6,
        ),
        Feature(
            name="scale_exponent",
            question="Is the routed scaling factor applied another number of times than once?",
            how="in-process: exponent of the factor in the patched MoE's outputs on the base's activations",
            cost=0.3,
        ),
        Feature(
            name="mhc_shift",
            question="Do the hyper-connections mix otherwise on the same streams?",
            how="in-process: relative error of the patched mixing on the base's streams",
            cost=0.3,
        ),
        Feature(
            name="kv_shift",
            question="Are other attention keys and values stored for the same inputs?",
            how="in-process: relative error of the stored rows on the base's inputs",
            cost=0.3,
        ),
        Feature(
            name="selection_shift",
            question="Does the indexer select other entries for the same inputs?",
            how="in-process: share of the base's selection that is lost on the base's own inputs",
            cost=0.3,
        ),
        Feature(
            name="decode_shift",
            question="Does decode compute another distribution than prefill, on the same cache?",
            how="in-process: total variation between the two at the same positions, beyond the base's",
            cost=0.3,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One mechanism, and the level of every feature it has a say in."""

    name: str
    family: str
    title: str
    signature: dict[str, Level]


_INDEX = {
    "short": "none",
    "topk_recovers": "large",
    "scaling_recovers": "none",
    "decode_recovers": "none",
    "cache_off_recovers": "none",
    "concat_recovers": "none",
    "residue": "none",
    "chunk_recovers": "none",
    "indexer_topk_changed": "some",
    "decode_kl": "none",
    "age": "none",
    "reuse_changed": "none",
}
_SCALING = {
    "growth": "any",
    "topk_recovers": "none",
    "scaling_recovers": "large",
    "decode_recovers": "none",
    "cache_off_recovers": "none",
    "concat_recovers": "none",
    "residue": "none",
    "chunk_recovers": "none",
    "unrepeatable": "none",
    "selection_chance": "small",
    "decode_kl": "none",
    "experts_changed": "some",
    "age": "none",
    "reuse_changed": "none",
}
_SERVED_ALIKE: dict[str, str] = {
    "topk_recovers": "none",
    "scaling_recovers": "none",
    "decode_recovers": "none",
    "cache_off_recovers": "none",
    "chunk_recovers": "none",
    "age": "none",
    "reuse_changed": "none",
}
"""Of the causes that no intervention takes away."""


IN_PROCESS = ("scale_exponent", "mhc_shift", "kv_shift", "selection_shift", "decode_shift")
"""Features of a build's own parts on the base's activations: a fault shows in the part that it is in, in no other."""
_PARTS = dict.fromkeys(IN_PROCESS, "none")


def _cause(name: str, family: str, title: str, *parts: dict[str, str], **levels: str) -> Cause:
    merged: dict[str, Level] = {}
    for part in (_PARTS, *parts, levels):
        for feature, level in part.items():
            if feature not in FEATURES or level not in LEVELS:
                raise ValueError(f"cause {name}: {feature} = {level} is not a feature and a level")
            merged[feature] = level
    return Cause(name=name, family=family, title=title, signature=merged)


CAUSES: tuple[Cause, ...] = (
    _cause(
        "index-key-format",
        "index keys",
        "index keys stored in fewer bits (fp8, fp4)",
        _INDEX,
        long="some",
        growth="some",
        selection_chance="small",
        unrepeatable="none",
        selection_shift="some",
    ),
    _cause(
        "index-key-transform",
        "index keys",
        "index queries and keys no longer match (rotation, RoPE layout or scale on one side)",
        _INDEX,
        long="large",
        growth="large",
        indexer_topk_changed="large",
        selection_chance="large",
        unrepeatable="none",
        selection_shift="some",
    ),
    _cause(
        "topk-selection",
        "index keys",
        "top-k keeps the wrong entries (truncated bins, ties, stale pages)",
        _INDEX,
        long="some",
        growth="some",
        selection_chance="any",
        unrepeatable="some",
        selection_shift="some",
    ),
    _cause(
        "routed-scaling",
        "routed scaling",
        "routed scaling factor left out or applied twice in every MoE layer",
        _SCALING,
        short="large",
        long="large",
        scale_exponent="large",
    ),
    _cause(
        "routed-scaling-hash-layers",
        "routed scaling",
        "routed scaling factor wrong in the hash-routed layers only",
        _SCALING,
        short="some",
        long="some",
        scale_exponent="large",
    ),
    _cause(
        "mhc-precision",
        "MHC",
        "hyper-connections mixed in too few bits",
        _SERVED_ALIKE,
        short="small",
        long="small",
        growth="none",
        concat_recovers="none",
        residue="none",
        unrepeatable="none",
        selection_chance="small",
        decode_kl="none",
        mhc_shift="small",
    ),
    _cause(
        "mhc-broken",
        "MHC",
        "hyper-connections mix wrongly (Sinkhorn steps, gates or a far too coarse format)",
        _SERVED_ALIKE,
        short="some",
        long="some",
        growth="any",
        concat_recovers="none",
        residue="none",
        unrepeatable="none",
        decode_kl="none",
        mhc_shift="some",
    ),
    _cause(
        "decode-kernel",
        "decode kernel",
        "sparse decode computes something else than prefill (splits, merge, accumulation)",
        short="any",
        long="any",
        growth="any",
        topk_recovers="none",
        scaling_recovers="none",
        decode_recovers="large",
        cache_off_recovers="none",
        concat_recovers="none",
        residue="none",
        chunk_recovers="none",
        indexer_topk_changed="none",
        selection_chance="none",
        experts_changed="none",
        decode_kl="large",
        age="none",
        reuse_changed="none",
        decode_shift="some",
    ),
    _cause(
        "cache-reuse",
        "cache/transfer",
        "a reused or transferred prefix is stale, partial or another conversation's",
        short="any",
        long="some",
        growth="any",
        topk_recovers="none",
        scaling_recovers="none",
        decode_recovers="none",
        cache_off_recovers="large",
        chunk_recovers="none",
        decode_kl="none",
    ),
    _cause(
        "compressor-tail",
        "compressor/residue",
        "the last partial block of the key compressor is dropped or doubled (prompt length mod 4, 64, 128)",
        short="any",
        long="some",
        growth="any",
        scaling_recovers="none",
        decode_recovers="none",
        cache_off_recovers="any",
        concat_recovers="none",
        residue="some",
        decode_kl="any",
        age="none",
        reuse_changed="none",
        selection_shift="any",
        kv_shift="any",
    ),
    _cause(
        "chunked-prefill",
        "prefill chunks",
        "prefill in chunks disagrees with prefill in one piece",
        short="none",
        long="some",
        growth="some",
        topk_recovers="none",
        scaling_recovers="none",
        decode_recovers="none",
        concat_recovers="none",
        residue="none",
        chunk_recovers="large",
        decode_kl="none",
        age="none",
        reuse_changed="none",
    ),
    _cause(
        "kv-format",
        "attention KV",
        "attention keys and values stored in fewer bits",
        _SERVED_ALIKE,
        short="small",
        long="some",
        growth="some",
        concat_recovers="none",
        residue="none",
        indexer_topk_changed="small",
        selection_chance="none",
        unrepeatable="none",
        kv_shift="some",
    ),
    _cause(
        "kv-transform",
        "attention KV",
        "attention keys or values are stored or read wrongly (scale, layout)",
        _SERVED_ALIKE,
        short="some",
        long="some",
        growth="any",
        concat_recovers="none",
        residue="none",
        unrepeatable="none",
        decode_kl="none",
        kv_shift="some",
    ),
    _cause(
        "template",
        "template",
        "the chat template drops or rewrites earlier turns",
        _SERVED_ALIKE,
        short="some",
        long="some",
        growth="any",
        concat_recovers="large",
        residue="none",
        unrepeatable="none",
        decode_kl="none",
        reuse_changed="any",
    ),
    _cause(
        "context-cut",
        "template",
        "a long prompt loses its beginning or middle before the model sees it",
        _SERVED_ALIKE,
        short="none",
        long="some",
        growth="some",
        concat_recovers="none",
        residue="none",
        unrepeatable="none",
        decode_kl="none",
        reuse_changed="some",
    ),
)

FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(c.family for c in CAUSES))
