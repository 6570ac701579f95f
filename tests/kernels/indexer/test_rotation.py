import math

import pytest
import torch

from longrecall.kernels.indexer.presets import PRESETS, PresetError, preset
from longrecall.kernels.indexer.reference import indexer_logits_ref
from longrecall.kernels.indexer.rotation import (
    Rope,
    Yarn,
    apply_rope,
    hadamard,
    inverse_frequencies,
    layer_norm,
    rms_norm,
)


def test_hadamard_equals_the_fast_transform_and_is_its_own_inverse() -> None:
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    y = x.double().clone()
    width = 1
    while width < 128:  # butterflies of the Sylvester order
        y = y.view(7, -1, 2, width)
        y = torch.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), 2).flatten(1)
        width *= 2
    torch.testing.assert_close(hadamard(x).double(), y / math.sqrt(128), rtol=0, atol=2e-6)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=2e-6)


def test_rotating_both_sides_keeps_every_score_and_one_side_does_not() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, w = (torch.randn(*shape, generator=g) for shape in ((3, 8, 128), (50, 128), (3, 8)))
    plain = indexer_logits_ref(q, k, w)
    torch.testing.assert_close(indexer_logits_ref(hadamard(q), hadamard(k), w), plain, rtol=0, atol=2e-3)
    assert float((indexer_logits_ref(hadamard(q), k, w) - plain).abs().max()) > 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_rope_is_relative_and_invertible_in_every_preset(name: str) -> None:
    rope = preset(name).rope
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 4, 128, generator=g), torch.randn(1, 128, generator=g)

    def score(tq: int, tk: int) -> torch.Tensor:
        return apply_rope(q, torch.tensor([tq]), rope)[0] @ apply_rope(k, torch.tensor([tk]), rope)[0]

    torch.testing.assert_close(score(70, 30), score(1070, 1030), rtol=0, atol=1e-3)
    turned = apply_rope(q, torch.tensor([12345]), rope)
    torch.testing.assert_close(apply_rope(turned, torch.tensor([12345]), rope, inverse=True), q, rtol=0, atol=1e-5)
    still = slice(64, 128) if rope.part == "first" else slice(0, 64)
    assert torch.equal(turned[..., still], q[..., still])


def test_interleaved_rope_is_half_split_rope_on_permuted_channels() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    where = torch.tensor([0, 5, 99])
    half = apply_rope(x[:, order], where, Rope())
    inter = apply_rope(x, where, Rope().swapped())
    torch.testing.assert_close(inter[:, order], half, rtol=0, atol=1e-6)


def test_yarn_keeps_fast_channels_and_slows_the_others_by_the_factor() -> None:
    yarn = Rope(theta=160_000.0, yarn=Yarn(factor=16, original_tokens=65_536))
    plain, scaled = inverse_frequencies(Rope(theta=160_000.0)), inverse_frequencies(yarn)
    ratio = plain / scaled
    turns = 65_536 * plain / (2 * math.pi)
    assert torch.all(ratio[turns > 64] == 1)
    torch.testing.assert_close(ratio[turns < 0.5], torch.full_like(ratio[turns < 0.5], 16.0))
    assert torch.all(ratio[1:] >= ratio[:-1] - 1e-12)


def test_norms_match_their_definitions() -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    w, b = torch.rand(128), torch.rand(128)
    d = x.double()
    expected = (d - d.mean(1, keepdim=True)) / (d.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt() * w + b
    torch.testing.assert_close(layer_norm(x, w, b).double(), expected, rtol=1e-5, atol=1e-5)
    expected = d / (d.square().mean(1, keepdim=True) + 1e-6).sqrt() * w
    torch.testing.assert_close(rms_norm(x, w).double(), expected, rtol=1e-5, atol=1e-5)


def test_presets_state_the_identity_region() -> None:
    assert {name: p.identity_tokens for name, p in PRESETS.items()} == {
        "v3.2": 2048,
        "glm-5": 2048,
        "v4-flash": 2051,
        "v4-pro": 4099,
        "reference": 512,
    }
    flash = preset("v4-flash")
    assert flash.visible(torch.tensor([0, 2, 3, 6, 7])).tolist() == [0, 0, 1, 1, 2]
    with pytest.raises(PresetError, match=r"v5.*known: v3.2"):
        preset("v5")
