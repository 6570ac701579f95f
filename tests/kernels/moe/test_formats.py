"""Packed expert weights: exact values, exact round trips, sizes and errors."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.kernels.moe.formats import EXPERT_FORMATS, pack_experts, unpack_experts


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-12, 6))
def test_packing_what_was_unpacked_changes_nothing(fmt, seed: int, exponent: int) -> None:
    w = torch.randn(3, 40, 96, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    once = unpack_experts(pack_experts(w, fmt)).float()
    twice = unpack_experts(pack_experts(once, fmt)).float()
    # plain scales are recomputed from the rounded maximum: equal up to one fp32 rounding; powers of two exactly
    tolerance = 0.0 if fmt in ("fp32", "bf16", "mxfp4", "fp8_block128_ue8m0") else 3e-7
    torch.testing.assert_close(twice, once, rtol=tolerance, atol=0)


WORST = {"fp32": 0.0, "bf16": 2**-8, "fp8_block128": 2**-4, "fp8_block128_ue8m0": 2**-4, "mxfp4": 0.5, "nvfp4": 0.5}


@pytest.mark.parametrize("fmt, most", WORST.items())
def test_error_is_within_the_format(fmt, most: float) -> None:
    w = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0))
    error = (unpack_experts(pack_experts(w, fmt)).float() - w).abs()
    block_max = w.abs().view(2, 64, -1, 16).amax(-1, keepdim=True).expand(-1, -1, -1, 16).reshape(w.shape)
    assert float((error / block_max).max()) <= most


def test_mxfp4_agrees_with_ml_dtypes() -> None:
    w = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    packed = pack_experts(w, "mxfp4")
    scale = packed.scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    scaled = (w.view(1, 8, 2, 32).numpy() / scale[..., None]).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    want = torch.from_numpy(scaled * scale[..., None]).view(1, 8, 64)
    assert torch.equal(unpack_experts(packed), want)


def test_every_e2m1_code_survives_in_both_four_bit_formats() -> None:
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0])
    w = codes.repeat(2).view(1, 1, 32)
    assert torch.equal(unpack_experts(pack_experts(w, "mxfp4")), w)
    torch.testing.assert_close(unpack_experts(pack_experts(w, "nvfp4")), w, rtol=3e-7, atol=0)


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_zeros_stay_zeros(fmt) -> None:
    w = torch.zeros(2, 130, 160)
    w[1, 0, 0] = 1.0
    back = unpack_experts(pack_experts(w, fmt))
    assert back.isfinite().all() and back[0].eq(0).all() and back[1, 0, 0] == 1.0


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_one_expert_alone_is_the_same(fmt) -> None:
    packed = pack_experts(torch.randn(3, 130, 160, generator=torch.Generator().manual_seed(0)), fmt)
    assert torch.equal(unpack_experts(packed)[2], unpack_experts(packed, 2))


@pytest.mark.parametrize(
    "fmt, bits", [("bf16", 16), ("fp8_block128", 8 + 32 / 128**2), ("mxfp4", 4.25), ("nvfp4", 4.5 + 32 / (256 * 256))]
)
def test_bits_per_weight(fmt, bits: float) -> None:
    assert pack_experts(torch.ones(2, 256, 256), fmt).nbytes * 8 / (2 * 256 * 256) == bits


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match="mxfp4 packs blocks of 32: the last dimension 40"):
        pack_experts(torch.ones(1, 4, 40), "mxfp4")
    with pytest.raises(ValueError, match="'int3' is unknown; known: fp32"):
        pack_experts(torch.ones(1, 4, 64), "int3")
    with pytest.raises(ValueError, match=r"shape \[4, 64\]"):
        pack_experts(torch.ones(4, 64), "bf16")
