"""The collect pass written in Gluon for Hopper's asynchronous matrix units: same contract as `kernel._collect_kernel`.

For many queries over shared keys (`collect_kernel`, up to the lists, which `kernel._select_lists_kernel` reads as they
are): while the scores of two queries are reduced and filtered, the product of the next two already runs, so the matrix
units wait for nobody; and each thread owns one score of the tile, reached without shared memory. For one query, or
queries with keys of their own (`collect_own_kernel`), bytes decide: a tile takes three barriers while up to six more
are on their way, and the first keys arrive while the threshold is still being found.

A program streams key tiles of BK rows through STAGES buffers (bulk copies, one barrier each) past resident queries.
Keys are the rows of the product, so the H heads of a query lie in one thread quad: two shuffles sum them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Renamed since Triton 3.6, whose names later versions refuse.
bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _fetch(k_desc, k_smem, bars, n, row, wanted, STAGES: gl.constexpr, BYTES: gl.constexpr):
    slot = n % STAGES
    mbarrier.expect(bars.index(slot), BYTES, pred=wanted)
    bulk_load(k_desc, [row, 0], bars.index(slot), k_smem.index(slot), pred=wanted)


@gluon.jit
def _reduce(acc, w, BK: gl.constexpr, BQ: gl.constexpr, H: gl.constexpr, layout: gl.constexpr):
    """Products [BK, BQ * H] → scores [BK, BQ]. x + |x| is 2 relu(x), at twice the rate of a maximum; w holds halves."""
    x = (acc + gl.abs(acc)) * w[None, :]
    # two steps, so that a thread sums in several chains at once
    s = gl.sum(gl.reshape(x, [BK, BQ, H // 8, 8]), 2)
    s = gl.sum(s, 2)
    return gl.convert_layout(s, layout)


@gluon.jit
def _append(s, key, threshold, visible, position, values_ptr, index_ptr, STEP: gl.constexpr, CAP: gl.constexpr):
    take = (s >= threshold[None, :]) & (key[:, None] < visible[None, :])
    fits = take & (position < CAP * STEP)
    gl.store(values_ptr + position, s, mask=fits)
    gl.store(index_ptr + position, key[:, None] + gl.zeros_like(position), mask=fits)
    return gl.where(take, position + STEP, position)


@gluon.jit
def collect_kernel(
    q_desc, k_desc, scale_ptr, w_ptr, visible_ptr, threshold_ptr, values_ptr, index_ptr, counts_ptr,
    T, S, tasks, splits,
    H: gl.constexpr, D: gl.constexpr, BQ: gl.constexpr, BK: gl.constexpr, CAP: gl.constexpr, SCALED: gl.constexpr,
    STAGES: gl.constexpr, dtype: gl.constexpr, layout: gl.constexpr, mma: gl.constexpr, k_layout: gl.constexpr,
    q_layout: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tasks = blocks of 2 * BQ queries x splits of the keys.

    Lists of a task: [2, CAP, BK, BQ] slots; counts [tasks, 2, BK, BQ].
    """
    N: gl.constexpr = BQ * H
    STEP: gl.constexpr = BK * BQ
    BYTES: gl.constexpr = BK * D * dtype.primitive_bitwidth // 8
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    columns_layout: gl.constexpr = gl.SliceLayout(0, layout)
    w_layout: gl.constexpr = gl.SliceLayout(0, mma)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BK, D], k_layout)
    q_smem = gl.allocate_shared_memory(dtype, [2, N, D], q_layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    mbarrier.init(q_bar, count=1)
    fence_async_shared()
    o_r = gl.arange(0, BK, layout=rows_layout)
    o_q = gl.arange(0, BQ, layout=columns_layout)
    o_n = gl.arange(0, N, layout=w_layout)
    start = o_r[:, None] * BQ + o_q[None, :]
    n = 0  # tiles fetched by this program so far: buffer n % STAGES, phase n // STAGES
    turn = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        row = (task // splits) * (2 * BQ)
        mbarrier.expect(q_bar, 2 * N * D * dtype.primitive_bitwidth // 8)
        bulk_load(q_desc, [row * H, 0], q_bar, q_smem.index(0))
        bulk_load(q_desc, [row * H + N, 0], q_bar, q_smem.index(1))
        m0 = row + o_q < T
        m1 = row + BQ + o_q < T
        visible0 = gl.minimum(gl.load(visible_ptr + row + o_q, mask=m0, other=0), S)
        visible1 = gl.minimum(gl.load(visible_ptr + row + BQ + o_q, mask=m1, other=0), S)
        threshold0 = gl.load(threshold_ptr + row + o_q, mask=m0, other=0.0)
        threshold1 = gl.load(threshold_ptr + row + BQ + o_q, mask=m1, other=0.0)
        w0 = gl.load(w_ptr + row * H + o_n, mask=row * H + o_n < T * H, other=0.0) * 0.5
        w1 = gl.load(w_ptr + row * H + N + o_n, mask=row * H + N + o_n < T * H, other=0.0) * 0.5
        limit = gl.maximum(gl.max(visible0, 0), gl.max(visible1, 0))
        share = gl.cdiv(gl.cdiv(limit, BK), splits)
        low = (task % splits) * share
        high = gl.minimum(low + share, gl.cdiv(limit, BK))
        base = task.to(gl.int64) * (2 * STEP * CAP)  # type: ignore[attr-defined]  # a tensor once compiled
        values0, index0 = values_ptr + base, index_ptr + base
        values1, index1 = values0 + STEP * CAP, index0 + STEP * CAP
        position0 = start
        position1 = start
        mbarrier.wait(q_bar, turn & 1)
        turn += 1
        if low < high:
            for ahead in gl.static_range(STAGES - 1):
                _fetch(k_desc, k_smem, bars, n + ahead, (low + ahead) * BK, low + ahead < high, STAGES, BYTES)
            key = low * BK + o_r
            if SCALED:
                scale = gl.load(scale_ptr + key, mask=key < S, other=0.0)
            for i in range(low, high):
                key = i * BK + o_r
                if SCALED:
                    following = gl.load(scale_ptr + key + BK, mask=key + BK < S, other=0.0)
                mbarrier.wait(bars.index(n % STAGES), (n // STAGES) & 1)
                tile = k_smem.index(n % STAGES)
                zero = gl.zeros([BK, N], gl.float32, mma)
                acc0 = warpgroup_mma(
                    tile, q_smem.index(0).permute((1, 0)), warpgroup_mma_init(zero), use_acc=False, is_async=True
                )
                acc1 = warpgroup_mma(
                    tile, q_smem.index(1).permute((1, 0)), warpgroup_mma_init(zero), use_acc=False, is_async=True
                )
                dots0 = warpgroup_mma_wait(1, deps=[acc0])
                # every warp has passed the products of tile i - 1, whose buffer the next fetch fills
                thread_barrier()
                after = i + STAGES - 1
                _fetch(k_desc, k_smem, bars, n + STAGES - 1, after * BK, after < high, STAGES, BYTES)
                s0 = _reduce(dots0, w0, BK, BQ, H, layout)
                if SCALED:
                    s0 = s0 * scale[:, None]
                position0 = _append(s0, key, threshold0, visible0, position0, values0, index0, STEP, CAP)
                dots1 = warpgroup_mma_wait(0, deps=[acc1])
                s1 = _reduce(dots1, w1, BK, BQ, H, layout)
                if SCALED:
                    s1 = s1 * scale[:, None]
                    scale = following
                position1 = _append(s1, key, threshold1, visible1, position1, values1, index1, STEP, CAP)
                n += 1
        o = task * (2 * STEP) + start
        gl.store(counts_ptr + o, (position0 - start) // STEP)
        gl.store(counts_ptr + o + STEP, (position1 - start) // STEP)
        thread_barrier()  # the next task's queries overwrite these


@gluon.jit
def _tile(i, turned, tiles):
    """Place among a query's tiles of the i-th that is swept."""
    i += turned
    return gl.where(i >= tiles, i - tiles, i)


@gluon.jit
def collect_own_kernel(
    q_desc, k_desc, scale_ptr, w_ptr, visible_ptr, threshold_ptr, values_ptr, index_ptr,
    dense_values_ptr, dense_index_ptr, count_ptr, T, S, tasks, splits,
    H: gl.constexpr, D: gl.constexpr, BK: gl.constexpr, CAP: gl.constexpr, DENSE: gl.constexpr, OVERFLOW: gl.constexpr,
    DISTINCT: gl.constexpr, SCALED: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
    dtype: gl.constexpr, layout: gl.constexpr, mma: gl.constexpr, k_layout: gl.constexpr, q_layout: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs over tasks = queries x splits of the keys, for a query alone or with its own keys.

    Fills the dense buffers of `kernel._collect_kernel`. Lists of a program: [CAP, BK] slots. With EARLY, what precedes
    in the stream is this call's own kernels, so keys are fetched before the threshold is waited for.
    """
    BYTES: gl.constexpr = BK * D * dtype.primitive_bitwidth // 8
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    columns_layout: gl.constexpr = gl.SliceLayout(0, layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BK, D], k_layout)
    q_smem = gl.allocate_shared_memory(dtype, [H, D], q_layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    mbarrier.init(q_bar, count=1)
    fence_async_shared()
    o_r = gl.arange(0, BK, layout=rows_layout)
    o_q = gl.arange(0, 1, layout=columns_layout)
    o_n = gl.arange(0, H, layout=gl.SliceLayout(0, mma))
    start = o_r[:, None] + o_q[None, :]
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    base = gl.program_id(0).to(gl.int64) * (BK * CAP)
    values_ptr += base
    index_ptr += base
    n = 0
    turn = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        row = task // splits
        visible = gl.minimum(gl.load(visible_ptr + row + o_q), S)
        limit = gl.max(visible, 0)
        tiles = gl.cdiv(limit, BK)
        # the splits of a query take turns, so that they sweep its keys as one stream; each query begins elsewhere
        low = task % splits
        turned = (row % 8192 * 40503) % gl.maximum(tiles, 1)
        first = 0
        if DISTINCT:
            first = row * S
        mbarrier.expect(q_bar, H * D * dtype.primitive_bitwidth // 8)
        bulk_load(q_desc, [row * H, 0], q_bar, q_smem)
        for ahead in gl.static_range(STAGES):
            _fetch(
                k_desc,
                k_smem,
                bars,
                n + ahead,
                first + _tile(low + ahead * splits, turned, tiles) * BK,
                low + ahead * splits < tiles,
                STAGES,
                BYTES,
            )
        w = gl.load(w_ptr + row * H + o_n) * 0.5
        if SCALED:
            source = scale_ptr + first + gl.zeros([BK], gl.int64, rows_layout) + o_r
            tile = _tile(low, turned, tiles)
            scale = gl.load(source + tile * BK, mask=tile * BK + o_r < S, other=0.0)
        if PDL:
            gdc_wait()
        threshold = gl.load(threshold_ptr + row + o_q)
        position = start
        mbarrier.wait(q_bar, turn & 1)
        turn += 1
        for i in range(low, tiles, splits):
            key = _tile(i, turned, tiles) * BK + o_r
            if SCALED:
                tile = _tile(i + splits, turned, tiles)
                following = gl.load(source + tile * BK, mask=(tile * BK + o_r < S) & (i + splits < tiles), other=0.0)
            mbarrier.wait(bars.index(n % STAGES), (n // STAGES) & 1)
            zero = gl.zeros([BK, H], gl.float32, mma)
            acc = warpgroup_mma(
                k_smem.index(n % STAGES), q_smem.permute((1, 0)), warpgroup_mma_init(zero), use_acc=False, is_async=True
            )
            dots = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()  # every warp has passed the product, whose buffer the next fetch fills
            after = i + STAGES * splits
            _fetch(
                k_desc, k_smem, bars, n + STAGES, first + _tile(after, turned, tiles) * BK, after < tiles, STAGES, BYTES
            )
            s = _reduce(dots, w, BK, 1, H, layout)
            if SCALED:
                s = s * scale[:, None]
                scale = following
            position = _append(s, key, threshold, visible, position, values_ptr, index_ptr, BK, CAP)
            n += 1
        _pack_own(
            position,
            start,
            row,
            values_ptr,
            index_ptr,
            dense_values_ptr,
            dense_index_ptr,
            count_ptr,
            BK,
            CAP,
            DENSE,
            OVERFLOW,
        )
        thread_barrier()  # the next task's query overwrites this one


@gluon.jit
def _pack_own(
    position, start, row, values_ptr, index_ptr, dense_values_ptr, dense_index_ptr, count_ptr,
    BK: gl.constexpr, CAP: gl.constexpr, DENSE: gl.constexpr, OVERFLOW: gl.constexpr,
):  # fmt: skip
    """Each thread's lists to the end of the row's buffer: few lists hold anything, so one atomic for each that does."""
    count = (position - start) // BK
    kept = gl.minimum(count, CAP)
    most = gl.max(gl.max(count, 0), 0)
    added = kept + gl.where((start == 0) & (most > CAP), OVERFLOW, 0)
    target = gl.atomic_add(count_ptr + row + gl.zeros_like(start), added, mask=added > 0, sem="relaxed")
    o_row = row.to(gl.int64) * DENSE
    for c in range(0, gl.minimum(most, CAP)):
        m = c < kept
        s = gl.load(values_ptr + start + c * BK, mask=m, other=0.0)
        i = gl.load(index_ptr + start + c * BK, mask=m, other=0)
        m = m & (target + c < DENSE) & (target + c >= 0)
        gl.store(dense_values_ptr + o_row + target + c, s, mask=m)
        gl.store(dense_index_ptr + o_row + target + c, i, mask=m)


def layouts(dtype, *, keys: int, queries: int, heads: int, dim: int) -> dict[str, object]:
    """The layouts of a launch: products, the one-score-per-thread tile, shared keys and queries. 4 warps."""
    width = queries * heads
    depth = 256 // dtype.primitive_bitwidth
    mma = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, depth])
    # a product leaves row lane // 4 (and + 8, + 64, …) in each lane of a quad: its lanes share out rows and queries
    rows = [[1, 0], [2, 0], [4, 0]]
    spare = [[0, 1 << b] for b in range(queries.bit_length() - 1)] + [[8, 0]]
    spare += [[64 << b, 0] for b in range((keys // 64).bit_length() - 1)]
    layout = gl.DistributedLinearLayout(
        reg_bases=spare[2:],
        lane_bases=spare[:2] + rows,
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[keys, queries],
    )
    return {
        "mma": mma,
        "layout": layout,
        "k_layout": gl.NVMMASharedLayout.get_default_for([keys, dim], dtype),
        "q_layout": gl.NVMMASharedLayout.get_default_for([width, dim], dtype),
        "dtype": dtype,
    }
