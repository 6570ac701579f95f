"""The 656-byte and 584-byte KV rows: bytes where the engines put them, exact values, and the zero tile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.kernels.faults import fault
from longrecall.kernels.sparse_attention import pack_pages, pack_rows, unpack_pages, unpack_rows
from longrecall.kernels.sparse_attention.rows import page_bytes


def values(tokens: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=g), torch.randn(tokens, 64, generator=g)


def test_656_bytes_hold_codes_then_scales_then_rope() -> None:
    latent, rope = values(3, 512)
    rows = pack_rows(latent, rope)
    assert rows.shape == (3, 656) and rows.dtype == torch.uint8
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    torch.testing.assert_close(scales, latent.view(3, 4, 128).abs().amax(-1) / 448, rtol=1e-6, atol=0)
    assert torch.equal(rows[:, 528:].contiguous().view(torch.bfloat16), rope.bfloat16())
    code = rows[1, 130:131].view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(code * scales[1, 1], latent[1, 130:131], rtol=2**-4, atol=0)


def test_584_bytes_put_the_scales_behind_all_data_of_the_page() -> None:
    nope, rope = values(65, 448)
    pages = pack_pages(nope, rope, 64)
    assert pages.shape == (2, 37440) and page_bytes(64) == 37440 and 37440 % 576 == 0
    token = 63
    data = pages[0, token * 576 : (token + 1) * 576]
    assert torch.equal(data[448:].contiguous().view(torch.bfloat16), rope[token].bfloat16())
    tail = pages[0, 64 * 576 + token * 8 :][:8]
    amax = nope[token].bfloat16().float().view(7, 64).abs().amax(-1)
    assert tail[:7].tolist() == [int(torch.ceil(torch.log2(a / 448))) + 127 for a in amax]
    assert tail[7] == 0 and pages[1, 576:].view(-1)[: 63 * 576].eq(0).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-10, 10), tokens=st.integers(1, 70))
def test_round_trips_stay_within_e4m3_and_are_stable(seed: int, exponent: int, tokens: int) -> None:
    latent, rope = values(tokens, 512, seed)
    latent = latent * 2.0**exponent
    for policy in ("plain", "pow2"):
        back = unpack_rows(pack_rows(latent, rope, scale=policy))
        tile_max = latent.view(tokens, 4, 128).abs().amax(-1, keepdim=True).expand(-1, -1, 128).reshape(tokens, 512)
        assert float(((back.nope.float() - latent).abs() / tile_max).max()) < 2**-4
        assert torch.equal(back.rope, rope.bfloat16())
    again = unpack_rows(pack_rows(back.nope, back.rope, scale="pow2"))
    assert torch.equal(again.nope, back.nope), "power-of-two scales reproduce their own values"
    nope = latent[:, :448]
    paged = unpack_pages(pack_pages(nope, rope, 16), 16)
    assert paged.nope.shape[0] == -(-tokens // 16) * 16
    assert torch.equal(unpack_pages(pack_pages(paged.nope, paged.rope, 16), 16).nope, paged.nope)
    assert paged.nope[tokens:].eq(0).all()


def test_a_zero_tile_is_nan_without_a_floor_and_zero_with_one() -> None:
    latent, rope = values(2, 512)
    latent[1, 128:256] = 0
    broken = fault("zero-tile-nan").switch["scale"]
    plain, floored = (
        unpack_rows(pack_rows(latent, rope, scale=broken)),
        unpack_rows(pack_rows(latent, rope, scale="pow2")),
    )
    assert plain.nope[1, 128:256].isnan().all() and plain.nope[0].isfinite().all()
    assert floored.nope[1, 128:256].eq(0).all()
    assert unpack_pages(pack_pages(torch.zeros(2, 448), rope)).nope.eq(0).all(), "V4 pages have a floor"


def test_more_tokens_make_a_zero_tile_likelier_to_be_attended() -> None:
    latent, rope = values(1000, 512)
    latent[700, :128] = 0
    rows = unpack_rows(pack_rows(latent, rope, scale="plain")).nope
    assert rows[:500].isfinite().all() and not rows[:1000].isfinite().all()


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: pack_rows(torch.ones(2, 448), torch.ones(2, 64)),
            r"latent has shape \[2, 448\]; expected \[tokens, 512\]",
        ),
        (
            lambda: pack_rows(torch.ones(2, 512), torch.ones(2, 64), scale="mean"),
            "'mean' is unknown; known: plain, pow2",
        ),
        (lambda: unpack_rows(torch.zeros(2, 584, dtype=torch.uint8)), r"expected \[tokens, 656\]"),
        (lambda: unpack_pages(torch.zeros(2, 100, dtype=torch.uint8)), r"expected \[tokens, 37440\]"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
