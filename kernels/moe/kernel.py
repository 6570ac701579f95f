"""Triton kernels of the expert path, and the torch code that launches them.

    K1 _plan_kernel       offsets [E + 1] -> blocks [E], running count of row blocks up to and with each expert
       _small_plan_kernel the whole plan from idx in one launch, for decode sizes
    K2 _gate_up_kernel    x [T, C], W13 -> h [T K, F] in expert order; SwiGLU with its clamp in the epilogue
    K3 _down_kernel       h, W2 -> y [T K, C] back in token order, times the top-k weight
    K4 _sum_reduce_kernel y [T, K, C] -> out [T, C] times the factor

Rows are (token, slot) pairs sorted by expert. Grid of K2 and K3: (row blocks x column blocks,), columns fastest, so
the programs that run together share a row block and a second row block of an expert finds its weights in L2. The
number of row blocks is only known on the GPU; the grid is its upper bound and programs past it return at once.
Weights are read exactly once when an expert has one row block: at decode sizes the path is a stream over the active
experts' weights.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longrecall.kernels.moe.routing import TopK


class Tile(NamedTuple):
    """Block sizes and pipelining of one GEMM launch."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    tma: bool = False
    """Weights through the bulk tensor copy engine instead of per-thread loads."""


class Tiles(NamedTuple):
    """A tile for each of the two GEMMs; K2's n counts gate columns, so it loads twice as many rows of W13."""

    gate_up: Tile
    down: Tile


