"""GPU path of `index_topk` and of the top-k alone: Triton, no [queries, keys] scores in memory.

Four launches for scores, three for a top-k of given scores, every buffer O(queries * k):

    sample     scores of SAMPLE keys of each query, spread evenly over what it sees        [T, SAMPLE]
    threshold  a rank of the sample that the k-th best score beats with near certainty     [T]
    collect    one pass over all keys; whatever reaches the threshold goes to a buffer     [T, DENSE], about 2-3 k used
    select     exact top-k of the buffer by bisection on the score's bits, ties by index   [T, k]

and a last one, `repair`, in which a row whose buffer holds too few or too many is done again exactly, by radix passes
that recompute its scores; it exits at once for every other row. So the answer is exact whatever the data, the sampling
decides only the speed, and nothing waits for the host.

Collecting needs no communication: element (r, b) of every [BK, BQ] tile of scores owns a list of CAP slots and its own
counter, a register. Lists are packed into the row's buffer when a program has seen its share of the keys.
"""

import importlib
import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longrecall.kernels.indexer.formats import Packed, decode_bytes, dequantize

OVERFLOW = tl.constexpr(1 << 20)
"""Added to a row's count by each program in which a list ran over: no honest count reaches it, and 2,000 such programs
do not wrap to one."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Threshold that every finite score reaches and neither -inf nor NaN does."""


@triton.jit
def _start(PDL: tl.constexpr, FIRST: tl.constexpr):
    """Programmatic launch: let the next kernel's programs come, and wait for the kernel before.

    Few queries take microseconds a kernel, and a plain launch costs as much again. A call's first kernel waits before
    it lets others come: whatever they find is then complete but for what this call writes.
    """
    if PDL:
        if FIRST:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        if not FIRST:
            tl.extra.cuda.gdc_wait()


@triton.jit
def _sortable(x):
    """fp32 → uint32 in the same order; -0.0 just below 0.0 (callers add 0.0 first)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _unsortable(key):
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _rank_key(keys, rank, slack):
    """A uint32 that rank .. rank + slack of the keys reach, or the rank-th largest key itself; 0 if there are fewer.

    Bisection on the bits. Bits in which all non-zero keys agree are not tried, and the search ends as soon as the count
    fits: with slack 0 and no ties after some 12 counts. Zero keys are padding.
    """
    high = tl.max(keys)
    low = tl.min(tl.where(keys == 0, high, keys))
    found = tl.zeros((), tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    one = tl.full((), 1, tl.uint32)
    while bit != 0:
        if (high ^ low) < bit:
            found = found | (high & bit)
        else:
            count = tl.sum((keys >= (found | bit)).to(tl.int32))
            if count >= rank:
                found = found | bit
                if count <= rank + slack:
                    bit = one  # the last turn
        bit = bit >> 1
    return found


@triton.jit
def _tail_key(keys, rank, slack):
    """As `_rank_key`, in half its counts where values spread evenly, at most twice as many anywhere.

    Three of four steps halve the bracket as values, the fourth as bits, which no outlier can stop.
    """
    high = tl.max(keys) + 1
    low = tl.min(tl.where(keys == 0, high, keys))
    if tl.sum((keys > 0).to(tl.int32)) < rank:
        low = tl.zeros((), tl.uint32)
        high = low
    turn = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        if turn % 4 != 3:
            half = _sortable(0.5 * _unsortable(low) + 0.5 * _unsortable(high) + 0.0)
            if (half > low) & (half < high):
                middle = half
        count = tl.sum((keys >= middle).to(tl.int32))
        if count >= rank:
            low = middle
            if count <= rank + slack:
                high = low
        else:
            high = middle
        turn += 1
    return low


@triton.jit
def _tile_scores(k, q, w, BK: tl.constexpr, BQ: tl.constexpr, H: tl.constexpr, PRECISION: tl.constexpr):
    """k [BK, D], q [BQ * H, D], w [BQ * H] half the weights → scores [BK, BQ].

    Keys are the rows, so the heads sum inside a thread quad. x + |x| is 2 relu(x), at twice the rate of a maximum.
    """
    dots = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    dots = (dots + tl.abs(dots)) * w[None, :]
    return tl.sum(tl.reshape(dots, (BK, BQ, H)), 2)


@triton.jit
def _append(s, key, take, position, values_ptr, index_ptr, STEP: tl.constexpr, CAP: tl.constexpr):
    """Element-wise append to each element's own list; `position` is its next slot."""
    fits = take & (position < CAP * STEP)
    tl.store(values_ptr + position, s, mask=fits)
    tl.store(index_ptr + position, key, mask=fits)
    return tl.where(take, position + STEP, position)


