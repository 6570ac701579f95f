"""The CPU path of `index_topk`: blocks of keys small enough for the caches, rows of scores short enough to forget.

Measured on one core (docs/benchmarks/indexer.md): bf16 keys run at the speed of the matrix product; fp8 keys are
decoded two bytes at a time through a table of 65,536 pairs, 10 times as fast as torch's own conversion. Buffers are
kept from block to block, which is worth a third.

Precision: fp32 keys give fp32 scores. For bf16, fp8 and fp4 keys every product is exact and summed in fp32, and each
dot product is then rounded to bf16 (the CPU matrix product has no wider output) before ReLU and the fp32 head sum.
"""

from functools import lru_cache

import torch
from torch import Tensor

from longrecall.kernels.indexer.formats import Packed, byte_values, decode_bytes, decode_e2m1
from longrecall.kernels.indexer.topk import select_topk

DOTS = 1 << 18
"""Elements of one block of dot products [keys, rows * H]: 1 MB in fp32, so ReLU and the head sum find it in L2."""
SCORES = 1 << 22
"""Scores kept before a selection, 16 MB: one query of 4M keys, or 32 queries of 128K, are selected at once."""


@lru_cache(maxsize=2)
def _pair_table(encoding: str) -> Tensor:
    """int32 [65536]: two bf16 values of two bytes; index is the uint16 of the bytes. 256 KB, fits L2."""
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(-1, 2)
    return byte_values(encoding, torch.bfloat16)[pairs.int()].view(torch.int32).view(-1)


@lru_cache(maxsize=1)
def _nibble_table() -> Tensor:
    """int32 [256]: the two bf16 values of a byte of packed e2m1."""
    byte = torch.arange(256, dtype=torch.uint8)
    return decode_e2m1(torch.stack((byte & 15, byte >> 4), -1)).bfloat16().view(torch.int32).view(-1)


def decode_block(packed: Packed, start: int, stop: int, room: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Keys start..stop as bf16 (fp32 for fp32), without the factors that `score_factor` returns; each value exact.

    `room`: two int32 buffers of half as many elements, which the keys of the next block may overwrite.
    """
    data = packed.data[start:stop]
    if packed.fmt in ("fp32", "bf16"):
        return data
    if packed.fmt.startswith("fp8"):
        pairs = data.contiguous().view(torch.uint16).view(-1)
        table = _pair_table("e4m3fnuz" if packed.fmt == "fp8_fnuz" else "e4m3fn")
        if room is None:
            return table.index_select(0, pairs.int()).view(torch.bfloat16).view(data.shape)
        index, values = (buffer[: len(pairs)] for buffer in room)
        index.copy_(pairs)
        return torch.index_select(table, 0, index, out=values).view(torch.bfloat16).view(data.shape)
    assert packed.scale is not None
    values = _nibble_table().index_select(0, data.reshape(-1).int()).view(torch.bfloat16)
    nv = packed.fmt == "nvfp4"
    # 2 significant bits times a power of two, or times the 4 bits of an e4m3 scale: exact in bf16
    step = decode_bytes(packed.scale[start:stop], "e4m3fn" if nv else "ue8m0", torch.bfloat16)
    blocks = values.view(-1, 16 if nv else 32)
    return (blocks * step.reshape(-1, 1)).view(data.shape[0], -1)


def score_factor(packed: Packed) -> Tensor | None:
    """What a score still has to be multiplied by: [S] key scales, a scalar, or nothing."""
    if packed.fmt.startswith("fp8"):
        assert packed.scale is not None
        return packed.scale.squeeze(-1)
    return packed.global_scale


def _scores(q: Tensor, keys: Packed, start: int, stop: int, weights: Tensor, out: Tensor) -> None:
    """q [R, H, D], keys start..stop, weights [R, H] fp32 into out [R, stop - start] fp32."""
    rows, heads, _ = q.shape
    flat = q.reshape(rows * heads, -1)
    step = min(max(512, DOTS // (rows * heads)), stop - start)
    # the same memory for every block: it stays in the cache, and nothing is paid for new pages
    pairs = step * keys.data.shape[-1] // 2 if keys.fmt.startswith("fp8") else 0
    room = (torch.empty(pairs, dtype=torch.int32), torch.empty(pairs, dtype=torch.int32))
    products, wide = torch.empty(step, heads, dtype=q.dtype), torch.empty(step, heads)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        block, target = decode_block(keys, first, last, room), slice(first - start, last - start)
        if rows == 1:
            # keys as the rows of the product: the head sum then reads its output once, in order
            dots = torch.mm(block, flat.T, out=products[: last - first]).relu_()
            if dots.dtype != torch.float32:
                dots = wide[: last - first].copy_(dots)
            torch.mv(dots, weights[0], out=out[0, target])
        else:
            dots = (flat @ block.T).relu_().float().view(rows, heads, -1)
            out[:, target] = torch.bmm(weights.unsqueeze(1), dots).squeeze(1)


def _dense(keys: Packed, row: int) -> Packed:
    """The keys of one query of a batch with keys of its own."""
    scale = keys.scale[row] if keys.scale is not None else None
    return Packed(fmt=keys.fmt, data=keys.data[row], scale=scale, global_scale=keys.global_scale)


def topk_blocked(q: Tensor, keys: Packed, weights: Tensor, k: int, *, visible: Tensor) -> Tensor:
    """As `index_topk`; memory is SCORES + DOTS elements however many queries and keys there are."""
    weights = weights.float()
    distinct = keys.data.ndim == 3
    columns = keys.data.shape[-2]
    rows = 1 if distinct else max(1, min(SCORES // max(1, columns), DOTS // (512 * q.shape[1])))
    out = torch.empty(q.shape[0], k, dtype=torch.int32)
    for start in range(0, q.shape[0], rows):
        part = slice(start, start + rows)
        limit = min(columns, int(visible[part].max()))
        if limit <= 0:
            out[part] = -1
            continue
        own = _dense(keys, start) if distinct else keys
        scores = torch.empty(q[part].shape[0], limit)
        _scores(q[part], own, 0, limit, weights[part], scores)
        factor = score_factor(own)
        if factor is not None:
            scores *= factor[:limit] if factor.ndim else factor
        out[part] = select_topk(scores, k, visible=visible[part])
    return out
