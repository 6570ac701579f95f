"""KV rows as the engines store them: V3.2's 656 bytes a token and V4's 584 bytes a token.

    V3.2, GLM-5   [512 e4m3 latent | 4 fp32 scales, one per 128 | 64 bf16 rope]                          656 B, one
    row each V4            page of P tokens: [P x (448 e4m3 | 64 bf16 rope)][P x (7 UE8M0, one per 64 | 1 pad)], then
    zeros up to a
                  multiple of 576 bytes

Scale policies of the 656-byte row: "plain" is sglang's amax / 448 without a floor, so that an all-zero tile becomes
0/0 = NaN; "pow2" is FlashMLA's power of two with amax floored at 1e-4. Sources: FlashMLA tests/quant.py, sglang
0.5.23 dsa_quant_k_cache.py and dsv4 kv_layout.cuh. Attention reads the values back as bf16.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ScalePolicy = Literal["plain", "pow2"]

LATENT, ROPE, TILE = 512, 64, 128
ROW_BYTES = LATENT + 4 * (LATENT // TILE) + 2 * ROPE  # 656
V4_NOPE, V4_TILE = 448, 64
V4_DATA_BYTES = V4_NOPE + 2 * ROPE  # 576
V4_SCALE_BYTES = 8
AMAX_FLOOR = 1e-4
_E4M3_MAX = 448.0


class KvRows(NamedTuple):
    """Values read back, bf16."""

    nope: Tensor
    """[S, 512] (V3.2: also the value) or [S, 448]."""
    rope: Tensor
    """[S, 64]."""


def _pow2_exponent(amax: Tensor) -> Tensor:
    """ceil(log2(max(amax, floor) / 448)) by the bits."""
    mantissa, exponent = torch.frexp(amax.clamp_min(AMAX_FLOOR) / _E4M3_MAX)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _check(name: str, x: Tensor, width: int) -> None:
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"{name} has shape {list(x.shape)}; expected [tokens, {width}]")


def pack_rows(latent: Tensor, rope: Tensor, *, scale: ScalePolicy = "plain") -> Tensor:
    """latent [S, 512], rope [S, 64] -> uint8 [S, 656]."""
    _check("latent", latent, LATENT)
    _check("rope", rope, ROPE)
    tiles = latent.float().view(-1, LATENT // TILE, TILE)
    amax = tiles.abs().amax(-1)
    if scale == "plain":
        scales = amax / _E4M3_MAX
    elif scale == "pow2":
        exponent = _pow2_exponent(amax)
        scales = torch.ldexp(torch.ones_like(amax), exponent)
    else:
        raise ValueError(f"scale policy {scale!r} is unknown; known: plain, pow2")
    codes = (tiles / scales[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(-1, LATENT)
    return torch.cat([_bytes(codes), _bytes(scales), _bytes(rope.bfloat16())], 1)


def unpack_rows(rows: Tensor) -> KvRows:
    """uint8 [S, 656] -> bf16 values."""
    _check("rows", rows, ROW_BYTES)
    codes = rows[:, :LATENT].contiguous().view(torch.float8_e4m3fn).float().view(-1, LATENT // TILE, TILE)
    scales = rows[:, LATENT : LATENT + 4 * (LATENT // TILE)].contiguous().view(torch.float32)
    rope = rows[:, -2 * ROPE :].contiguous().view(torch.bfloat16)
    return KvRows((codes * scales[..., None]).view(-1, LATENT).bfloat16(), rope)


def page_bytes(page_size: int) -> int:
    """Bytes of one V4 page: 584 a token, padded to a multiple of 576."""
    used = page_size * (V4_DATA_BYTES + V4_SCALE_BYTES)
    return -(-used // V4_DATA_BYTES) * V4_DATA_BYTES


def pack_pages(nope: Tensor, rope: Tensor, page_size: int = 64, *, bf16_source: bool = True) -> Tensor:
    """nope [S, 448], rope [S, 64] -> uint8 [ceil(S / page_size), page_bytes]; unused slots are zero.

    `bf16_source`: nope is rounded to bf16 before it is quantised, as sglang does for compressed entries.
    """
    _check("nope", nope, V4_NOPE)
    _check("rope", rope, ROPE)
    S = nope.shape[0]
    pages = -(-S // page_size)
    source = nope.bfloat16().float() if bf16_source else nope.float()
    tiles = source.view(S, V4_NOPE // V4_TILE, V4_TILE)
    exponent = _pow2_exponent(tiles.abs().amax(-1))  # [S, 7]
    codes = torch.ldexp(tiles, -exponent[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    data = torch.zeros(pages * page_size, V4_DATA_BYTES, dtype=torch.uint8, device=nope.device)
    tail = torch.zeros(pages * page_size, V4_SCALE_BYTES, dtype=torch.uint8, device=nope.device)
    data[:S] = torch.cat([_bytes(codes.view(S, V4_NOPE)), _bytes(rope.bfloat16())], 1)
    tail[:S, : exponent.shape[1]] = (exponent + 127).to(torch.uint8)
    out = torch.zeros(pages, page_bytes(page_size), dtype=torch.uint8, device=nope.device)
    out[:, : page_size * V4_DATA_BYTES] = data.view(pages, -1)
    out[:, page_size * V4_DATA_BYTES : page_size * (V4_DATA_BYTES + V4_SCALE_BYTES)] = tail.view(pages, -1)
    return out


def unpack_pages(pages: Tensor, page_size: int = 64) -> KvRows:
    """uint8 [pages, page_bytes] -> bf16 values of all pages * page_size slots."""
    _check("pages", pages, page_bytes(page_size))
    data = pages[:, : page_size * V4_DATA_BYTES].reshape(-1, V4_DATA_BYTES)
    tail = pages[:, page_size * V4_DATA_BYTES : page_size * (V4_DATA_BYTES + V4_SCALE_BYTES)]
    exponent = tail.reshape(-1, V4_SCALE_BYTES)[:, : V4_NOPE // V4_TILE].int() - 127
    codes = data[:, :V4_NOPE].contiguous().view(torch.float8_e4m3fn).float().view(-1, V4_NOPE // V4_TILE, V4_TILE)
    rope = data[:, V4_NOPE:].contiguous().view(torch.bfloat16)
    return KvRows(torch.ldexp(codes, exponent[..., None]).view(-1, V4_NOPE).bfloat16(), rope)
