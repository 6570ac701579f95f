"""Scores as dense arrays: builds × rungs × conversations × probes, with missing replies left out and counted.

Everything statistical works on these arrays; nothing is averaged in silently. Refused here: duplicate rows, unknown
builds, rungs or outcomes, replies of several runs, a conversation in two clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from longrecall.evals.schema import MISSING, Outcome, Score
from longrecall.evals.scores_file import ScoresError, scores_table

OUTCOMES: tuple[str, ...] = get_args(Outcome)
ARM_ORDER = ("warm", "branched", "cold", "alone", "free", "concat", "mirrored")
"""The arm a verdict is about when nobody says: the first of these that was asked."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """One arm of one run. NaN marks a reply that is missing or was not asked; counts tell the two apart."""

    builds: tuple[str, ...]
    rungs: tuple[int, ...]
    arm: str
    conversations: tuple[str, ...]
    """In the order they were asked."""
    cluster: Ints
    """[C] index of the independent unit each conversation belongs to, in order of first appearance."""
    n_clusters: int
    probes: tuple[tuple[str, ...], ...]
    """probe_ids of each conversation, in slot order."""
    recall: Floats
    """[B, R, C, P] share of the repeats that are ok (0 or 1 with one repeat)."""
    asked: Ints
    """[B, R, C, P] replies that came back or failed."""
    missing: Ints
    """[B, R, C, P] of these, replies that are missing data."""
    logprob: Floats
    """[B, R, C, P] mean gold log-probability."""
    outcomes: Ints
    """[B, R, len(OUTCOMES)] counts."""

    def build(self, build_id: str) -> int:
        return self.builds.index(build_id)


def _codes(column: pa.ChunkedArray, known: Sequence[str] | None, what: str) -> tuple[Ints, tuple[str, ...]]:
    """Integer codes and their names; names outside `known` are an error."""
    encoded = column.combine_chunks().dictionary_encode()
    if encoded.null_count:
        raise ScoresError(f"scores hold {encoded.null_count} rows without {what}")
    names = tuple(encoded.dictionary.to_pylist())
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    if known is None:
        return codes, names
    unknown = sorted(set(names) - set(known), key=str)
    if unknown:
        raise ScoresError(f"scores hold {what} {unknown[0]!r}; this campaign knows {', '.join(map(str, known))}")
    remap = np.array([list(known).index(name) for name in names], dtype=np.int64)
    return remap[codes] if len(names) else codes, tuple(known)


def _first_seen_order(codes: Ints, n: int) -> Ints:
    """For each code its rank by first appearance."""
    first = np.full(n, len(codes), dtype=np.int64)
    np.minimum.at(first, codes, np.arange(len(codes)))
    rank = np.empty(n, dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(n)
    return rank


def make_cells(
    scores: Sequence[Score] | pa.Table,
    *,
    builds: Sequence[str],
    rungs: Sequence[int],
    arm: str | None = None,
    order: Sequence[str] | None = None,
) -> Cells:
    """Dense arrays of one arm.

    arm: None takes the first of ARM_ORDER that has rows. order: conversation_ids in the order they were asked (the
    campaign's random order); None takes the order of the rows. Raises ScoresError on anything that would make an
    average a lie.
    """
    table = scores if isinstance(scores, pa.Table) else scores_table(scores)
    runs = table["run_id"].unique().to_pylist()
    if len(runs) > 1:
        raise ScoresError(
            f"scores of {len(runs)} runs in one judgement ({runs[0]}, {runs[1]}); judge each run by itself"
        )
    if arm is None:
        arms = set(table["arm"].unique().to_pylist())
        arm = next((a for a in ARM_ORDER if a in arms), next(iter(sorted(arms)), ARM_ORDER[0]))
    table = table.filter(pc.equal(table["arm"], arm)) if table.num_rows else table
    b, _ = _codes(table["build_id"], builds, "build")
    r, _ = _codes(table["rung"], cast(Sequence[Any], rungs), "rung")
    o, _ = _codes(table["outcome"], OUTCOMES, "outcome")
    c, names = _codes(table["conversation_id"], None, "conversation_id")
    k, cluster_names = _codes(table["cluster_id"], None, "cluster_id")
    p, probe_names = _codes(table["probe_id"], None, "probe_id")
    if order is not None:
        place = {name: i for i, name in enumerate(order)}
        lost = [name for name in names if name not in place]
        if lost:
            raise ScoresError(f"scores hold conversation {lost[0]!r}, which the campaign never planned")
        rank = np.argsort(np.argsort([place[name] for name in names])).astype(np.int64)
    else:
        rank = _first_seen_order(c, len(names))
    conversations = tuple(names[i] for i in np.argsort(rank)) if names else ()
    c = rank[c] if len(names) else c
    n_c = len(conversations)

    # slot of each probe inside its conversation
    pairs, pair_of_row = np.unique(c * max(len(probe_names), 1) + p, return_inverse=True)
    pair_conversation = pairs // max(len(probe_names), 1)
    starts = np.searchsorted(pair_conversation, np.arange(n_c))
    slot_of_pair = np.arange(len(pairs)) - starts[pair_conversation] if len(pairs) else pairs
    slot = slot_of_pair[pair_of_row] if len(pairs) else pair_of_row
    n_p = int(slot_of_pair.max()) + 1 if len(pairs) else 0
    probes: list[list[str]] = [[] for _ in range(n_c)]
    for pair in pairs:
        probes[int(pair) // len(probe_names)].append(probe_names[int(pair) % len(probe_names)])

    shape = (len(builds), len(rungs), n_c, n_p)
    flat = np.ravel_multi_index((b, r, c, slot), shape) if len(b) else b
    repeat = table["repeat"].to_numpy().astype(np.int64)
    key = flat * (int(repeat.max()) + 1 if len(repeat) else 1) + repeat
    values, counts = np.unique(key, return_counts=True)
    if (counts > 1).any():
        row = int(np.flatnonzero(key == values[np.argmax(counts > 1)])[0])
        raise ScoresError(
            f"{int((counts > 1).sum())} replies are scored twice, first build {builds[b[row]]}, conversation "
            f"{conversations[c[row]]}, probe {probe_names[p[row]]}, rung {rungs[r[row]]}, repeat {repeat[row]}"
        )

    cluster_of = np.full(n_c, -1, dtype=np.int64)
    k = _first_seen_order(k[np.argsort(c, kind="stable")], len(cluster_names))[k] if len(cluster_names) else k
    cluster_of[c] = k
    if (cluster_of[c] != k).any():
        row = int(np.flatnonzero(cluster_of[c] != k)[0])
        raise ScoresError(f"conversation {conversations[c[row]]} stands in two clusters")

    size = int(np.prod(shape))
    is_missing = np.isin(o, [OUTCOMES.index(name) for name in MISSING])
    is_ok = o == OUTCOMES.index("ok")
    asked = np.bincount(flat, minlength=size)
    missing = np.bincount(flat, weights=is_missing, minlength=size)
    right = np.bincount(flat, weights=is_ok, minlength=size)
    logprob = table["gold_logprob"].to_numpy(zero_copy_only=False).astype(np.float64)
    usable = np.isfinite(logprob) & ~is_missing
    logprob_sum = np.bincount(flat[usable], weights=logprob[usable], minlength=size)
    logprob_n = np.bincount(flat[usable], minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = right / (asked - missing)
        mean_logprob = logprob_sum / logprob_n
    outcomes = np.zeros((len(builds), len(rungs), len(OUTCOMES)), dtype=np.int64)
    np.add.at(outcomes, (b, r, o), 1)
    return Cells(
        builds=tuple(builds),
        rungs=tuple(rungs),
        arm=arm,
        conversations=conversations,
        cluster=cluster_of,
        n_clusters=int(k.max()) + 1 if len(k) else 0,
        probes=tuple(tuple(names_) for names_ in probes),
        recall=recall.reshape(shape),
        asked=asked.reshape(shape).astype(np.int64),
        missing=missing.reshape(shape).astype(np.int64),
        logprob=mean_logprob.reshape(shape),
        outcomes=outcomes,
    )
