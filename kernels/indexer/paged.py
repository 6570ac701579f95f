"""Pages of index keys as servers store them: 64 slots, all values of the page first, then all its scales.

    fp8   [64 x 128 B e4m3] [64 x 4 B fp32 scale]                              8448 B a page
    fp4   [64 x 64 B packed e2m1] [64 x 4 B: UE8M0 of each block of 32]        4352 B a page

A slot's scale is not beside its value: reading 132 B a slot gives plausible nonsense (vllm-project/vllm#50576).
"""

import torch
from torch import Tensor

from longrecall.kernels.indexer.formats import FormatError, Packed

SLOTS = 64
SCALE_BYTES = 4


def slot_bytes(fmt: str, head_dim: int = 128) -> int:
    """Bytes of one slot's values (its scale takes 4 more)."""
    if fmt in ("fp8", "fp8_ue8m0", "fp8_fnuz"):
        return head_dim
    if fmt in ("fp4", "fp4_ties_down"):
        return head_dim // 2
    raise FormatError(f"format {fmt!r} has no page layout; known: fp8, fp8_ue8m0, fp8_fnuz, fp4, fp4_ties_down")


def new_pages(count: int, fmt: str, *, head_dim: int = 128) -> Tensor:
    """uint8 [count, SLOTS * (value bytes + 4)], zeroed."""
    return torch.zeros(count, SLOTS * (slot_bytes(fmt, head_dim) + SCALE_BYTES), dtype=torch.uint8)


def _views(pages: Tensor, fmt: str, head_dim: int) -> tuple[Tensor, Tensor]:
    """Values [pages, SLOTS, bytes] and scales [pages, SLOTS, 4] over the same memory."""
    width = slot_bytes(fmt, head_dim)
    expected = SLOTS * (width + SCALE_BYTES)
    if pages.ndim != 2 or pages.shape[1] != expected or pages.dtype != torch.uint8:
        raise FormatError(f"{fmt} pages must be uint8 [P, {expected}], not {pages.dtype} {list(pages.shape)}")
    values = pages[:, : SLOTS * width].unflatten(1, (SLOTS, width))
    return values, pages[:, SLOTS * width :].unflatten(1, (SLOTS, SCALE_BYTES))


def _check_slots(pages: Tensor, slots: Tensor) -> None:
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < pages.shape[0] * SLOTS:
        raise FormatError(
            f"slots must lie in [0, {pages.shape[0] * SLOTS}), not {int(slots.min())}..{int(slots.max())}"
        )


def write_pages(pages: Tensor, packed: Packed, slots: Tensor) -> None:
    """Store packed keys [n, ...] at slots [n] (page * SLOTS + offset), in place."""
    _check_slots(pages, slots)
    assert packed.scale is not None
    head_dim = packed.data.shape[-1] * (2 if packed.fmt.startswith("fp4") else 1)
    values, scales = _views(pages, packed.fmt, head_dim)
    page, offset = slots // SLOTS, slots % SLOTS
    values[page, offset] = packed.data
    scales[page, offset] = packed.scale.contiguous().view(torch.uint8)


def read_pages(pages: Tensor, fmt: str, slots: Tensor, *, head_dim: int = 128) -> Packed:
    """The packed keys at slots [n]."""
    _check_slots(pages, slots)
    values, scales = _views(pages, fmt, head_dim)
    page, offset = slots // SLOTS, slots % SLOTS
    scale = scales[page, offset]
    if fmt.startswith("fp8"):
        scale = scale.contiguous().view(torch.float32)
    return Packed(fmt=fmt, data=values[page, offset], scale=scale)


def read_interleaved(pages: Tensor, slots: Tensor, *, head_dim: int = 128) -> Packed:
    """The misread: fp8 pages taken as [SLOTS, value + scale] per slot (the layout fault)."""
    rows = pages.unflatten(1, (SLOTS, head_dim + SCALE_BYTES))[slots // SLOTS, slots % SLOTS]
    scale = rows[:, head_dim:].contiguous().view(torch.float32)
    return Packed(fmt="fp8", data=rows[:, :head_dim].contiguous(), scale=scale)
