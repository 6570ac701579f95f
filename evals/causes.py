"""Known causes of lost recall in a served DeepSeek-style model, each with the signature it must show.

Top-k selection is the identity up to the onset, so nothing that acts through the index keys can act there; the routed
scaling factor acts at every length. From that and the table of public bugs (docs/statistics.md lists them) each cause
predicts a level for each feature; a feature it says nothing about is left open. Levels are densities over the share
of recall lost (or recovered, or changed), not verdicts: `attribute.py` weighs them against what was measured.
"""

import math
from dataclasses import dataclass
from typing import Literal

from scipy import special

Level = Literal["none", "small", "some", "large", "any"]

LEVELS: dict[Level, tuple[float, float]] = {
    "none": (-0.015, 0.015),
    "small": (0.0, 0.15),
    "some": (0.04, 1.0),
    "large": (0.35, 1.05),
    "any": (-0.1, 1.1),
}
"""Each level spreads its probability evenly over this range of true values."""


def level_log_density(level: Level, estimate: float, stderr: float) -> float:
    """log density of an estimate with normal error when the true value is spread evenly over the level's range."""
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
            question="Does recall come back when the routed scaling factor is overridden (√f for 2x, f² for 0x)?",
            how="serve base and patch with routed_scaling_factor set to the factor's square root or square",
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
            cost=12.0,
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
}


def _cause(name: str, family: str, title: str, *parts: dict[str, str], **levels: str) -> Cause:
    merged: dict[str, Level] = {}
    for part in (*parts, levels):
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
    ),
    _cause(
        "routed-scaling",
        "routed scaling",
        "routed scaling factor left out or applied twice in every MoE layer",
        _SCALING,
        short="large",
        long="large",
    ),
    _cause(
        "routed-scaling-hash-layers",
        "routed scaling",
        "routed scaling factor wrong in the hash-routed layers only",
        _SCALING,
        short="some",
        long="some",
    ),
    _cause(
        "mhc-precision",
        "MHC",
        "hyper-connections mixed in too few bits",
        short="small",
        long="small",
        growth="none",
        topk_recovers="none",
        scaling_recovers="none",
        decode_recovers="none",
        cache_off_recovers="none",
        concat_recovers="none",
        residue="none",
        chunk_recovers="none",
        unrepeatable="none",
        selection_chance="small",
        decode_kl="none",
    ),
    _cause(
        "decode-kernel",
        "decode kernel",
        "sparse decode computes something else than prefill (splits, merge, accumulation)",
        short="any",
        long="some",
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
    ),
    _cause(
        "kv-format",
        "attention KV",
        "attention keys and values stored in fewer bits",
        short="small",
        long="some",
        growth="some",
        topk_recovers="none",
        scaling_recovers="none",
        decode_recovers="none",
        cache_off_recovers="none",
        concat_recovers="none",
        residue="none",
        chunk_recovers="none",
        indexer_topk_changed="small",
        selection_chance="none",
        unrepeatable="none",
    ),
    _cause(
        "template",
        "template",
        "the chat template drops or rewrites earlier turns",
        short="some",
        long="some",
        growth="any",
        topk_recovers="none",
        scaling_recovers="none",
        decode_recovers="none",
        cache_off_recovers="none",
        concat_recovers="large",
        residue="none",
        chunk_recovers="none",
        unrepeatable="none",
        decode_kl="none",
    ),
)

FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(c.family for c in CAUSES))
