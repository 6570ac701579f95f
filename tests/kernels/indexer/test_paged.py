import pytest
import torch

from longrecall.kernels.indexer.formats import FormatError, dequantize, quantize
from longrecall.kernels.indexer.paged import SLOTS, new_pages, read_interleaved, read_pages, write_pages


@pytest.mark.parametrize("fmt", ["fp8", "fp8_ue8m0", "fp4", "fp4_ties_down"])
def test_scattered_keys_come_back_from_their_slots(fmt: str) -> None:
    g = torch.Generator().manual_seed(0)
    packed = quantize(torch.randn(100, 128, generator=g), fmt)
    pages = new_pages(3, fmt)
    slots = torch.randperm(3 * SLOTS, generator=g)[:100]
    write_pages(pages, packed, slots)
    back = read_pages(pages, fmt, slots)
    assert torch.equal(back.data, packed.data)
    assert torch.equal(dequantize(back), dequantize(packed))


def test_fp8_page_holds_all_values_before_all_scales() -> None:
    packed = quantize(torch.randn(SLOTS, 128, generator=torch.Generator().manual_seed(1)), "fp8")
    pages = new_pages(1, "fp8")
    write_pages(pages, packed, torch.arange(SLOTS))
    assert pages.shape == (1, 8448)
    assert torch.equal(pages[0, : SLOTS * 128].view(SLOTS, 128), packed.data)
    assert torch.equal(pages[0, SLOTS * 128 :].view(torch.float32), packed.scale.squeeze(1))


def test_reading_scales_beside_values_gives_other_keys() -> None:
    packed = quantize(torch.randn(SLOTS, 128, generator=torch.Generator().manual_seed(2)), "fp8")
    pages = new_pages(1, "fp8")
    write_pages(pages, packed, torch.arange(SLOTS))
    wrong = dequantize(read_interleaved(pages, torch.arange(SLOTS)))
    right = dequantize(packed)
    assert not torch.allclose(wrong[1:].nan_to_num(), right[1:])


def test_slots_and_shapes_outside_the_pages_are_named() -> None:
    pages = new_pages(2, "fp8")
    with pytest.raises(FormatError, match=r"slots must lie in \[0, 128\)"):
        read_pages(pages, "fp8", torch.tensor([128]))
    with pytest.raises(FormatError, match=r"uint8 \[P, 4352\]"):
        read_pages(pages, "fp4", torch.tensor([0]))
    with pytest.raises(FormatError, match=r"bf16.*no page layout"):
        new_pages(1, "bf16")
