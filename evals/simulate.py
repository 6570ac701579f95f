"""Simulated replays with known truth: the latent-threshold model that the error rates in docs/statistics.md rest on.

Reply i of conversation c on build b is right when  a_c + s_cb + u_ci + e_cib < τ_b, a standard normal in all:

    a_c    difficulty of the conversation, shared by builds        (cluster variance, less the shock's share)
    s_cb   shock of this conversation on this build                (share `shock` of the cluster variance)
    u_ci   difficulty of the probe, shared by builds               (the rest, less the noise's share)
    e_cib  noise of the single reply                               (share `noise` of what is not cluster variance)

The cluster variance is solved from the wanted intra-conversation correlation of right/wrong, τ_b from the recall.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy import optimize, stats

from longrecall.evals.cells import OUTCOMES, Cells

Bools = npt.NDArray[np.bool_]
Rng = np.random.Generator
Loss = Literal["uniform", "catastrophe"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How unlike itself a served build is from run to run."""

    name: str
    noise: float
    """Share of the within-conversation variance that is new in every reply."""
    shock: float = 0.0
    """Share of the cluster variance that is new in every (conversation, build): whole conversations diverge."""


QUIET = Engine(name="quiet", noise=0.02)
NOISY = Engine(name="noisy", noise=0.5)
SHOCK = Engine(name="conv-shock", noise=0.1, shock=0.5)
IDENTICAL = Engine(name="bit-identical", noise=0.0)
ENGINES = {e.name: e for e in (IDENTICAL, QUIET, NOISY, SHOCK)}

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


def both_right(recall: float, correlation: float) -> float:
    """P(both right) of two replies of equal recall whose latent scores correlate (Gauss–Hermite)."""
    tau = stats.norm.ppf(recall)
    if correlation >= 1:
        return recall
    inner = stats.norm.cdf((tau - math.sqrt(correlation) * _NODES) / math.sqrt(1 - correlation))
    return float((_WEIGHTS * inner**2).sum())


@lru_cache(maxsize=256)
def cluster_variance(recall: float, icc: float) -> float:
    """Latent variance of the conversation that gives right/wrong the intra-conversation correlation `icc`."""
    if icc <= 0:
        return 0.0
    if not icc < 0.95 or not 0 < recall < 1:
        raise ValueError(f"icc {icc} and recall {recall}: 0 ≤ icc < 0.95 and 0 < recall < 1 are needed")

    def gap(v: float) -> float:
        return (both_right(recall, v) - recall**2) / (recall * (1 - recall)) - icc

    return float(optimize.brentq(gap, 1e-6, 0.995))


def flip_rate(recall: float, icc: float, engine: Engine) -> float:
    """P(two runs of one build disagree on a reply)."""
    v = cluster_variance(recall, icc)
    changing = v * engine.shock + (1 - v) * engine.noise
    x = np.linspace(-7.0, 7.0, 20001)
    if changing <= 0:
        return 0.0
    p = stats.norm.cdf((stats.norm.ppf(recall) - math.sqrt(1 - changing) * x) / math.sqrt(changing))
    return float(np.trapezoid(2 * p * (1 - p) * stats.norm.pdf(x), x))


def draw_builds(
    rng: Rng,
    *,
    reps: int,
    conversations: int,
    probes: int,
    base_recall: float,
    recalls: list[float],
    icc: float,
    engine: Engine,
    loss: Loss = "uniform",
) -> Bools:
    """Right/wrong [reps, builds, C, m] of builds with the given recalls, on the same conversations.

    uniform: the threshold moves. catastrophe: a share of the conversations, such that the mean comes out, loses
    everything and the others nothing.
    """
    v = cluster_variance(base_recall, icc)
    shape_c, shape_p = (reps, 1, conversations, 1), (reps, 1, conversations, probes)
    n = len(recalls)
    latent = rng.standard_normal(shape_c) * math.sqrt(v * (1 - engine.shock))
    latent = latent + rng.standard_normal(shape_p) * math.sqrt((1 - v) * (1 - engine.noise))
    z = np.repeat(latent, n, axis=1)
    if engine.shock:
        z += rng.standard_normal((reps, n, conversations, 1)) * math.sqrt(v * engine.shock)
    if engine.noise:
        z += rng.standard_normal((reps, n, conversations, probes)) * math.sqrt((1 - v) * engine.noise)
    if loss == "uniform":
        tau = stats.norm.ppf(np.clip(recalls, 1e-9, 1 - 1e-9)).reshape(1, n, 1, 1)
        return np.asarray(z < tau)
    right = z < stats.norm.ppf(base_recall)
    share = np.array([max(0.0, 1 - r / base_recall) for r in recalls]).reshape(1, n, 1, 1)
    return np.asarray(right & (rng.random((reps, n, conversations, 1)) >= share))


def cells_of(right: Bools, *, builds: list[str], rungs: list[int]) -> Cells:
    """Right/wrong [B, R, C, m] as the dense arrays that `scores_of` would be read into."""
    n_builds, n_rungs, n, m = right.shape
    ok = right.sum(axis=(2, 3))
    outcomes = np.zeros((n_builds, n_rungs, len(OUTCOMES)), dtype=np.int64)
    outcomes[..., OUTCOMES.index("ok")] = ok
    outcomes[..., OUTCOMES.index("other")] = n * m - ok
    return Cells(
        builds=tuple(builds),
        rungs=tuple(rungs),
        arm="warm",
        conversations=tuple(f"c{i:05d}" for i in range(n)),
        cluster=np.arange(n),
        n_clusters=n,
        probes=(tuple(f"p{i}" for i in range(m)),) * n,
        recall=right.astype(np.float64),
        asked=np.ones(right.shape, dtype=np.int64),
        missing=np.zeros(right.shape, dtype=np.int64),
        logprob=np.full(right.shape, np.nan),
        outcomes=outcomes,
    )


def scores_of(
    right: Bools,
    *,
    builds: list[str],
    rungs: list[int],
    run_id: str = "simulated",
    logprob: npt.NDArray[np.float64] | None = None,
) -> pa.Table:
    """Right/wrong [B, R, C, m] as a table of scores, conversations in a fixed order."""
    b, r, c, p = (g.ravel() for g in np.indices(right.shape))
    n = right.size
    ok = right.ravel()

    def text(codes: npt.NDArray[np.int64], names: list[str]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(codes, type=pa.int32()), pa.array(names)).cast(pa.string())

    conversations = [f"c{i:05d}" for i in range(right.shape[2])]
    zeros = np.zeros(n, dtype=np.int64)
    none_int, none_text = pa.nulls(n, pa.int64()), pa.nulls(n, pa.string())
    return pa.table(
        {
            "schema_version": zeros + 1,
            "run_id": text(zeros, [run_id]),
            "build_id": text(b, builds),
            "conversation_id": text(c, conversations),
            "cluster_id": text(c, conversations),
            "probe_id": text(p, [f"p{i}" for i in range(right.shape[3])]),
            "probe_kind": text(zeros, ["single"]),
            "rung": np.array(rungs, dtype=np.int64)[r],
            "arm": text(zeros, ["warm"]),
            "repeat": zeros,
            "outcome": text(np.where(ok, 0, 1), ["ok", "other"]),
            "answer": none_text,
            "gold_logprob": pa.array(logprob.ravel()) if logprob is not None else pa.nulls(n, pa.float64()),
            "depth_pct": pa.nulls(n, pa.float64()),
            "distance_tokens": none_int,
            "distance_turns": none_int,
            "context_tokens": none_int,
            "cached_tokens": none_int,
            "send_order": none_int,
            "reply_hash": none_text,
        }
    )
