"""What the rows of the scores show beyond right and wrong: equal replies, reused tokens, residues, send order.

A build that repeats itself gives the same text for the same computation. Where an intervention takes a fault's cause
away, patched and base build therefore give the same replies under it, one for one, which a handful of conversations
shows; recall alone would need dozens.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longrecall.evals.cells import Floats
from longrecall.evals.paired import cluster_t
from longrecall.evals.schema import MISSING, Observation

REPEATABLE = 0.98
"""Share of equal replies of base and base again from which on an engine repeats itself."""
ALL_THE_SAME = 0.97
LEAST_REPEATABLE = 0.8
"""Of an engine that repeats itself less than this, equal replies say nothing."""
FEWEST_REPLIES = 16
MODULI = (4, 64, 128, 256)
"""Compressor blocks, pages and chunks of the engines served here."""

Key = tuple[str, str, int, int]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scored reply."""

    right: float | None
    text: str | None
    context_tokens: int | None
    cached_tokens: int | None
    send_order: int | None


@dataclass(frozen=True)
class Replies:
    """The replies of one arm of a run by build; built once, read many times."""

    table: pa.Table
    _builds: dict[str, dict[Key, Reply]] = field(default_factory=dict)

    def of(self, build: str) -> dict[Key, Reply]:
        if build not in self._builds:
            rows = self.table.filter(pc.equal(self.table["build_id"], build)) if self.table.num_rows else self.table
            columns = {name: rows[name].to_pylist() for name in _COLUMNS}
            made = {}
            for conversation, probe, rung, repeat, outcome, text, context, cached, order in zip(
                *columns.values(), strict=True
            ):
                made[conversation, probe, rung, repeat] = Reply(
                    right=None if outcome in MISSING else float(outcome == "ok"),
                    text=text,
                    context_tokens=context,
                    cached_tokens=cached,
                    send_order=order,
                )
            self._builds[build] = made
        return self._builds[build]

    def same(self, a: str, b: str) -> tuple[int, int] | None:
        """(equal replies, replies) of the questions both builds were asked; None where texts are not known."""
        left, right = self.of(a), self.of(b)
        pairs = [(left[k].text, right[k].text) for k in left.keys() & right.keys()]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        return (sum(x == y for x, y in known), len(known)) if known else None

    def varied(self, build: str) -> float:
        """Share of the replies that are unlike all others: a build that always says one thing cannot be told apart."""
        texts = [r.text for r in self.of(build).values() if r.text is not None]
        return len(set(texts)) / len(texts) if texts else 0.0


_COLUMNS = (
    "conversation_id",
    "probe_id",
    "rung",
    "repeat",
    "outcome",
    "reply_hash",
    "context_tokens",
    "cached_tokens",
    "send_order",
)


def replies_of(table: pa.Table, arm: str) -> Replies:
    """The replies of one arm of a run's scores; columns that an older file lacks count as unknown."""
    for name in _COLUMNS:
        if name not in table.column_names:
            kind = pa.string() if name == "reply_hash" else pa.int64()
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
    return Replies(table.filter(pc.equal(table["arm"], arm)) if table.num_rows else table)


def as_alike(equal: tuple[int, int], again: tuple[int, int]) -> bool:
    """Whether replies are as often equal as those of the base and the base again, but for chance (three sigma).

    Both as (equal replies, replies). Batches that fall otherwise round otherwise: a served base says the same twice in
    93 to 100 % of the questions, and no number of equal replies shows that it always will.
    """
    share, n = min(again[0] / again[1], REPEATABLE), equal[1]
    return equal[0] >= n * share - 3 * math.sqrt(n * share * (1 - share))


def same_under(replies: Replies, baseline: str, patch: str, suffix: str) -> tuple[bool, str] | None:
    """Whether an intervention makes patch and base give the same replies, and the counts behind it.

    None where that says nothing: an engine that does not repeat itself, replies that hardly differ without the
    intervention either, too few replies, or a base that says the same thing to most questions under it.
    """
    there, here = f"{patch}--{suffix}", f"{baseline}--{suffix}"
    again = replies.same(baseline, f"{baseline}-again")
    plain, under = replies.same(baseline, patch), replies.same(here, there)
    if again is None or plain is None or under is None or again[0] < LEAST_REPEATABLE * again[1]:
        return None
    if under[1] < FEWEST_REPLIES or plain[0] > 0.9 * plain[1] or replies.varied(here) < 0.4:
        return None
    said = f"{under[0]} of {under[1]} replies equal the base's under {suffix}, {plain[0]} of {plain[1]} without"
    if again[0] >= REPEATABLE * again[1]:
        return under[0] >= ALL_THE_SAME * under[1], said
    n, without = under[1], plain[0] / plain[1]
    by_chance = (round(n * without + 3 * math.sqrt(n * without * (1 - without))), n)
    if as_alike(by_chance, again):
        return None  # as many equal replies could be seen without the intervention
    return as_alike(under, again), f"{said}, {again[0]} of {again[1]} of the base's own again"


def observe_replies(replies: Replies, baseline: str, patch: str) -> list[Observation]:
    """What the stored rows of base and patch say of reuse, residues and send order."""
    found = [_reuse(replies, baseline, patch), _residue(replies, baseline, patch), _order(replies, baseline, patch)]
    return [o for o in found if o is not None]


