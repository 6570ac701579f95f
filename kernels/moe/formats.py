"""Expert weights as checkpoints store them: packed bytes and their exact values.

    fmt                  bytes           scale                              value
    fp32, bf16           as they are     none                               w
    fp8_block128         e4m3            fp32 per 128 x 128 block           code * scale
    fp8_block128_ue8m0   e4m3            power of two per 128 x 128 block   code * scale
    mxfp4                two e2m1        UE8M0 per 32 of the last dim       code * 2^(e - 127)
    nvfp4                two e2m1        e4m3 per 16, fp32 per expert       code * e4m3 * global

The 4-bit codes are `kernels/indexer/formats.py`'s. Products are taken in fp32: exact for mxfp4 (a code has two
significant bits) and for power-of-two fp8 scales; rounded once otherwise. Sources: DeepSeek-V3 inference/kernel.py, OCP
MX v1.0, NVIDIA ModelOpt (weight_scale_2 shared by gate and up).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longrecall.kernels.indexer.formats import decode_bytes, decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles

ExpertFormat = Literal["fp32", "bf16", "fp8_block128", "fp8_block128_ue8m0", "mxfp4", "nvfp4"]
EXPERT_FORMATS: tuple[ExpertFormat, ...] = ("fp32", "bf16", "fp8_block128", "fp8_block128_ue8m0", "mxfp4", "nvfp4")

_BLOCK = 128
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """The weights of E experts, [E, N, K] before packing."""

    fmt: ExpertFormat
    shape: tuple[int, int, int]
    data: Tensor
    """fp32/bf16/e4m3 [E, N, K], or uint8 [E, N, K/2] with the even channel in the low nibble."""
    scale: Tensor | None = None
    """fp32 [E, ceil(N/128), ceil(K/128)]; uint8 [E, N, K/32] (mxfp4) or e4m3 bytes [E, N, K/16] (nvfp4)."""
    global_scale: Tensor | None = None
    """nvfp4: fp32 [E]."""

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scale, self.global_scale)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def _ceil_pow2_exponent(x: Tensor) -> Tensor:
    """ceil(log2 x) of positive fp32 by its bits, exact at powers of two."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa 2^exponent, mantissa in [0.5, 1)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _block_amax(w: Tensor) -> Tensor:
    E, N, K = w.shape
    padded = torch.nn.functional.pad(w, (0, -K % _BLOCK, 0, -N % _BLOCK))
    return padded.view(E, -(-N // _BLOCK), _BLOCK, -(-K // _BLOCK), _BLOCK).abs().amax((2, 4))


def _spread(scale: Tensor, N: int, K: int) -> Tensor:
    return scale.repeat_interleave(_BLOCK, 1)[:, :N].repeat_interleave(_BLOCK, 2)[:, :, :K]


def pack_experts(weights: Tensor, fmt: ExpertFormat) -> PackedExperts:
    """Pack [E, N, K] weights. ValueError when the format's block does not divide K, or the format is unknown."""
    if weights.dim() != 3:
        raise ValueError(f"weights has shape {list(weights.shape)}; expected [experts, N, K]")
    E, N, K = weights.shape
    shape = (E, N, K)
    if fmt == "fp32":
        return PackedExperts(fmt=fmt, shape=shape, data=weights.float())
    if fmt == "bf16":
        return PackedExperts(fmt=fmt, shape=shape, data=weights.bfloat16())
    w = weights.float()
    if fmt in ("fp8_block128", "fp8_block128_ue8m0"):
        scale = _block_amax(w) / _E4M3_MAX
        scale = torch.where(scale > 0, scale, 1.0)  # an all-zero block: any scale gives zeros, 0/0 would not
        if fmt == "fp8_block128_ue8m0":
            scale = torch.ldexp(torch.ones_like(scale), _ceil_pow2_exponent(scale))
        codes = (w / _spread(scale, N, K)).clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        return PackedExperts(fmt=fmt, shape=shape, data=codes, scale=scale)
    block = {"mxfp4": 32, "nvfp4": 16}.get(fmt)
    if block is None:
        raise ValueError(f"expert format {fmt!r} is unknown; known: {', '.join(EXPERT_FORMATS)}")
    if K % block:
        raise ValueError(f"{fmt} packs blocks of {block}: the last dimension {K} is not a multiple")
    blocks = w.view(E, N, K // block, block)
    amax = blocks.abs().amax(-1)  # [E, N, K/block]
    if fmt == "mxfp4":
        exponent = _ceil_pow2_exponent(amax.clamp_min(_E2M1_MAX * 2.0**-126) / _E2M1_MAX).clamp_(-126, 127)
        codes = encode_e2m1(torch.ldexp(blocks, -exponent[..., None]))
        scale_bytes = (exponent + 127).to(torch.uint8)
        return PackedExperts(fmt=fmt, shape=shape, data=pack_nibbles(codes.view(E, N, K)), scale=scale_bytes)
    tiny = torch.finfo(torch.float32).tiny
    global_scale = (amax.amax((1, 2)) / (_E4M3_MAX * _E2M1_MAX)).clamp_min(tiny)  # [E]
    block_scale = (amax / _E2M1_MAX / global_scale[:, None, None]).clamp_(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    step = block_scale.float() * global_scale[:, None, None]
    # a block scale that underflows e4m3 stores zeros: the block is lost, as in the real format
    scaled = torch.where(step[..., None] > 0, blocks / step[..., None], 0.0)
    codes = pack_nibbles(encode_e2m1(scaled).view(E, N, K))
    scale_bytes = block_scale.view(torch.uint8)
    return PackedExperts(fmt=fmt, shape=shape, data=codes, scale=scale_bytes, global_scale=global_scale)


def unpack_experts(packed: PackedExperts, expert: int | None = None) -> Tensor:
    """The fp32 values of all experts [E, N, K] (bf16 stays bf16), or of one [N, K]."""
    pick = slice(None) if expert is None else slice(expert, expert + 1)
    data, (_, N, K) = packed.data[pick], packed.shape
    if packed.fmt in ("fp32", "bf16"):
        values = data
    else:
        assert packed.scale is not None
        scale = packed.scale[pick]
        if packed.fmt.startswith("fp8"):
            values = decode_bytes(data.view(torch.uint8), "e4m3fn") * _spread(scale, N, K)
        else:
            block = 32 if packed.fmt == "mxfp4" else 16
            codes = decode_e2m1(unpack_nibbles(data)).view(-1, N, K // block, block)
            if packed.fmt == "mxfp4":
                step = torch.ldexp(torch.ones(scale.shape, device=scale.device), scale.int() - 127)
            else:
                assert packed.global_scale is not None
                step = decode_bytes(scale, "e4m3fn") * packed.global_scale[pick, None, None]
            values = (codes * step[..., None]).view(-1, N, K)
    return values if expert is None else values[0]