@triton.jit
def _pack(
    position, start, rows, m_rows, values_ptr, index_ptr, dense_values_ptr, dense_index_ptr, count_ptr,
    STEP: tl.constexpr, CAP: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Lists of one program, [R, BQ], into the rows' buffers; `start` is each list's first slot."""
    count = (position - start) // STEP
    kept = tl.minimum(count, CAP)
    total = tl.sum(kept, 0)  # [BQ]
    over = tl.max(count, 0) > CAP
    base = tl.atomic_add(count_ptr + rows, total + tl.where(over, OVERFLOW, 0), mask=m_rows)
    target = base[None, :] + tl.cumsum(kept, 0) - kept
    o_row = rows.to(tl.int64)[None, :] * DENSE
    tl.debug_barrier()  # lists written by other threads of this program
    for turn in range(tl.cdiv(tl.max(kept), 4)):
        for unrolled in tl.static_range(4):  # so that the loads of four slots are in flight together
            c = turn * 4 + unrolled
            m = (c < kept) & m_rows[None, :]
            s = tl.load(values_ptr + start + c * STEP, mask=m)
            i = tl.load(index_ptr + start + c * STEP, mask=m)
            m = m & (target + c < DENSE) & (target + c >= 0)
            tl.store(dense_values_ptr + o_row + target + c, s, mask=m)
            tl.store(dense_index_ptr + o_row + target + c, i, mask=m)
    tl.debug_barrier()  # the next task writes the lists again


@triton.jit
def _load_keys(k_ptr, first, key, limit, D: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr):
    """Keys at row `first` + key; [BK, D]."""
    if TMA and not GATHER:
        return k_ptr.load([(first + tl.min(key)).to(tl.int32), 0])
    else:
        o = (first + key)[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
        return tl.load(k_ptr + o, mask=(key < limit)[:, None], other=0.0)


@triton.jit
def _collect_kernel(
    q_ptr, k_ptr, scale_ptr, w_ptr, visible_ptr, threshold_ptr, lists_values_ptr, lists_index_ptr,
    dense_values_ptr, dense_index_ptr, count_ptr, T, S, tasks, splits,
    H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr, CAP: tl.constexpr,
    DENSE: tl.constexpr, DISTINCT: tl.constexpr, SCALED: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tasks = blocks of GROUPS * BQ queries x splits of the keys.

    GROUPS = 2 runs two products on each key tile, so that half the accumulator registers are live at a time.
    """
    _start(PDL, False)
    STEP: tl.constexpr = BK * BQ
    N: tl.constexpr = BQ * H
    pid = tl.program_id(0).to(tl.int64)
    values_ptr = lists_values_ptr + pid * (GROUPS * STEP * CAP)
    index_ptr = lists_index_ptr + pid * (GROUPS * STEP * CAP)
    o_k = tl.arange(0, BK)
    o_d = tl.arange(0, D)
    start = o_k[:, None] * BQ + tl.arange(0, BQ)[None, :]
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        i_split = task % splits
        row = (task // splits) * (GROUPS * BQ)
        rows0 = row + tl.arange(0, BQ)
        visible0 = tl.minimum(tl.load(visible_ptr + rows0, mask=rows0 < T, other=0), S)
        threshold0 = tl.load(threshold_ptr + rows0, mask=rows0 < T, other=0.0)
        o_n = row * H + tl.arange(0, N)
        q0 = tl.load(q_ptr + o_n[:, None].to(tl.int64) * D + o_d[None, :], mask=(o_n < T * H)[:, None], other=0.0)
        w0 = tl.load(w_ptr + o_n, mask=o_n < T * H, other=0.0) * 0.5
        limit = tl.max(visible0)
        if GROUPS == 2:
            rows1 = rows0 + BQ
            visible1 = tl.minimum(tl.load(visible_ptr + rows1, mask=rows1 < T, other=0), S)
            threshold1 = tl.load(threshold_ptr + rows1, mask=rows1 < T, other=0.0)
            o_n = o_n + N
            q1 = tl.load(q_ptr + o_n[:, None].to(tl.int64) * D + o_d[None, :], mask=(o_n < T * H)[:, None], other=0.0)
            w1 = tl.load(w_ptr + o_n, mask=o_n < T * H, other=0.0) * 0.5
            limit = tl.maximum(limit, tl.max(visible1))
            position1 = start
        position0 = start
        first = tl.zeros((), tl.int64)
        if DISTINCT:
            first += row.to(tl.int64) * S
        share = tl.cdiv(tl.cdiv(limit, BK), splits)
        low = i_split * share
        high = tl.minimum(low + share, tl.cdiv(limit, BK))
        for i in tl.range(low, high, num_stages=STAGES):
            key = i * BK + o_k
            k = _load_keys(k_ptr, first, key, S, D, BK, TMA, False)
            if SCALED:
                scale = tl.load(scale_ptr + first + key, mask=key < S, other=0.0)
            s0 = _tile_scores(k, q0, w0, BK, BQ, H, PRECISION)
            if SCALED:
                s0 = s0 * scale[:, None]
            take = (s0 >= threshold0[None, :]) & (key[:, None] < visible0[None, :])
            key_b = tl.broadcast_to(key[:, None], (BK, BQ))
            position0 = _append(s0, key_b, take, position0, values_ptr, index_ptr, STEP, CAP)
            if GROUPS == 2:
                s1 = _tile_scores(k, q1, w1, BK, BQ, H, PRECISION)
                if SCALED:
                    s1 = s1 * scale[:, None]
                take = (s1 >= threshold1[None, :]) & (key[:, None] < visible1[None, :])
                position1 = _append(
                    s1, key_b, take, position1, values_ptr + STEP * CAP, index_ptr + STEP * CAP, STEP, CAP
                )
        _pack(
            position0, start, rows0, rows0 < T, values_ptr, index_ptr,
            dense_values_ptr, dense_index_ptr, count_ptr, STEP, CAP, DENSE,
        )  # fmt: skip
        if GROUPS == 2:
            _pack(
                position1, start, rows1, rows1 < T, values_ptr + STEP * CAP, index_ptr + STEP * CAP,
                dense_values_ptr, dense_index_ptr, count_ptr, STEP, CAP, DENSE,
            )  # fmt: skip


@triton.jit
def _sample_kernel(
    q_ptr, k_ptr, scale_ptr, w_ptr, visible_ptr, out_ptr, T, S,
    H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, SAMPLE: tl.constexpr, PART: tl.constexpr,
    DISTINCT: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BQ queries, SAMPLE / PART). Scores of keys spread over what the block's shortest query sees."""
    _start(PDL, True)
    row = tl.program_id(0) * BQ
    rows = row + tl.arange(0, BQ)
    visible = tl.minimum(tl.load(visible_ptr + rows, mask=rows < T, other=1 << 30), S)
    limit = tl.maximum(tl.min(visible), 1).to(tl.int64)
    o_n = row * H + tl.arange(0, BQ * H)
    o_d = tl.arange(0, D)
    q = tl.load(q_ptr + o_n[:, None].to(tl.int64) * D + o_d[None, :], mask=(o_n < T * H)[:, None], other=0.0)
    w = tl.load(w_ptr + o_n, mask=o_n < T * H, other=0.0) * 0.5
    first = tl.zeros((), tl.int64)
    if DISTINCT:
        first += row.to(tl.int64) * S
    for i in range(tl.program_id(1) * (PART // BK), (tl.program_id(1) + 1) * (PART // BK)):
        j = i * BK + tl.arange(0, BK)
        # one key of each of SAMPLE strata, at a scattered place inside it: no period of the keys can hide from it
        low = j.to(tl.int64) * limit // SAMPLE
        width = tl.maximum((j.to(tl.int64) + 1) * limit // SAMPLE - low, 1)
        key = low + ((j * 40503 + row * 97) & 0xFFFF).to(tl.int64) * width // 65536
        k = _load_keys(k_ptr, first, key, S, D, BK, False, True)
        s = _tile_scores(k, q, w, BK, BQ, H, PRECISION)
        if SCALED:
            s = s * tl.load(scale_ptr + first + key, mask=key < S, other=0.0)[:, None]
        o = rows.to(tl.int64)[None, :] * SAMPLE + j[:, None]
        tl.store(out_ptr + o, s, mask=(rows < T)[None, :])


@triton.jit
def _sample_rank(visible, K, SAMPLE: tl.constexpr):
    """Rank in the sample whose score the k-th best of `visible` beats but once in about 10^6 rows."""
    mean = K * (SAMPLE / visible.to(tl.float32))
    return (mean + 4.5 * tl.sqrt(mean) + 4.0).to(tl.int32)


@triton.jit
def _threshold_kernel(
    sample_ptr, visible_ptr, threshold_ptr, count_ptr, K, ALL, SAMPLE: tl.constexpr, PDL: tl.constexpr
):
    """Grid: T. A row that sees at most ALL keys keeps them all. Also zeroes the row's count, which saves a launch."""
    _start(PDL, False)
    row = tl.program_id(0)
    tl.store(count_ptr + row, 0)
    visible = tl.load(visible_ptr + row)
    if visible <= ALL:
        tl.store(threshold_ptr + row, LOWEST)
    else:
        s = tl.load(sample_ptr + row.to(tl.int64) * SAMPLE + tl.arange(0, SAMPLE)) + 0.0
        keys = tl.where(s == s, _sortable(s), 0)
        rank = _sample_rank(visible, K, SAMPLE)
        found = _unsortable(_tail_key(keys, rank, rank // 8))
        # NaN (too few real scores in the sample) and -inf must let everything finite through
        tl.store(threshold_ptr + row, tl.where(found > LOWEST, found, LOWEST))


@triton.jit
def _row_threshold_kernel(
    scores_ptr, visible_ptr, threshold_ptr, count_ptr, S, K, ALL, SAMPLE: tl.constexpr, PDL: tl.constexpr
):
    """As `_threshold_kernel`, sampling given scores [T, S]."""
    _start(PDL, True)
    row = tl.program_id(0)
    tl.store(count_ptr + row, 0)
    visible = tl.minimum(tl.load(visible_ptr + row), S)
    if visible <= ALL:
        tl.store(threshold_ptr + row, LOWEST)
    else:
        # 8 neighbours are one sector: reading them together costs no more, and strata of 8 are even enough
        j = tl.arange(0, SAMPLE)
        group = j // 8
        low = group.to(tl.int64) * (visible // 8) // (SAMPLE // 8)
        width = tl.maximum((group.to(tl.int64) + 1) * (visible // 8) // (SAMPLE // 8) - low, 1)
        place = low + ((group * 40503 + row * 97) & 0xFFFF).to(tl.int64) * width // 65536
        s = tl.load(scores_ptr + row.to(tl.int64) * S + place * 8 + j % 8) + 0.0
        keys = tl.where(s == s, _sortable(s), 0)
        rank = _sample_rank(visible, K, SAMPLE)
        found = _unsortable(_tail_key(keys, rank, rank // 8))
        tl.store(threshold_ptr + row, tl.where(found > LOWEST, found, LOWEST))


@triton.jit
def _append_four(
    s, first, threshold, position, values_ptr, index_ptr, BLOCK: tl.constexpr, STEP: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Append scores [BLOCK] of keys first, first + 1, … where four neighbours share a list, as they share a thread."""
    even, odd = tl.split(tl.reshape(s, (STEP, 2, 2)))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    key = first + 4 * tl.arange(0, STEP)
    position = _append(s0, key, s0 >= threshold, position, values_ptr, index_ptr, STEP, CAP)
    position = _append(s1, key + 1, s1 >= threshold, position, values_ptr, index_ptr, STEP, CAP)
    position = _append(s2, key + 2, s2 >= threshold, position, values_ptr, index_ptr, STEP, CAP)
    return _append(s3, key + 3, s3 >= threshold, position, values_ptr, index_ptr, STEP, CAP)


@triton.jit
def _stream_kernel(
    scores_ptr, visible_ptr, threshold_ptr, lists_values_ptr, lists_index_ptr, dense_values_ptr, dense_index_ptr,
    count_ptr, S, tasks, splits, BLOCK: tl.constexpr, CAP: tl.constexpr, DENSE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Collect from given scores. Grid: any number of programs over tasks = rows x splits."""
    _start(PDL, False)
    STEP: tl.constexpr = BLOCK // 4
    pid = tl.program_id(0).to(tl.int64)
    values_ptr = lists_values_ptr + pid * (STEP * CAP)
    index_ptr = lists_index_ptr + pid * (STEP * CAP)
    o = tl.arange(0, BLOCK)
    start = tl.arange(0, STEP)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = task // splits
        visible = tl.minimum(tl.load(visible_ptr + row), S)
        threshold = tl.load(threshold_ptr + row)
        share = tl.cdiv(tl.cdiv(visible, BLOCK), splits)
        low = (task % splits) * share
        high = tl.minimum(low + share, tl.cdiv(visible, BLOCK))
        # a mask would split the 16-byte loads, so the last block, the only one that needs it, stands alone
        whole = tl.minimum(high, visible // BLOCK)
        base = scores_ptr + row.to(tl.int64) * S
        position = start
        for i in tl.range(low, whole, num_stages=STAGES):
            s = tl.load(base + i * BLOCK + o)
            position = _append_four(s, i * BLOCK, threshold, position, values_ptr, index_ptr, BLOCK, STEP, CAP)
        if low < high and high > whole:
            s = tl.load(base + whole * BLOCK + o, mask=whole * BLOCK + o < visible, other=float("-inf"))
            position = _append_four(s, whole * BLOCK, threshold, position, values_ptr, index_ptr, BLOCK, STEP, CAP)
        rows = row + tl.arange(0, 1)
        _pack(
            position[:, None], start[:, None], rows, rows >= 0, values_ptr, index_ptr,
            dense_values_ptr, dense_index_ptr, count_ptr, STEP, CAP, DENSE,
        )  # fmt: skip


@triton.jit
def _write_topk(
    keys, index, valid, wanted, out_ptr, row, K, KP: tl.constexpr, SORT: tl.constexpr
):  # fmt: skip
    """Exact top-`wanted` of (uint32 key, index) pairs → their indices, then -1, in out[row, :K].

    In the order given, or ascending with SORT: for pairs that atomics brought here in any order.
    """
    keys = tl.where(valid, keys, 0)
    kth = _rank_key(keys, wanted, 0)
    above = valid & (keys > kth)
    tied = valid & (keys == kth)
    need = wanted - tl.sum(above.to(tl.int32))
    last = tl.full((), 0x7FFFFFFF, tl.int32)
    if tl.sum(tied.to(tl.int32)) > need:
        # the need-th lowest index among the ties
        flipped = tl.where(tied, 0x7FFFFFFF - index, -1).to(tl.uint32, bitcast=True)
        flipped = tl.where(tied, flipped, 0)
        last = 0x7FFFFFFF - _rank_key(flipped, need, 0).to(tl.int32, bitcast=True)
    take = above | (tied & (index <= last))
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    o_k = tl.arange(0, KP)
    base = out_ptr + row.to(tl.int64) * K
    tl.store(base + place, index, mask=take & (place < K))
    if SORT:
        tl.debug_barrier()
        picks = tl.load(base + o_k, mask=o_k < wanted, other=0x7FFFFFFF)
        picks = tl.sort(picks)
        tl.debug_barrier()
        tl.store(base + o_k, tl.where(o_k < wanted, picks, -1), mask=o_k < K)
    else:
        tl.store(base + o_k, tl.full((KP,), -1, tl.int32), mask=(o_k >= wanted) & (o_k < K))


@triton.jit
def _select_kernel(
    dense_values_ptr, dense_index_ptr, count_ptr, visible_ptr, flag_ptr, out_ptr, K,
    KP: tl.constexpr, DENSE: tl.constexpr, SORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: T. Exact top-k of each row's buffer; flags the rows whose buffer cannot hold the answer."""
    _start(PDL, False)
    row = tl.program_id(0)
    count = tl.load(count_ptr + row)
    visible = tl.load(visible_ptr + row)
    wanted = tl.minimum(K, visible)
    good = (count >= wanted) & (count <= DENSE)
    tl.store(flag_ptr + row, tl.where(good, 0, 1))
    if good:
        o = tl.arange(0, DENSE)
        base = row.to(tl.int64) * DENSE
        s = tl.load(dense_values_ptr + base + o, mask=o < count, other=0.0) + 0.0
        index = tl.load(dense_index_ptr + base + o, mask=o < count, other=0)
        _write_topk(_sortable(s), index, o < count, wanted, out_ptr, row, K, KP, SORT)


@triton.jit
def _select_lists_kernel(
    values_ptr, index_ptr, counts_ptr, visible_ptr, flag_ptr, out_ptr, K, splits,
    KP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, CAP: tl.constexpr, CAP_P: tl.constexpr, SLOTS: tl.constexpr,
    SORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: T. As `_select_kernel`, from the lists that `hopper.collect_kernel` leaves in place."""
    _start(PDL, False)
    row = tl.program_id(0)
    visible = tl.load(visible_ptr + row)
    wanted = tl.minimum(K, visible)
    o = tl.arange(0, SLOTS)
    r = o % BK
    c = (o // BK) % CAP_P
    i_split = o // (BK * CAP_P)
    task = ((row // (2 * BQ)) * splits + i_split).to(tl.int64)
    group = (row // BQ) % 2
    inside = r * BQ + row % BQ
    count = tl.load(counts_ptr + (task * 2 + group) * (BK * BQ) + inside, mask=i_split < splits, other=0)
    valid = c < tl.minimum(count, CAP)
    total = tl.sum(valid.to(tl.int32))
    good = (total >= wanted) & (tl.max(count) <= CAP)
    tl.store(flag_ptr + row, tl.where(good, 0, 1))
    if good:
        slot = (task * 2 + group) * (BK * BQ * CAP) + c * (BK * BQ) + inside
        s = tl.load(values_ptr + slot, mask=valid, other=0.0) + 0.0
        index = tl.load(index_ptr + slot, mask=valid, other=0)
        _write_topk(_sortable(s), index, valid, wanted, out_ptr, row, K, KP, SORT)


@triton.jit
def _small_kernel(
    scores_ptr, visible_ptr, out_ptr, S, K, KP: tl.constexpr, WIDTH: tl.constexpr, SORT: tl.constexpr, PDL: tl.constexpr
):
    """Grid: T. Top-k of rows of scores that fit one program."""
    _start(PDL, True)
    row = tl.program_id(0)
    visible = tl.minimum(tl.load(visible_ptr + row), S)
    o = tl.arange(0, WIDTH)
    s = tl.load(scores_ptr + row.to(tl.int64) * S + o, mask=o < visible, other=float("-inf")) + 0.0
    valid = s > float("-inf")
    wanted = tl.minimum(tl.sum(valid.to(tl.int32)), K)
    _write_topk(_sortable(s), o, valid, wanted, out_ptr, row, K, KP, SORT)


@triton.jit
def _exact_scores(
    q, w, k_ptr, scale_ptr, scores_ptr, first, key, S,
    H: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr, GIVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    if GIVEN:
        return tl.load(scores_ptr + first + key, mask=key < S, other=float("-inf")) + 0.0
    else:
        k = _load_keys(k_ptr, first, key, S, D, BK, False, True)
        s = tl.reshape(_tile_scores(k, q, w, BK, 1, H, PRECISION), (BK,))
        if SCALED:
            s = s * tl.load(scale_ptr + first + key, mask=key < S, other=0.0)
        return s + 0.0


@triton.jit
def _repair_kernel(
    flag_ptr, q_ptr, k_ptr, scale_ptr, w_ptr, scores_ptr, visible_ptr, out_ptr, S, K,
    H: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, DISTINCT: tl.constexpr, SCALED: tl.constexpr,
    GIVEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: T. Flagged rows: four radix passes of 8 bits find the k-th score, a fifth collects in index order."""
    _start(PDL, False)
    row = tl.program_id(0)
    if tl.load(flag_ptr + row) != 0:
        visible = tl.minimum(tl.load(visible_ptr + row), S)
        first = tl.zeros((), tl.int64)
        if DISTINCT:
            first += row.to(tl.int64) * S
        o_h = tl.arange(0, H)
        q = tl.zeros((H, D), tl.bfloat16)
        w = tl.zeros((H,), tl.float32)
        if not GIVEN:
            q = tl.load(q_ptr + (row.to(tl.int64) * H + o_h)[:, None] * D + tl.arange(0, D)[None, :])
            w = tl.load(w_ptr + row.to(tl.int64) * H + o_h) * 0.5
        o = tl.arange(0, BK)
        digits = tl.arange(0, 256)
        prefix = tl.zeros((), tl.uint32)
        need = tl.minimum(K, visible)
        shift = tl.full((), 24, tl.uint32)
        for step in range(4):
            histogram = tl.zeros((256,), tl.int32)
            for i in range(tl.cdiv(visible, BK)):
                key = i * BK + o
                s = _exact_scores(q, w, k_ptr, scale_ptr, scores_ptr, first, key, S, H, D, BK, SCALED, GIVEN, PRECISION)
                alive = (key < visible) & (s > float("-inf"))
                code = _sortable(s)
                # the bits above this digit must be the prefix's; a shift by 32 is split to stay defined
                alive = alive & (((code >> shift) >> 8) == ((prefix >> shift) >> 8))
                digit = ((code >> shift) & 255).to(tl.int32)
                histogram += tl.histogram(digit, 256, mask=alive)
            if step == 0:
                need = tl.minimum(need, tl.sum(histogram))
            from_top = tl.sum(histogram) - tl.cumsum(histogram, 0) + histogram  # members with digit >= this one
            digit = tl.max(tl.where(from_top >= need, digits, 0))
            need = need - tl.sum(tl.where(digits > digit, histogram, 0))
            prefix = prefix | (digit.to(tl.uint32) << shift)
            shift = tl.where(shift > 0, shift - 8, 0)
        taken = 0
        ties = 0
        base = out_ptr + row.to(tl.int64) * K
        for i in range(tl.cdiv(visible, BK)):
            key = i * BK + o
            s = _exact_scores(q, w, k_ptr, scale_ptr, scores_ptr, first, key, S, H, D, BK, SCALED, GIVEN, PRECISION)
            alive = (key < visible) & (s > float("-inf"))
            code = _sortable(s)
            tied = (alive & (code == prefix)).to(tl.int32)
            take = (alive & (code > prefix)) | ((tied != 0) & (ties + tl.cumsum(tied, 0) <= need))
            counted = take.to(tl.int32)
            place = taken + tl.cumsum(counted, 0) - 1
            tl.store(base + place, key, mask=take & (place < K))
            taken += tl.sum(counted)
            ties += tl.sum(tied)
        for i in range(tl.cdiv(K, BK)):
            place = i * BK + o
            tl.store(base + place, tl.full((BK,), -1, tl.int32), mask=(place >= taken) & (place < K))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a collect pass is cut; `choose_launch` has the measured choices."""

    queries: int
    """BQ: queries of one product; BQ * H is its width."""
    groups: int
    """1, or 2 products a key tile."""
    keys: int
    """BK."""
    warps: int
    stages: int
    per_sm: int
    """Programs that fit a multiprocessor together."""
    tma: bool
    hopper: bool = False
    """The Gluon kernels; for shared keys they run two groups of `queries` however `groups` is set."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one call; everything follows from T, S, k and the launch."""

    splits: int
    sample: int
    """0: every row keeps all its keys."""
    dense: int
    cap: int
    keep_all: int
    """Rows that see at most this many keys skip the threshold."""
    programs: int
    tasks: int


PDL_ROWS = 64
"""Queries up to which launches are a good part of the time."""


@lru_cache(maxsize=8)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 4 stands in for it where Triton interprets on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _power_of_2(n: float) -> int:
    return triton.next_power_of_2(max(1, math.ceil(n)))


def make_plan(blocks: int, columns: int, k: int, *, width: int, slots: int) -> Plan:
    """blocks of queries over `columns` keys in tiles of `width`, on `slots` programs that run at a time."""
    most = max(1, columns // (4 * width))
    splits, best = 1, 0.0
    for candidate in range(1, min(most, max(8, 2 * slots // blocks)) + 1):
        tasks = blocks * candidate
        busy = tasks / (math.ceil(tasks / slots) * slots)
        # fewer splits mean longer runs of keys and fewer lists: more must pay by a tenth
        if busy > best * 1.1 or candidate == 1:
            splits, best = candidate, busy
    tasks = blocks * splits
    lists = width * splits
    if columns <= max(8192, 2 * k):
        dense = _power_of_2(columns)
        cap = math.ceil(math.ceil(columns / width) / splits)
        return Plan(
            splits=splits, sample=0, dense=dense, cap=cap, keep_all=columns, programs=min(tasks, slots), tasks=tasks
        )
    sample = min(16384, max(1024, _power_of_2(6 * columns / k)))
    mean = k * sample / columns
    rank = (mean + 4.5 * mean**0.5 + 4) * 1.125  # the threshold may be an eighth too low
    survivors = rank * columns / sample
    # the sample's quantile wanders by rank^-0.5; six of those and the lists' own Poisson spread are allowed for
    dense = min(_power_of_2(survivors * (1 + 6 * rank**-0.5)), _power_of_2(columns))
    load = survivors / lists * (1 + 2 * rank**-0.5)
    cap = math.ceil(load + 6 * load**0.5 + 3)
    keep_all = min(cap * lists, dense)
    return Plan(
        splits=splits, sample=sample, dense=dense, cap=cap, keep_all=keep_all, programs=min(tasks, slots), tasks=tasks
    )


@lru_cache(maxsize=8)
def has_hopper(device: torch.device) -> bool:
    """A device of compute capability 9 and a Triton whose Gluon has its instructions."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        importlib.import_module("longrecall.kernels.indexer.hopper")
    except (ImportError, AttributeError):
        return False
    return True


def _programmatic(rows: int, device: torch.device) -> dict[str, bool]:
    """Launch arguments of every kernel: programmatic where launches are a good part of the time."""
    if rows > PDL_ROWS or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def choose_launch(q: Tensor, keys: Tensor) -> Launch:
    """By queries, heads and key width; measured on one H200 (docs/benchmarks/indexer.md)."""
    rows, heads, dim = q.shape
    wide = keys.element_size() > 1
    if keys.dtype == torch.float32:
        queries = 1 if keys.ndim == 3 else max(1, min(_power_of_2(rows), 64 // heads))
        return Launch(queries=queries, groups=1, keys=64, warps=8, stages=2, per_sm=1, tma=False)
    small = keys.dtype in (torch.bfloat16, torch.float8_e4m3fn) and 8 <= heads <= 128 and dim <= 128
    if keys.ndim == 3 or rows == 1:
        if small and has_hopper(q.device) and keys.shape[:-1].numel() < 2**31:
            stages = 3 if wide else 6 if keys.ndim == 3 else 4
            return Launch(queries=1, groups=1, keys=128, warps=4, stages=stages, per_sm=2, tma=True, hopper=True)
        return Launch(
            queries=1, groups=1, keys=128, warps=4, stages=3 if wide else 4, per_sm=2 if wide else 3, tma=True
        )
    # a product of one query leaves a lane of each pair without a score: 128 heads take the plain path
    if small and heads <= 64 and rows * heads >= 2048 and has_hopper(q.device):
        return Launch(queries=128 // heads, groups=2, keys=64, warps=4, stages=3, per_sm=2, tma=True, hopper=True)
    queries = max(1, min(_power_of_2(rows), 256 // heads))
    return Launch(queries=queries, groups=1, keys=64, warps=4, stages=2 if wide else 3, per_sm=2, tma=True)


def _check(q: Tensor, keys: Tensor, scale: Tensor | None) -> None:
    heads, dim = q.shape[1:]
    least = 32 // min(q.element_size(), 2)  # what the matrix units take at a time
    if heads & (heads - 1) or dim & (dim - 1) or dim < least:
        raise ValueError(
            f"the GPU path needs powers of two for H and D and, for {q.dtype}, D >= {least}, not H {heads}, D {dim}"
        )
    if q.dtype != keys.dtype:
        raise ValueError(f"q {q.dtype} and keys {keys.dtype} must have one dtype on the GPU path")
    if scale is not None and scale.shape != keys.shape[:-1]:
        raise ValueError(f"scale must be {list(keys.shape[:-1])} for keys {list(keys.shape)}, not {list(scale.shape)}")


def topk_triton(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    k: int,
    *,
    visible: Tensor,
    scale: Tensor | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """As `index_topk`, for q and keys of one dtype (bf16, fp32 or e4m3) and an fp32 scale per key, or None.

    Bitwise repeatable: what atomics gather in any order is sorted by index. Does not wait for the device.
    """
    _check(q, keys, scale)
    q, keys, weights = q.contiguous(), keys.contiguous(), weights.float().contiguous()
    rows, heads, dim = q.shape
    columns, device = keys.shape[-2], q.device
    distinct = keys.ndim == 3
    launch = launch or choose_launch(q, keys)
    visible = visible.to(device=device, dtype=torch.int32)
    block = launch.queries * launch.groups
    plan = make_plan(
        triton.cdiv(rows, block), columns, k, width=launch.keys, slots=launch.per_sm * multiprocessors(device)
    )
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    extra = _programmatic(rows, device)
    # fp32 products run on the ordinary units: half the tile on twice the warps keeps it in registers
    full = q.dtype == torch.float32
    scale_arg = weights if scale is None else scale.contiguous()
    threshold, count = _row_state(rows, plan, device)
    if plan.sample:
        sample = torch.empty(rows, plan.sample, device=device)
        wide = 1 if distinct else max(1, min(_power_of_2(rows), (64 if full else 128) // heads))
        part = max(64, min(plan.sample, plan.sample * triton.cdiv(rows, wide) // (4 * multiprocessors(device))))
        part = min(_power_of_2(part), plan.sample)
        _sample_kernel[(triton.cdiv(rows, wide), plan.sample // part)](
            q, keys, scale_arg, weights, visible, sample, rows, columns, H=heads, D=dim, BQ=wide, BK=64,
            SAMPLE=plan.sample, PART=part, DISTINCT=distinct, SCALED=scale is not None, PRECISION=precision,
            num_warps=8 if full else 4, num_stages=2 if full else 3, **extra,
        )  # fmt: skip
        _threshold_kernel[(rows,)](
            sample, visible, threshold, count, k, plan.keep_all, SAMPLE=plan.sample,
            num_warps=_threshold_warps(rows, plan.sample), **extra,
        )  # fmt: skip
    out = torch.empty(rows, k, device=device, dtype=torch.int32)
    flag = torch.empty(rows, device=device, dtype=torch.int32)
    repair = partial(
        _repair_kernel[(rows,)],
        flag, q, keys, scale_arg, weights, threshold, visible, out, columns, k, H=heads, D=dim, BK=64 if full else 128,
        DISTINCT=distinct, SCALED=scale is not None, GIVEN=False, PRECISION=precision, num_warps=8 if full else 4,
        **extra,
    )  # fmt: skip
    own = distinct or rows == 1
    if launch.hopper and not own:
        _collect_hopper(q, keys, scale, weights, visible, threshold, flag, out, k, launch, plan)
        repair()
        return out
    lists = plan.programs * launch.groups * launch.keys * launch.queries * plan.cap
    lists_values = torch.empty(lists, device=device)
    lists_index = torch.empty(lists, device=device, dtype=torch.int32)
    dense_values = torch.empty(rows, plan.dense, device=device)
    dense_index = torch.empty(rows, plan.dense, device=device, dtype=torch.int32)
    flat = keys.view(-1, dim)
    # a tile of the bulk copy engine must not start past 2^31 rows, and fp32 keys take the plain path
    if launch.hopper:
        _collect_own(
            q, flat, scale, weights, visible, threshold, lists_values, lists_index, dense_values, dense_index, count,
            launch, plan, distinct=distinct,
        )  # fmt: skip
        _finish(plan.dense, dense_values, dense_index, count, visible, flag, out, k, sort=True)
        repair()
        return out
    tma = launch.tma and flat.shape[0] < 2**31 and q.dtype != torch.float32
    source = TensorDescriptor.from_tensor(flat, [launch.keys, dim]) if tma else flat
    _collect_kernel[(plan.programs,)](
        q, source, scale_arg, weights, visible, threshold, lists_values, lists_index, dense_values, dense_index, count,
        rows, columns, plan.tasks, plan.splits, H=heads, D=dim, BQ=launch.queries, BK=launch.keys,
        GROUPS=launch.groups, CAP=plan.cap, DENSE=plan.dense, DISTINCT=distinct, SCALED=scale is not None, TMA=tma,
        STAGES=launch.stages, PRECISION=precision, num_warps=launch.warps, num_stages=launch.stages, **extra,
    )  # fmt: skip
    # lists of one program arrive in a fixed order, those of several in any
    _finish(plan.dense, dense_values, dense_index, count, visible, flag, out, k, sort=plan.splits > 1)
    repair()
    return out


def _collect_hopper(
    q: Tensor, keys: Tensor, scale: Tensor | None, weights: Tensor, visible: Tensor, threshold: Tensor, flag: Tensor,
    out: Tensor, k: int, launch: Launch, plan: Plan,
) -> None:  # fmt: skip
    """Collect and select through `hopper`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    from longrecall.kernels.indexer import hopper

    rows, heads, dim = q.shape
    width = launch.queries * heads
    made = hopper.layouts(
        gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float8e4nv,
        keys=launch.keys, queries=launch.queries, heads=heads, dim=dim,
    )  # fmt: skip
    lists = plan.tasks * 2 * launch.keys * launch.queries
    values = torch.empty(lists * plan.cap, device=q.device)
    index = torch.empty(lists * plan.cap, device=q.device, dtype=torch.int32)
    counts = torch.empty(lists, device=q.device, dtype=torch.int32)
    hopper.collect_kernel[(plan.programs,)](
        GluonDescriptor.from_tensor(q.view(-1, dim), [width, dim], made["q_layout"]),
        GluonDescriptor.from_tensor(keys, [launch.keys, dim], made["k_layout"]),
        weights if scale is None else scale, weights, visible, threshold, values, index, counts, rows, keys.shape[0],
        plan.tasks, plan.splits, H=heads, D=dim, BQ=launch.queries, BK=launch.keys, CAP=plan.cap,
        SCALED=scale is not None, STAGES=launch.stages, num_warps=launch.warps, **made,
    )  # fmt: skip
    cap = _power_of_2(plan.cap)
    slots = _power_of_2(plan.splits) * launch.keys * cap
    _select_lists_kernel[(rows,)](
        values, index, counts, visible, flag, out, k, plan.splits, KP=_power_of_2(k), BQ=launch.queries,
        BK=launch.keys, CAP=plan.cap, CAP_P=cap, SLOTS=slots, SORT=False,
        num_warps=max(4, slots // 2048) if rows > 256 else min(16, max(4, slots // 512)),
        **_programmatic(rows, q.device),
    )  # fmt: skip


def _collect_own(
    q: Tensor, keys: Tensor, scale: Tensor | None, weights: Tensor, visible: Tensor, threshold: Tensor, values: Tensor,
    index: Tensor, dense_values: Tensor, dense_index: Tensor, count: Tensor, launch: Launch, plan: Plan, *,
    distinct: bool,
) -> None:  # fmt: skip
    """Collect through `hopper.collect_own_kernel`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    from longrecall.kernels.indexer import hopper

    rows, heads, dim = q.shape
    made = hopper.layouts(
        gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float8e4nv, keys=launch.keys, queries=1, heads=heads, dim=dim
    )
    extra = _programmatic(rows, q.device)
    hopper.collect_own_kernel[(plan.programs,)](
        GluonDescriptor.from_tensor(q.view(-1, dim), [heads, dim], made["q_layout"]),
        GluonDescriptor.from_tensor(keys, [launch.keys, dim], made["k_layout"]),
        weights if scale is None else scale, weights, visible, threshold, values, index, dense_values, dense_index,
        count, rows, keys.shape[0] // rows if distinct else keys.shape[0], plan.tasks, plan.splits, H=heads, D=dim,
        BK=launch.keys, CAP=plan.cap, DENSE=plan.dense, OVERFLOW=OVERFLOW.value, DISTINCT=distinct,
        SCALED=scale is not None, STAGES=launch.stages, EARLY=plan.sample > 0, num_warps=launch.warps, **extra, **made,
    )  # fmt: skip


def _row_state(rows: int, plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Threshold and count of each row; the threshold kernel fills them where there is one."""
    if plan.sample:
        return torch.empty(rows, device=device), torch.empty(rows, device=device, dtype=torch.int32)
    lowest = torch.full((rows,), float(LOWEST.value), device=device)
    return lowest, torch.zeros(rows, device=device, dtype=torch.int32)


def _finish(
    dense: int,
    values: Tensor,
    index: Tensor,
    count: Tensor,
    visible: Tensor,
    flag: Tensor,
    out: Tensor,
    k: int,
    *,
    sort: bool,
) -> None:
    _select_kernel[(out.shape[0],)](
        values, index, count, visible, flag, out, k, KP=_power_of_2(k), DENSE=dense, SORT=sort,
        num_warps=4 if out.shape[0] > 256 else min(16, max(4, dense // 512)), **_programmatic(out.shape[0], out.device),
    )  # fmt: skip


STREAM_BLOCK, STREAM_WARPS, STREAM_STAGES, STREAM_PER_SM = 1024, 8, 4, 6
"""Block of scores, warps, pipeline depth and programs a multiprocessor of the pass over given scores."""


def _threshold_warps(rows: int, sample: int) -> int:
    """Few rows want latency, many rows want room."""
    return 4 if rows > 256 else min(32, max(4, sample // 512))


def select_triton(scores: Tensor, k: int, *, visible: Tensor | None = None) -> Tensor:
    """As `select_topk`, on a GPU: scores [T, S] fp32 (left as they are) → int32 [T, k]."""
    scores = scores.contiguous()
    rows, columns = scores.shape
    device = scores.device
    if visible is None:
        visible = torch.full((rows,), columns, device=device, dtype=torch.int32)
    visible = visible.to(device=device, dtype=torch.int32)
    out = torch.empty(rows, k, device=device, dtype=torch.int32)
    extra = _programmatic(rows, device)
    if columns <= 8192 and k <= columns:
        width = _power_of_2(columns)
        _small_kernel[(rows,)](
            scores,
            visible,
            out,
            columns,
            k,
            KP=_power_of_2(k),
            WIDTH=width,
            SORT=False,
            num_warps=min(16, max(4, width // 512)),
            **extra,
        )
        return out
    step = STREAM_BLOCK // 4
    plan = make_plan(rows, columns, k, width=step, slots=STREAM_PER_SM * multiprocessors(device))
    threshold, count = _row_state(rows, plan, device)
    if plan.sample:
        _row_threshold_kernel[(rows,)](
            scores, visible, threshold, count, columns, k, plan.keep_all, SAMPLE=plan.sample,
            num_warps=_threshold_warps(rows, plan.sample), **extra,
        )  # fmt: skip
    cap = 4 * triton.cdiv(plan.cap, 4)  # four keys of a block share a list
    dense_values = torch.empty(rows, plan.dense, device=device)
    dense_index = torch.empty(rows, plan.dense, device=device, dtype=torch.int32)
    lists_values = torch.empty(plan.programs * step * cap, device=device)
    lists_index = torch.empty(plan.programs * step * cap, device=device, dtype=torch.int32)
    flag = torch.empty(rows, device=device, dtype=torch.int32)
    _stream_kernel[(plan.programs,)](
        scores, visible, threshold, lists_values, lists_index, dense_values, dense_index, count, columns,
        plan.tasks, plan.splits, BLOCK=STREAM_BLOCK, CAP=cap, DENSE=plan.dense, STAGES=STREAM_STAGES,
        num_warps=STREAM_WARPS, **extra,
    )  # fmt: skip
    _finish(plan.dense, dense_values, dense_index, count, visible, flag, out, k, sort=plan.splits > 1)
    _repair_kernel[(rows,)](
        flag, scores, scores, scores, scores, scores, visible, out, columns, k, H=1, D=16, BK=1024, DISTINCT=True,
        SCALED=False, GIVEN=True, PRECISION="tf32", num_warps=8, **extra,
    )  # fmt: skip
    return out


def topk_device(q: Tensor | Packed, keys: Packed, weights: Tensor, k: int, *, visible: Tensor) -> Tensor:
    """`index_topk` on a GPU, for every format: fp8 with fp8 as bytes, everything else through exact bf16 or fp32."""
    if keys.fmt.startswith("fp8") and keys.fmt != "fp8_fnuz" and isinstance(q, Packed) and q.fmt == keys.fmt:
        assert keys.scale is not None
        fp8 = torch.float8_e4m3fn
        scale = keys.scale.squeeze(-1)
        return topk_triton(q.data.view(fp8), keys.data.view(fp8), weights, k, visible=visible, scale=scale)
    if isinstance(q, Packed):
        q = decode_bytes(q.data, "e4m3fn", torch.bfloat16)
    if keys.fmt in ("fp32", "bf16"):
        wide = torch.float32 if torch.float32 in (q.dtype, keys.data.dtype) else torch.bfloat16
        return topk_triton(q.to(wide), keys.data.to(wide), weights, k, visible=visible)
    values = dequantize(Packed(fmt=keys.fmt, data=keys.data, scale=keys.scale, global_scale=keys.global_scale))
    # fp4 values are exact in bf16; an fp8 value times an fp32 scale is not, so its scale stays outside
    if keys.fmt.startswith("fp8"):
        assert keys.scale is not None
        encoding = "e4m3fnuz" if keys.fmt == "fp8_fnuz" else "e4m3fn"
        values = decode_bytes(keys.data, encoding, torch.bfloat16)
        return topk_triton(q.bfloat16(), values, weights, k, visible=visible, scale=keys.scale.squeeze(-1))
    if keys.global_scale is not None:
        values, weights = values / keys.global_scale, weights * keys.global_scale
    return topk_triton(q.bfloat16(), values.bfloat16(), weights, k, visible=visible)
