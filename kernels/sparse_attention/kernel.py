"""Triton kernel of sparse decode: one program per (sequence, block of heads, split of the index list).

    l = scale q·k over the split's entries, running maximum m and sum z (online softmax), acc = sum exp(l - m) v
    out_s = acc / z,  lse_s = m + log z;   `merge_splits` does the rest in torch: S x B x H rows are few

The head dimension is cut into its largest power of two and the rest (576 = 512 + 64), because a block must be one.
Rows are gathered by index, so a masked slot is never read: NaN there is harmless.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longrecall.kernels.sparse_attention.decode import Attended


@triton.jit
def _split_decode_kernel(
    p_q,
    p_k,
    p_v,
    p_indices,
    p_out,
    p_lse,
    scale,
    H,
    K,
    split_size,
    stride_kb,
    stride_ks,
    stride_vb,
    stride_vs,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    DV_POW2: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    i_b, i_h, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < H
    o_d = tl.arange(0, D_MAIN)
    o_v = tl.arange(0, DV_POW2)
    m_v = o_v < DV
    p_row = p_q + (i_b * H + o_h)[:, None] * D
    q = tl.load(p_row + o_d[None, :], mask=m_h[:, None], other=0.0)  # [BLOCK_H, D_MAIN]
    if D_REST > 0:
        o_r = D_MAIN + tl.arange(0, D_REST)
        m_r = o_r < D
        q_rest = tl.load(p_row + o_r[None, :], mask=m_h[:, None] & m_r[None, :], other=0.0)
    biggest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, DV_POW2), tl.float32)
    stop = tl.minimum((i_s + 1) * split_size, K)
    for start in range(i_s * split_size, stop, BLOCK_S):
        o_s = start + tl.arange(0, BLOCK_S)
        entry = tl.load(p_indices + i_b * K + o_s, mask=o_s < stop, other=-1).to(tl.int64)  # [BLOCK_S]
        m_s = entry >= 0
        p_key = p_k + i_b * stride_kb + entry[None, :] * stride_ks
        key = tl.load(p_key + o_d[:, None], mask=m_s[None, :], other=0.0)  # [D_MAIN, BLOCK_S]
        l = tl.dot(q, key, input_precision=PRECISION)
        if D_REST > 0:
            key_rest = tl.load(p_key + o_r[:, None], mask=m_s[None, :] & m_r[:, None], other=0.0)
            l += tl.dot(q_rest, key_rest, input_precision=PRECISION)
        l = tl.where(m_s[None, :], l * scale, float("-inf"))
        new = tl.maximum(biggest, tl.max(l, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf is NaN
        p = tl.exp(l - safe[:, None])
        shrink = tl.exp(biggest - safe)
        total = total * shrink + tl.sum(p, 1)
        p_value = p_v + i_b * stride_vb + entry[:, None] * stride_vs
        value = tl.load(p_value + o_v[None, :], mask=m_s[:, None] & m_v[None, :], other=0.0)  # [BLOCK_S, DV_POW2]
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        biggest = new
    some = total > 0
    out = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    lse = tl.where(some, biggest + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    row = (i_s * tl.num_programs(0) + i_b) * H + o_h  # [S, B, H]
    tl.store(p_out + row[:, None] * DV + o_v[None, :], out, mask=m_h[:, None] & m_v[None, :])
    tl.store(p_lse + row, lse, mask=m_h)


def attend_splits_triton(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, scale: float, split_size: int | None = None
) -> Attended:
    """`attend_splits` on a GPU (or Triton's interpreter). bf16 probabilities for bf16 values, as FlashMLA's."""
    B, H, D = q.shape
    K, DV = indices.shape[1], v.shape[-1]
    if k.shape[-1] != D or k.shape[:-1] != v.shape[:-1] or (k.dim() == 3 and k.shape[0] != B):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit together")
    if indices.dim() != 2 or indices.shape[0] != B:
        raise ValueError(f"indices has shape {list(indices.shape)}; q has {B} rows")
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("k and v must be contiguous along the head dimension")
    step = max(K, 1) if split_size is None else split_size
    splits = max(1, triton.cdiv(K, step))
    out = torch.empty(splits, B, H, DV, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, B, H, dtype=torch.float32, device=q.device)
    d_main = 1 << (D.bit_length() - 1)
    rest = D - d_main
    block_h, block_s = 16, 32
    _split_decode_kernel[(B, triton.cdiv(H, block_h), splits)](
        q.contiguous(),
        k,
        v,
        indices.contiguous(),
        out,
        lse,
        scale,
        H,
        K,
        step,
        0 if k.dim() == 2 else k.stride(0),
        k.stride(-2),
        0 if v.dim() == 2 else v.stride(0),
        v.stride(-2),
        D=D,
        DV=DV,
        D_MAIN=d_main,
        D_REST=0 if not rest else max(16, triton.next_power_of_2(rest)),
        DV_POW2=triton.next_power_of_2(DV),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_H=block_h,
        BLOCK_S=block_s,
        num_warps=8 if DV > 256 else 4,  # four warps spill the [16, 512] accumulator
        num_stages=2,
    )
    return Attended(out, lse)