def tiles_for(rows_per_expert: float, element_size: int = 2) -> Tiles:
    """Tiles by the mean number of rows of an active expert.

    The fastest of 20 to 24 tried per GEMM on an H200 at 1.5, 24 and 96 rows (docs/benchmarks/moe.md). fp32 weights
    halve the depth, so that a pipeline stage keeps its bytes.
    """
    k = 2 if element_size > 2 else 1
    if rows_per_expert <= 16:
        return Tiles(Tile(16, 32, 128 // k, 4, 4), Tile(16, 64, 128 // k, 4, 4))
    if rows_per_expert <= 64:
        return Tiles(Tile(64, 64, 64 // k, 4, 3, True), Tile(64, 128, 64 // k, 4, 3, True))
    return Tiles(Tile(128, 128, 64 // k, 8, 4, True), Tile(128, 256, 64 // k, 8, 4, True))


@triton.jit
def _plan_kernel(p_offsets, p_blocks, E, BLOCK_M: tl.constexpr, E_POW2: tl.constexpr):
    o_e = tl.arange(0, E_POW2)
    m_e = o_e < E
    low = tl.load(p_offsets + o_e, mask=m_e, other=0)
    high = tl.load(p_offsets + o_e + 1, mask=m_e, other=0)
    tl.store(p_blocks + o_e, tl.cumsum((high - low + BLOCK_M - 1) // BLOCK_M, 0), mask=m_e)


@triton.jit
def _small_plan_kernel(
    p_idx,
    p_order,
    p_offsets,
    p_blocks,
    N,
    E,
    BLOCK_M: tl.constexpr,
    N_POW2: tl.constexpr,
    E_POW2: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_n = tl.arange(0, N_POW2)
    m_n = o_n < N
    expert = tl.load(p_idx + o_n, mask=m_n, other=E_POW2 - 1).to(tl.int32)
    if tl.program_id(0) == 0:
        o_e = tl.arange(0, E_POW2)
        # padding was counted with the last bin
        count = tl.histogram(expert, E_POW2) - tl.where(o_e == E_POW2 - 1, N_POW2 - N, 0)
        m_e = o_e < E
        after = tl.cumsum(count, 0)
        tl.store(p_offsets + o_e, after - count, mask=m_e)
        tl.store(p_offsets + o_e + 1, after, mask=o_e == E - 1)
        tl.store(p_blocks + o_e, tl.cumsum((count + BLOCK_M - 1) // BLOCK_M, 0), mask=m_e)
    else:
        # a pair's place is the number of pairs before it: smaller expert, or the same one and earlier
        o_r = (tl.program_id(0) - 1) * ROWS + tl.arange(0, ROWS)
        m_r = o_r < N
        own = tl.load(p_idx + o_r, mask=m_r, other=0).to(tl.int32)
        same = expert[None, :] == own[:, None]  # [ROWS, N_POW2]
        before = (expert[None, :] < own[:, None]) | (same & (o_n[None, :] < o_r[:, None]))
        tl.store(p_order + tl.sum((before & m_n[None, :]).to(tl.int32), 1), o_r, mask=m_r)


@triton.jit
def _rows_of_block(p_offsets, p_blocks, i_block, E, BLOCK_M: tl.constexpr, E_POW2: tl.constexpr):
    """Expert of a row block (E: past the last), its first row and the end of the expert's rows."""
    o_e = tl.arange(0, E_POW2)
    blocks = tl.load(p_blocks + o_e, mask=o_e < E, other=2147483647)
    expert = tl.sum((blocks <= i_block).to(tl.int32), 0)
    before = tl.max(tl.where(blocks <= i_block, blocks, 0), 0)
    start = tl.load(p_offsets + expert, mask=expert < E, other=0)
    end = tl.load(p_offsets + expert + 1, mask=expert < E, other=0)
    return expert, start + (i_block - before) * BLOCK_M, end


@triton.jit
def _gate_up_kernel(
    p_x,
    p_w,
    p_h,
    p_order,
    p_offsets,
    p_blocks,
    E,
    C,
    F,
    limit,
    NUM_TOPK: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n_blocks = tl.cdiv(F, BLOCK_N)
    i_block, i_n = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    expert, first, end = _rows_of_block(p_offsets, p_blocks, i_block, E, BLOCK_M, E_POW2)
    if expert < E:
        o_m = first + tl.arange(0, BLOCK_M)
        m_m = o_m < end
        token = tl.load(p_order + o_m, mask=m_m, other=0) // NUM_TOPK  # [BLOCK_M]
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = o_n < F
        o_k = tl.arange(0, BLOCK_K)
        p_a = p_x + token.to(tl.int64)[:, None] * C + o_k[None, :]
        i_row = expert * 2 * F + i_n * BLOCK_N
        if not TMA:
            p_g = p_w + (expert.to(tl.int64) * 2 * F + o_n)[None, :] * C + o_k[:, None]  # [BLOCK_K, BLOCK_N]
            p_u = p_g + F.to(tl.int64) * C
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, C, BLOCK_K):
            m_k = o_k < C - k
            if EVEN_K:
                a = tl.load(p_a, mask=m_m[:, None], other=0.0)
            else:
                a = tl.load(p_a, mask=m_m[:, None] & m_k[None, :], other=0.0)
            if TMA:
                g = p_w.load([i_row, k]).T
                u = p_w.load([i_row + F, k]).T
            else:
                if EVEN_K and EVEN_N:
                    g = tl.load(p_g)
                    u = tl.load(p_u)
                else:
                    g = tl.load(p_g, mask=m_k[:, None] & m_n[None, :], other=0.0)
                    u = tl.load(p_u, mask=m_k[:, None] & m_n[None, :], other=0.0)
                p_g += BLOCK_K
                p_u += BLOCK_K
            gate = tl.dot(a, g, gate, input_precision=PRECISION)
            up = tl.dot(a, u, up, input_precision=PRECISION)
            p_a += BLOCK_K
        if HAS_LIMIT:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        h = gate / (1.0 + tl.exp(-gate)) * up
        p_out = p_h + o_m.to(tl.int64)[:, None] * F + o_n[None, :]
        tl.store(p_out, h.to(p_h.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _down_kernel(
    p_h,
    p_w,
    p_y,
    p_order,
    p_weights,
    p_offsets,
    p_blocks,
    E,
    C,
    F,
    WEIGHTED: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    E_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n_blocks = tl.cdiv(C, BLOCK_N)
    i_block, i_n = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    expert, first, end = _rows_of_block(p_offsets, p_blocks, i_block, E, BLOCK_M, E_POW2)
    if expert < E:
        o_m = first + tl.arange(0, BLOCK_M)
        m_m = o_m < end
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = o_n < C
        o_k = tl.arange(0, BLOCK_K)
        p_a = p_h + o_m.to(tl.int64)[:, None] * F + o_k[None, :]
        i_row = expert * C + i_n * BLOCK_N
        if not TMA:
            p_b = p_w + (expert.to(tl.int64) * C + o_n)[None, :] * F + o_k[:, None]  # [BLOCK_K, BLOCK_N]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, F, BLOCK_K):
            m_k = o_k < F - k
            if EVEN_K:
                a = tl.load(p_a, mask=m_m[:, None], other=0.0)
            else:
                a = tl.load(p_a, mask=m_m[:, None] & m_k[None, :], other=0.0)
            if TMA:
                b = p_w.load([i_row, k]).T
            else:
                if EVEN_K and EVEN_N:
                    b = tl.load(p_b)
                else:
                    b = tl.load(p_b, mask=m_k[:, None] & m_n[None, :], other=0.0)
                p_b += BLOCK_K
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            p_a += BLOCK_K
        row = tl.load(p_order + o_m, mask=m_m, other=0)  # [BLOCK_M], token * K + slot
        if WEIGHTED:
            acc = acc * tl.load(p_weights + row, mask=m_m, other=0.0)[:, None]
        p_out = p_y + row.to(tl.int64)[:, None] * C + o_n[None, :]
        tl.store(p_out, acc.to(p_y.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def _sum_reduce_kernel(
    p_y,
    p_weights,
    p_out,
    C,
    factor,
    NUM_TOPK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN_C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    acc = tl.zeros((BLOCK_C,), tl.float32)
    for k in tl.static_range(NUM_TOPK):
        if EVEN_C:
            y = tl.load(p_y + (i_t * NUM_TOPK + k) * C + o_c)
        else:
            y = tl.load(p_y + (i_t * NUM_TOPK + k) * C + o_c, mask=m_c, other=0.0)
        if WEIGHTED:
            acc += y.to(tl.float32) * tl.load(p_weights + i_t * NUM_TOPK + k)
        else:
            acc += y.to(tl.float32)
    tl.store(p_out + i_t * C + o_c, (acc * factor).to(p_out.dtype.element_ty), mask=m_c)


class Plan(NamedTuple):
    """Rows sorted by expert."""

    order: Tensor
    """int32 [T K]: token * K + slot, in expert order, tokens rising within an expert."""
    offsets: Tensor
    """int32 [E + 1]: expert e owns order[offsets[e] : offsets[e + 1]]."""
    blocks: Tensor
    """int32 [E]: row blocks of experts 0..e."""
    max_blocks: int


_SMALL_PLAN = 1024
"""(token, slot) pairs up to which ranking every pair against every other beats a sort."""


def make_plan(idx: Tensor, num_experts: int, block_m: int) -> Plan:
    """Sort the (token, slot) pairs of idx [T, K] by expert; nothing is read back to the host."""
    flat = idx.reshape(-1)
    N, E = flat.numel(), num_experts
    # every active expert may waste part of one block
    max_blocks = min(E, N) + N // block_m
    blocks = torch.empty(E, dtype=torch.int32, device=idx.device)
    e_pow2 = triton.next_power_of_2(E)
    if N <= _SMALL_PLAN:
        order = torch.empty(N, dtype=torch.int32, device=idx.device)
        offsets = torch.empty(E + 1, dtype=torch.int32, device=idx.device)
        rows, n_pow2 = 16, max(16, triton.next_power_of_2(N))
        _small_plan_kernel[(1 + triton.cdiv(N, rows),)](
            flat, order, offsets, blocks, N, E, BLOCK_M=block_m, N_POW2=n_pow2, E_POW2=e_pow2, ROWS=rows
        )
        return Plan(order, offsets, blocks, max_blocks)
    experts, order = torch.sort(flat.to(torch.int32), stable=True)
    edges = torch.arange(E + 1, dtype=torch.int32, device=idx.device)
    offsets = torch.searchsorted(experts, edges, out_int32=True)
    _plan_kernel[(1,)](offsets, blocks, E, BLOCK_M=block_m, E_POW2=e_pow2)
    return Plan(order.to(torch.int32), offsets, blocks, max_blocks)


def _through_tma(weights: Tensor, tile: Tile) -> bool:
    # the copy engine wants rows that are multiples of 16 bytes
    return tile.tma and weights.shape[-1] * weights.element_size() % 16 == 0


def _weights_argument(weights: Tensor, tile: Tile) -> Tensor | TensorDescriptor:
    """[E, N, K] weights as a pointer, or as a descriptor of their [E N, K] rows; past the end it reads zeros."""
    if not _through_tma(weights, tile):
        return weights
    return TensorDescriptor.from_tensor(weights.view(-1, weights.shape[-1]), [tile.n, tile.k])


def _gemm_options(x: Tensor, weights: Tensor, tile: Tile, *, columns: int) -> dict[str, bool | int | str]:
    """What both GEMMs are launched with; columns: of the output."""
    return {
        "TMA": _through_tma(weights, tile),
        "EVEN_N": columns % tile.n == 0,
        "EVEN_K": weights.shape[2] % tile.k == 0,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",  # tl.dot's default for fp32 is TF32, 3e-4 off
        "E_POW2": triton.next_power_of_2(weights.shape[0]),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def gate_up(x: Tensor, w13: Tensor, plan: Plan, num_topk: int, tile: Tile, limit: float | None) -> Tensor:
    """K2: x [T, C], w13 [E, 2F, C] -> h [T K, F] in expert order."""
    (T, C), E, F = x.shape, w13.shape[0], w13.shape[1] // 2
    h = torch.empty(T * num_topk, F, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(plan.max_blocks * triton.cdiv(F, tile.n),)](
        x,
        _weights_argument(w13, tile),
        h,
        plan.order,
        plan.offsets,
        plan.blocks,
        E,
        C,
        F,
        0.0 if limit is None else limit,
        NUM_TOPK=num_topk,
        HAS_LIMIT=limit is not None,
        **_gemm_options(x, w13, tile, columns=F),
    )
    return h


def down(h: Tensor, w2: Tensor, topk_weights: Tensor | None, plan: Plan, tile: Tile) -> Tensor:
    """K3: h [T K, F] in expert order, w2 [E, C, F] -> [T K, C] in token order, times the weights when given."""
    E, C, F = w2.shape
    y = torch.empty(h.shape[0], C, dtype=h.dtype, device=h.device)
    _down_kernel[(plan.max_blocks * triton.cdiv(C, tile.n),)](
        h,
        _weights_argument(w2, tile),
        y,
        plan.order,
        h if topk_weights is None else topk_weights,
        plan.offsets,
        plan.blocks,
        E,
        C,
        F,
        WEIGHTED=topk_weights is not None,
        **_gemm_options(h, w2, tile, columns=C),
    )
    return y


def moe_experts_triton(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk: TopK,
    *,
    swiglu_limit: float | None = None,
    weighted: bool = True,
    tiles: Tiles | None = None,
) -> Tensor:
    """`moe_experts` on a GPU (or Triton's interpreter): plain contiguous weights in x's dtype; shapes checked there."""
    T, C = x.shape
    K, E = topk.idx.shape[1], w13.shape[0]
    if w13.dtype != x.dtype or w2.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, w13 {w13.dtype}, w2 {w2.dtype}; the Triton path wants one dtype")
    if T == 0:
        return x.new_empty(T, K, C)
    tiles = tiles or tiles_for(T * K / min(E, T * K), x.element_size())
    if tiles.gate_up.m != tiles.down.m:
        raise ValueError(f"the two GEMMs share the row blocks; got {tiles.gate_up.m} and {tiles.down.m} rows")
    plan = make_plan(topk.idx, E, tiles.gate_up.m)
    h = gate_up(x.contiguous(), w13.contiguous(), plan, K, tiles.gate_up, swiglu_limit)
    weights = topk.weights.float().contiguous() if weighted else None
    return down(h, w2.contiguous(), weights, plan, tiles.down).view(T, K, C)


def moe_sum_reduce_triton(
    expert_out: Tensor,
    topk_weights: Tensor | None,
    routed_scaling_factor: float,
    *,
    block: int | None = None,
    warps: int | None = None,
) -> Tensor:
    """`moe_sum_reduce` in one pass over expert_out; blocks of up to 4096 channels, eight shapes lie within 2 %."""
    T, K, C = expert_out.shape
    out = torch.empty(T, C, dtype=expert_out.dtype, device=expert_out.device)
    if T == 0:
        return out
    expert_out = expert_out.contiguous()
    if block is None:
        divisor = min(4096, C & -C)  # largest power of two in C: no masked loads
        block = divisor if divisor >= 256 else min(1024, triton.next_power_of_2(C))
    _sum_reduce_kernel[(T, triton.cdiv(C, block))](
        expert_out,
        expert_out if topk_weights is None else topk_weights.float().contiguous(),
        out,
        C,
        routed_scaling_factor,
        NUM_TOPK=K,
        WEIGHTED=topk_weights is not None,
        EVEN_C=C % block == 0,
        BLOCK_C=block,
        num_warps=warps or (8 if block >= 2048 else 4),
    )
    return out
