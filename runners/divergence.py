"""How far two served builds are apart: divergences of their distributions, overlap of their selections, and what shows.

Pure arithmetic on what SGLang's /generate returns; `h200.py` asks the servers. Divergences are in nats and exact: over
the whole vocabulary, not over the most likely tokens. All comparisons are beside a base served twice, since a server
of sparse attention does not repeat itself to the last bit once it selects.
"""

import base64
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BETWEEN = ("prefill", "decode")
"""Measures of a build against base."""
WITHIN = ("prefill_decode", "cold_warm")
"""Measures of a build against itself."""
ALPHA = 0.001
"""About 50 tests a table; the smallest two-sided p of 9 prompts against 9 is 4e-5."""
MISS_RATIO = 2.0
"""A layer's selection shows when at every length it misses more than this times what base again misses. Seen between
two builds without a change: 1.25."""
_ROWS_BELOW, _ROWS_ABOVE = 12, 48

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def kl(p: Floats, q: Floats) -> NDArray[np.float64]:
    """KL(p | q) of each row in nats, of log-probabilities [R, V] over the same vocabulary; never below 0.

    Raises:
        ValueError: shapes differ, or an entry is missing (NaN).
    """
    if p.shape != q.shape:
        raise ValueError(f"distributions of shapes {p.shape} and {q.shape} cannot be compared")
    if np.isnan(p).any() or np.isnan(q).any():
        raise ValueError("a log-probability is missing: ask for as many as the vocabulary has tokens")
    wide_p, wide_q = p.astype(np.float64), q.astype(np.float64)
    rows: NDArray[np.float64] = np.maximum(np.sum(np.exp(wide_p) * (wide_p - wide_q), axis=-1), 0.0)
    return rows


def dense(top: Sequence[Sequence[Any]], vocab_size: int) -> Floats:
    """[V] log-probabilities of one position from SGLang's [[logprob, token, text], …]; NaN where it has none."""
    row = np.full(vocab_size, np.nan, dtype=np.float32)
    pairs = np.array([(entry[0], entry[1]) for entry in top], dtype=np.float64).reshape(-1, 2)
    row[pairs[:, 1].astype(np.int64)] = pairs[:, 0]
    return row


def decode_topk(encoded: str, index_topk: int, num_rows: int) -> Ints:
    """[num_rows, layers, index_topk] positions from meta_info["indexer_topk"]; -1 is padding.

    SGLang sends one row for each token but the last, prompt and generated ones together, as base64 of int32.

    Raises:
        ValueError: the length is not a whole number of layers.
    """
    flat = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    if num_rows < 1 or flat.size == 0 or flat.size % (num_rows * index_topk):
        raise ValueError(f"{flat.size} numbers are no whole number of layers of {num_rows} rows of {index_topk}")
    return flat.reshape(num_rows, -1, index_topk)


def overlap(a: Ints, b: Ints) -> float:
    """|a ∩ b| / |a| of two selections as sets; -1 is padding. Two empty ones overlap fully."""
    left, right = np.unique(a[a >= 0]), np.unique(b[b >= 0])
    if not left.size:
        return 1.0 if not right.size else 0.0
    return float(np.isin(left, right, assume_unique=True).sum() / left.size)


def rows_to_keep(num_prompt: int, num_rows: int, onset: int, dense_up_to: int) -> dict[str, list[int]]:
    """Rows of the selection that are compared: prompt tokens below and above the onset, and generated tokens.

    A prompt of up to `dense_up_to` tokens is prefilled with dense attention: nothing is selected for its tokens, and
    what the server returns for them is left from an earlier request.
    """
    kept: dict[str, list[int]] = {"below": [], "above": [], "decode": list(range(num_prompt, num_rows))}
    if num_prompt > dense_up_to:
        end = min(num_prompt, onset)
        kept["below"] = sorted({int(x) for x in np.linspace(0, end - 1, _ROWS_BELOW)})
        if num_prompt > onset:
            kept["above"] = sorted({int(x) for x in np.linspace(onset, num_prompt - 1, _ROWS_ABOVE)})
    return kept


def compare(base: Mapping[str, Any], build: Mapping[str, Any]) -> dict[str, Any]:
    """One prompt: the divergences of `build` from `base` and within itself, each a mean over positions.

    Raises:
        ValueError: see `kl`.
    """
    agree = int(np.argmin(np.append(base["out"] == build["out"], False)))
    ends = min(agree + 1, len(base["out"]))
    result: dict[str, Any] = {
        "prefill": float(kl(_prompt(base, "cold"), _prompt(build, "cold")).mean()),
        "decode": float(kl(base["cold_out"][1:ends], build["cold_out"][1:ends]).mean()) if ends > 1 else None,
        "decode_rows": max(ends - 1, 0),
        "prefill_decode": float(kl(build["cold_out"][1:], build["replay"][1:]).mean()),
        "prefill_again": float(kl(build["cold_out"][:1], build["replay"][:1]).mean()),
        "cold_warm": float(kl(_prompt(build, "cold"), _prompt(build, "warm")).mean()),
        "cached_tokens": [int(x) for x in build["cached"]],
        "same_tokens": agree,
    }
    for where in ("below", "above", "decode"):
        key = f"topk_{where}"
        # A generated token's selection is comparable only while the tokens before it agree.
        stop = agree if where == "decode" else None
        if key in base and key in build and len(base[key][:stop]):
            a, b = base[key][:stop], build[key][:stop]
            result[f"overlap_{where}"] = [
                float(np.mean([overlap(left[layer], right[layer]) for left, right in zip(a, b, strict=True)]))
                for layer in range(a.shape[1])
            ]
            result[f"selected_{where}"] = float(np.mean((b >= 0).sum(axis=-1)))
            result[f"causal_{where}"] = bool((b.max(axis=(1, 2)) <= base[f"rows_{where}"][:stop]).all())
    return result


