"""Key formats of the DSA indexer: real packed bytes and exact dequantisation.

A format turns the last dimension of a tensor into stored bytes plus scales and back. The formats under suspicion in
serving patches (public sources: DeepSeek-V3.2-Exp `inference/kernel.py`, DeepSeek-V4 `Indexer`, SGLang 0.5.23
`fused_norm_rope_v2.cuh`, NVFP4 as in TensorRT Model Optimizer):

    name            bytes          scale, one per              scale value
    fp32, bf16      the value      none
    fp8             e4m3fn         the row (128)               max(amax, 1e-4) / 448, fp32
    fp8_ue8m0       e4m3fn         the row (128)               2^ceil(log2(max(amax, 1e-4) / 448))
    fp8_fnuz        e4m3fn bytes of `fp8`, read as e4m3fnuz    a fault, not a format: values halve, 0x80 is NaN
    fp4             e2m1, 2/byte   block of 32                 2^ceil(log2(max(amax, 6 * 2^-126) / 6)), round to even
    fp4_ties_down   e2m1, 2/byte   block of 32                 same with floor 1e-4; ties go towards zero
    nvfp4           e2m1, 2/byte   block of 16, and a tensor   e4m3fn block scale times one fp32 scale
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FORMATS = ("fp32", "bf16", "fp8", "fp8_ue8m0", "fp8_fnuz", "fp4", "fp4_ties_down", "nvfp4")

E4M3_MAX = 448.0
E2M1_MAX = 6.0
AMAX_FLOOR = 1e-4
"""SGLang's and DeepSeek's floor on a row's amax, so that an all-zero key keeps a finite scale."""
FP4_AMAX_FLOOR = 6 * 2.0**-126
"""The V4 reference's floor: the smallest amax whose UE8M0 scale is a normal fp32 number."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class FormatError(ValueError):
    """A format that is unknown, or a tensor whose last dimension the format cannot hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """A tensor as a cache stores it. `dequantize` is the only way back."""

    fmt: str
    data: Tensor
    """Values: fp32, bf16, or uint8 codes [..., D] (fp8) or [..., D/2] (fp4, the even channel in the low nibble)."""
    scale: Tensor | None
    """fp32 [..., 1] for fp8; uint8 exponents [..., D/32] for fp4 (UE8M0) or e4m3 bytes [..., D/16] for nvfp4."""
    global_scale: Tensor | None = None
    """nvfp4 only: fp32 scalar."""

    @property
    def nbytes(self) -> int:
        parts = [self.data, self.scale, self.global_scale]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def check_format(fmt: str) -> None:
    if fmt not in FORMATS:
        raise FormatError(f"format {fmt!r} is unknown; known: {', '.join(FORMATS)}")


def _exponent_ceil(x: Tensor) -> Tensor:
    """ceil(log2(x)) of positive fp32 x, exact (a float log2 is off by one near powers of two)."""
    mantissa, exponent = torch.frexp(x)
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def _pow2(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, exact for -149..127."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _blocks(x: Tensor, block: int, fmt: str) -> Tensor:
    if x.shape[-1] % block:
        raise FormatError(f"{fmt} needs a last dimension that is a multiple of {block}, not {x.shape[-1]}")
    return x.float().unflatten(-1, (-1, block))


@lru_cache(maxsize=8)
def _e2m1_boundaries(ties: str, device: str) -> Tensor:
    """Value v gets code = number of boundaries strictly below it.

    Round to even moves the boundary just below a midpoint where the larger neighbour has the even code, so that the
    midpoint itself goes up.
    """
    points = torch.tensor(E2M1_MIDPOINTS)
    if ties == "even":
        upper_is_even = torch.arange(1, 8) % 2 == 0
        points = torch.where(upper_is_even, torch.nextafter(points, torch.zeros(())), points)
    return points.to(device)


def encode_e2m1(x: Tensor, *, ties: str = "even") -> Tensor:
    """fp32 values to 4-bit codes (uint8 0..15, bit 3 the sign), saturating at 6. ties: "even" or "down" (to zero)."""
    if ties not in ("even", "down"):
        raise FormatError(f"ties {ties!r} is unknown; known: even, down")
    code = torch.bucketize(x.abs(), _e2m1_boundaries(ties, str(x.device)), out_int32=True).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: Tensor) -> Tensor:
    """4-bit codes (uint8) to fp32; code 8 is -0."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=code.device)
    return values[code.int()]


def pack_nibbles(code: Tensor) -> Tensor:
    """[..., D] codes to [..., D/2] bytes, even channel in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _quantize_fp8(x: Tensor, *, pow2: bool) -> tuple[Tensor, Tensor]:
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR)
    scale = _pow2(_exponent_ceil(amax / E4M3_MAX)) if pow2 else amax / E4M3_MAX
    codes = (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def _quantize_fp4(x: Tensor, *, ties: str, floor: float) -> tuple[Tensor, Tensor]:
    blocks = _blocks(x, 32, "fp4")
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=floor)
    exponent = _exponent_ceil(amax / E2M1_MAX).clamp(min=-126)
    code = encode_e2m1(torch.ldexp(blocks, -exponent), ties=ties)
    return pack_nibbles(code.flatten(-2)), (exponent.squeeze(-1) + 127).to(torch.uint8)