def _paired(replies: Replies, baseline: str, patch: str) -> list[tuple[Key, Reply, Reply]]:
    base, own = replies.of(baseline), replies.of(patch)
    return [(k, base[k], own[k]) for k in sorted(base.keys() & own.keys())]


def _reuse(replies: Replies, baseline: str, patch: str) -> Observation | None:
    """Difference of the shares of a conversation's prompt tokens that base and patched build take from their caches.

    Of the conversation as a whole: which of its prompts computes the common beginning is a matter of arrival.
    """
    tokens: dict[str, list[int]] = {}
    for key, base, own in _paired(replies, baseline, patch):
        if base.cached_tokens is not None and own.cached_tokens is not None and base.context_tokens:
            sums = tokens.setdefault(key[0], [0, 0])
            sums[0] += own.cached_tokens - base.cached_tokens
            sums[1] += base.context_tokens
    values = np.array([abs(more) / total for more, total in tokens.values()])
    return _made(patch, "reuse_changed", values, "share of the prompts reused more or less than by the base")


def _residue(replies: Replies, baseline: str, patch: str) -> Observation | None:
    """Loss at the worst residue of the prompt length over that at the others, at the modulus where it is largest.

    Prompts of neighbouring lengths only (within 5 %), so that it is not the length that is compared. The worst residue
    is chosen on half of the conversations and measured on the other half, so that choosing does not make a difference
    where there is none.
    """
    rows = [
        (key[0], base.context_tokens, base.right - own.right)
        for key, base, own in _paired(replies, baseline, patch)
        if base.context_tokens and base.right is not None and own.right is not None
    ]
    rows = _neighbours(rows)
    names = sorted({name for name, _, _ in rows})
    best: tuple[float, list[float], int] | None = None
    for modulus in MODULI:
        measured: list[float] = []
        for half in (0, 1):
            part = {name for i, name in enumerate(names) if i % 2 == half}
            chosen = _by_residue([r for r in rows if r[0] in part], modulus)
            if len(chosen) < 2:
                continue
            worst = max(chosen, key=lambda r: float(np.mean(chosen[r])))
            for name in names:
                own_rows = _by_residue([r for r in rows if r[0] == name and name not in part], modulus)
                others = [x for r, xs in own_rows.items() if r != worst for x in xs]
                if worst in own_rows and others:
                    measured.append(float(np.mean(own_rows[worst])) - float(np.mean(others)))
        if len(measured) >= 4 and (best is None or float(np.mean(measured)) > best[0]):
            best = (float(np.mean(measured)), measured, modulus)
    if best is None:
        return None
    detail = f"loss at the worst prompt length modulo {best[2]} less that at the others"
    return _made(patch, "residue", np.array(best[1]), detail)


def _neighbours(rows: list[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    """The rows of the group of neighbouring prompt lengths in which most is lost, of those with several lengths."""
    groups: list[list[int]] = []
    for tokens in sorted({tokens for _, tokens, _ in rows}):
        if groups and tokens <= 1.05 * groups[-1][0]:
            groups[-1].append(tokens)
        else:
            groups.append([tokens])
    kept = [[row for row in rows if row[1] in set(group)] for group in groups if len(group) > 1]
    return max(kept, key=lambda part: float(np.mean([loss for _, _, loss in part])), default=[])


def _by_residue(rows: list[tuple[str, int, float]], modulus: int) -> dict[int, list[float]]:
    made: dict[int, list[float]] = {}
    for _, tokens, loss in rows:
        made.setdefault(tokens % modulus, []).append(loss)
    return made


def _order(replies: Replies, baseline: str, patch: str) -> Observation | None:
    """Loss of the conversations asked late less that of those asked early: what a server's age does."""
    losses: dict[str, list[float]] = {}
    begun: dict[str, int] = {}
    for key, base, own in _paired(replies, baseline, patch):
        if base.right is not None and own.right is not None and own.send_order is not None:
            losses.setdefault(key[0], []).append(base.right - own.right)
            # By the first request: a conversation's last ones come when its server has time for them.
            begun[key[0]] = min(own.send_order, begun.get(key[0], own.send_order))
    names = sorted(losses, key=begun.__getitem__)
    half = len(names) // 2
    if half < 2:
        return None
    early, late = ([float(np.mean(losses[n])) for n in part] for part in (names[:half], names[-half:]))
    estimate = float(np.mean(late)) - float(np.mean(early))
    stderr = float(np.sqrt(np.var(early, ddof=1) / half + np.var(late, ddof=1) / half))
    return Observation(
        patch=patch,
        feature="age",
        estimate=estimate,
        stderr=max(stderr, 1.0 / half**1.5),
        n=2 * half,
        source="served",
        detail="loss of the later half of the conversations less that of the earlier",
    )


def _made(patch: str, feature: str, values: Floats, detail: str) -> Observation | None:
    t = cluster_t(values[None], margin=0.0, alpha=0.05) if len(values) >= 2 else None
    if t is None:
        return None
    return Observation(
        patch=patch,
        feature=feature,
        estimate=float(t.mean[0]),
        stderr=float(t.stderr[0]) if t.stderr[0] > 0 else 1.0 / len(values) ** 1.5,
        n=len(values),
        source="served",
        detail=detail,
    )