def _prompt(arrays: Mapping[str, Any], arm: str) -> Floats:
    """The last prompt tokens' distributions and the first generated token's, which prefill computes too."""
    return np.concatenate([arrays[f"{arm}_tail"], arrays[f"{arm}_out"][:1]])


def rank_p(values: Sequence[float], floor: Sequence[float], *, two_sided: bool) -> float | None:
    """Exact p of the rank-sum test that `values` are larger than `floor` (or otherwise apart); ties have mid-ranks.

    Counts all ways to draw len(values) of the pooled ranks. None where either is empty.
    """
    if not values or not floor:
        return None
    pooled = [*values, *floor]
    ordered = sorted(pooled)
    # Twice the mid-rank, so that it is a whole number: first place + last place.
    double = {v: 2 * ordered.index(v) + ordered.count(v) + 1 for v in set(pooled)}
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in values)]
    for value in pooled:
        for size in range(len(values), 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + double[value]] = ways[size].get(total + double[value], 0) + count
    seen, every = sum(double[v] for v in values), sum(ways[-1].values())
    above = sum(count for total, count in ways[-1].items() if total >= seen) / every
    below = sum(count for total, count in ways[-1].items() if total <= seen) / every
    return min(1.0, 2 * min(above, below)) if two_sided else above


def conclude(compared: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], onset: int) -> dict[str, Any]:
    """{build: {measure: {"below" and "above" the onset: medians, floor, p, shows}}} for all but base.

    `compared` is {build: {length: [compare(…) of each prompt]}}. The floor of a measure against base is base again;
    of one within a build, base and base again together. A prompt whose generated tokens pass the onset counts as
    above it.
    """
    result: dict[str, Any] = {}
    for name in compared:
        if name == "base":
            continue
        result[name] = {"selection": _selection(compared, name, onset)}
        for measure in (*BETWEEN, *WITHIN):
            result[name][measure] = {}
            for side in ("below", "above"):
                values = list(_values(compared, (name,), measure, onset, side))
                floor_of = ("base-again",) if measure in BETWEEN else ("base", "base-again")
                floor = list(_values(compared, floor_of, measure, onset, side))
                p = rank_p(values, floor, two_sided=measure in WITHIN)
                result[name][measure][side] = {
                    "prompts": len(values),
                    "median": statistics.median(values) if values else None,
                    "largest": max(values) if values else None,
                    "floor_median": statistics.median(floor) if floor else None,
                    "floor_largest": max(floor) if floor else None,
                    "p": p,
                    "shows": None if p is None else p < ALPHA,
                }
    return result


def side_of(length: int, onset: int) -> str:
    return "below" if length + 32 <= onset else "above"


def _values(compared: Any, names: Iterable[str], measure: str, onset: int, side: str) -> Iterable[float]:
    for name in names:
        for length, prompts in compared.get(name, {}).items():
            if side_of(int(length), onset) == side:
                yield from (said[measure] for said in prompts if said.get(measure) is not None)


def _selection(compared: Any, name: str, onset: int) -> dict[str, Any]:
    """Overlap with base by layer and length, the layers where that shows, and whether anything below the onset does."""
    above: dict[str, list[float]] = {}
    floor: dict[str, list[float]] = {}
    below: list[float] = []
    for length, prompts in compared[name].items():
        for said in prompts:
            below += said.get("overlap_below", [])
            if side_of(int(length), onset) == "below":
                below += said.get("overlap_decode", [])
            if "overlap_above" in said:
                above[length] = said["overlap_above"]
        for said in compared.get("base-again", {}).get(length, []):
            if "overlap_above" in said:
                floor[length] = said["overlap_above"]
    common = [length for length in above if length in floor]
    layers = range(len(above[common[0]])) if common else ()
    shown = [
        layer
        for layer in layers
        if all(1 - above[length][layer] > MISS_RATIO * (1 - floor[length][layer]) for length in common)
    ]
    return {
        "above": above,
        "floor": {length: floor[length] for length in common},
        "layers": shown,
        "shows_above": bool(shown) if common else None,
        "lowest_below": min(below) if below else None,
        "shows_below": min(below) < 1 if below else None,
    }