def _quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = _blocks(x, 16, "nvfp4")
    global_scale = (blocks.abs().amax() / (E4M3_MAX * E2M1_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    block_scale = (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX / global_scale).clamp(max=E4M3_MAX)
    block_scale = block_scale.to(torch.float8_e4m3fn)
    step = block_scale.float() * global_scale
    # A block scale that underflows e4m3 stores zeros: the whole block is lost, as it is in the real format.
    scaled = torch.where(step > 0, blocks / step, torch.zeros_like(blocks))
    return pack_nibbles(encode_e2m1(scaled).flatten(-2)), block_scale.view(torch.uint8).squeeze(-1), global_scale


def quantize(x: Tensor, fmt: str) -> Packed:
    """x [..., D], any float dtype, to the bytes that a cache of this format stores."""
    check_format(fmt)
    if fmt == "fp32":
        return Packed(fmt=fmt, data=x.float(), scale=None)
    if fmt == "bf16":
        return Packed(fmt=fmt, data=x.bfloat16(), scale=None)
    if fmt == "fp8_ue8m0" or fmt.startswith("fp8"):
        data, scale = _quantize_fp8(x, pow2=fmt == "fp8_ue8m0")
        return Packed(fmt=fmt, data=data, scale=scale)
    if fmt == "nvfp4":
        data, scale, global_scale = _quantize_nvfp4(x)
        return Packed(fmt=fmt, data=data, scale=scale, global_scale=global_scale)
    if fmt == "fp4":
        data, scale = _quantize_fp4(x, ties="even", floor=FP4_AMAX_FLOOR)
    else:
        data, scale = _quantize_fp4(x, ties="down", floor=AMAX_FLOOR)
    return Packed(fmt=fmt, data=data, scale=scale)


@lru_cache(maxsize=16)
def byte_values(encoding: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """The 256 values of an 8-bit encoding ("e4m3fn", "e4m3fnuz", "ue8m0"), by byte."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if encoding == "e4m3fn":
        return codes.view(torch.float8_e4m3fn).to(dtype)
    if encoding == "e4m3fnuz":
        return codes.view(torch.float8_e4m3fnuz).to(dtype)
    if encoding == "ue8m0":
        values = _pow2(codes.int() - 127)
        values[255] = torch.nan
        return values.to(dtype)
    raise FormatError(f"encoding {encoding!r} is unknown; known: e4m3fn, e4m3fnuz, ue8m0")


def decode_bytes(codes: Tensor, encoding: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 codes to values through the 256-entry table (on a CPU 4x faster than torch's own fp8 conversion)."""
    table = byte_values(encoding, dtype, str(codes.device))
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def dequantize(packed: Packed) -> Tensor:
    """The fp32 values that the stored bytes mean, each one exact (value times scale, one fp32 rounding)."""
    fmt, data, scale = packed.fmt, packed.data, packed.scale
    if fmt in ("fp32", "bf16"):
        return data.float()
    assert scale is not None
    if fmt.startswith("fp8"):
        return decode_bytes(data, "e4m3fnuz" if fmt == "fp8_fnuz" else "e4m3fn") * scale
    values = decode_e2m1(unpack_nibbles(data))
    if fmt == "nvfp4":
        assert packed.global_scale is not None
        step = decode_bytes(scale, "e4m3fn") * packed.global_scale
        return (values.unflatten(-1, (-1, 16)) * step.unsqueeze(-1)).flatten(-2)
    step = decode_bytes(scale, "ue8m0")
    return (values.unflatten(-1, (-1, 32)) * step.unsqueeze(-1)).flatten(-2)


def fake_quantize(x: Tensor, fmt: str) -> Tensor:
    """x [..., D] through the format and back, as fp32 (no rounding beyond the format's own)."""
    if fmt == "fp32":
        return x.float()
    if fmt == "bf16":
        return x.bfloat16().float()
    return dequantize(quantize(x, fmt))
