"""Experts, combine and whole layers on the torch path, and the exponents that `scale_exponent` reads off them."""

from dataclasses import replace

import pytest
import torch

from longrecall.kernels.moe import (
    MoeLayer,
    ScalingPlan,
    TopK,
    moe_experts,
    moe_sum_reduce,
    pack_experts,
    preset,
    scale_exponent,
    swiglu,
    topk,
    unpack_experts,
)
from longrecall.kernels.moe.exponent import fit_parts
from longrecall.kernels.moe.faults import EXPONENTS, FAULTS
from longrecall.kernels.moe.formats import EXPERT_FORMATS
from longrecall.kernels.moe.layer import PLACEMENTS, Parts, random_layer
from longrecall.kernels.moe.reference import moe_experts_ref, moe_sum_reduce_ref

SMALL = replace(preset("v4-flash"), num_experts=12, num_topk=4, hidden=128, intermediate_hidden=64)
TIMES = {"topk": 1, "reduce": 1, "both": 2, "neither": 0}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def probes(tokens: int = 48, hidden: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    g = generator(9)
    return torch.randn(tokens, hidden, generator=g), torch.randint(0, 512, (tokens,), generator=g)


@pytest.mark.parametrize("T, E, K", [(1, 4, 2), (9, 5, 3), (30, 2, 1)])
@pytest.mark.parametrize("fmt", [None, "bf16", "mxfp4"])
def test_experts_match_fp64(T: int, E: int, K: int, fmt) -> None:
    g = generator()
    x = torch.randn(T, 64, generator=g)
    w13, w2 = torch.randn(E, 64, 64, generator=g) / 8, torch.randn(E, 64, 32, generator=g) / 6
    chosen = topk(torch.randn(T, E, generator=g), None, K)
    p13, p2 = (w13, w2) if fmt is None else (pack_experts(w13, fmt), pack_experts(w2, fmt))
    got = moe_experts(x, p13, p2, chosen, swiglu_limit=0.7, backend="torch")
    want = moe_experts_ref(x, p13, p2, chosen, swiglu_limit=0.7)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_clamp_is_above_only_for_the_gate_and_both_sides_for_up() -> None:
    gate, up = torch.tensor([-50.0, 50.0, 1.0]), torch.tensor([-50.0, 50.0, 2.0])
    silu = torch.nn.functional.silu
    want = torch.stack([silu(gate[0]) * -10, silu(torch.tensor(10.0)) * 10, silu(gate[2]) * 2])
    torch.testing.assert_close(swiglu(gate, up, 10.0), want)
    torch.testing.assert_close(swiglu(gate, up, None), silu(gate) * up)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_sum_reduce_matches_fp64(dtype: torch.dtype, limit: float, weighted: bool) -> None:
    y = torch.randn(7, 3, 50, generator=generator()).to(dtype)
    w = torch.rand(7, 3, generator=generator(1)) if weighted else None
    got, want = moe_sum_reduce(y, w, 2.5), moe_sum_reduce_ref(y, w, 2.5)
    assert got.dtype == dtype
    assert float((got.double() - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("hash_routed", [False, True], ids=["other", "hash"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_is_read_back(placement, hash_routed: bool) -> None:
    x, tokens = probes()
    plan = ScalingPlan(hash=placement if hash_routed else "reduce", other="reduce" if hash_routed else placement)
    read = scale_exponent(random_layer(SMALL, generator(), hash_routed=hash_routed, plan=plan), x, tokens)
    assert read.routed.value == pytest.approx(TIMES[placement], abs=1e-4)
    assert read.shared.value == pytest.approx(0, abs=1e-4)
    assert read.residual < 1e-5


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("quantised_side", ["layer", "reference"])
def test_quantised_experts_do_not_hide_the_exponent(fmt, placement, quantised_side: str) -> None:
    x, _ = probes()
    plain = random_layer(SMALL, generator(3), plan=ScalingPlan(other=placement))
    packed = replace(
        plain,
        weights=replace(
            plain.weights, w13=pack_experts(plain.weights.w13, fmt), w2=pack_experts(plain.weights.w2, fmt)
        ),
    )
    layer, reference = (packed, plain) if quantised_side == "layer" else (plain, packed)
    read = scale_exponent(layer, x, reference=reference)
    wanted = TIMES[placement]
    assert abs(read.routed.value - wanted) < max(3 * read.routed.stderr, 1e-4), read
    assert read.routed.reading == ("never", "once", "twice")[wanted]


def test_reading_survives_flipped_experts_and_broken_tokens() -> None:
    x, tokens = probes()
    layer = random_layer(SMALL, generator())
    out = layer(x, tokens)
    out[:8] = torch.randn(8, 128, generator=generator(5))
    assert fit_parts(out, layer.parts(x, tokens), 1.5).routed.reading == "once"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_norm_behind_the_layer_leaves_the_relative_exponent(placement) -> None:
    x, tokens = probes()
    layer = random_layer(SMALL, generator(), plan=ScalingPlan(other=placement))
    out = layer(x, tokens)
    read = fit_parts(out / out.square().mean(-1, keepdim=True).sqrt(), layer.parts(x, tokens), 1.5)
    assert read.relative.value == pytest.approx(TIMES[placement], abs=1e-4)
    assert abs(read.shared.value) > 0.01, "the norm moves both parts alike"


def test_layers_that_differ_are_mixed_and_each_is_kept() -> None:
    x, tokens = probes()
    plan = ScalingPlan(hash="both", other="reduce")
    layers = {f"{i}": random_layer(SMALL, generator(i), hash_routed=i < 2, plan=plan) for i in range(5)}
    read = scale_exponent(layers, x, tokens)
    assert read.routed.reading == "mixed" and "1.00, 2.00" in read.routed.reason
    assert [round(e.routed.value) for _, e in read.layers] == [2, 2, 1, 1, 1]
    assert read.shared.reading == "never"
    assert scale_exponent(list(layers.values())[:2], x, tokens).routed.reading == "twice"


def test_tokens_of_one_layer_that_differ_are_mixed() -> None:
    x, _ = probes()
    layer = random_layer(SMALL, generator())
    parts = layer.parts(x)
    n = torch.ones(len(x), 1, dtype=torch.float64)
    n[::3] = 2
    read = fit_parts(1.5**n * parts.routed + parts.shared, parts, 1.5)
    assert read.routed.reading == "mixed"


def test_what_cannot_be_told_is_said() -> None:
    x, _ = probes()
    layer = random_layer(replace(SMALL, routed_scaling_factor=1.0), generator())
    assert "factor is 1" in scale_exponent(layer, x).routed.reason
    routed = torch.randn(8, 32, generator=generator(), dtype=torch.float64)
    parallel = fit_parts(1.5 * routed + routed, Parts(routed, routed.clone()), 1.5)
    assert parallel.routed.value is None and "parallel" in parallel.routed.reason
    alone = fit_parts(1.5 * routed, Parts(routed, None), 1.5)
    assert alone.routed.reading == "once" and alone.shared.reason == "no shared expert"
    noise = torch.randn(8, 32, generator=generator(7), dtype=torch.float64)
    assert fit_parts(100 * noise, Parts(routed, None), 1.5).routed.reading == "cannot tell"
    with pytest.raises(ValueError, match="3 tokens are too few"):
        fit_parts(routed[:3], Parts(routed[:3], None), 1.5)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_every_fault_shows_the_exponents_it_was_predicted_to(fault) -> None:
    switch = dict(fault.switch)
    fused = bool(switch.pop("fuse_shared", False))
    plan, predicted = ScalingPlan(**switch), EXPONENTS[fault.name]
    # a small limit, so that dropping the clamp shows at unit-variance inputs
    small = replace(SMALL, swiglu_limit=0.5)
    for hash_routed, routed in ((True, predicted.routed_hash), (False, predicted.routed_other)):
        for tokens in (8, 64):  # the same at every length: the fault does not know the context
            x, ids = probes(tokens)
            layer = random_layer(small, generator(), hash_routed=hash_routed, plan=plan, fuse_shared=fused)
            read = scale_exponent(layer, x, ids)
            if plan.clamp:
                assert read.routed.value == pytest.approx(routed, abs=1e-3)
                assert read.shared.value == pytest.approx(predicted.shared, abs=1e-3)
            else:
                assert read.residual > 0.05 > scale_exponent(replace(layer, plan=ScalingPlan()), x, ids).residual


def test_a_healthy_fused_slot_equals_a_separate_shared_expert() -> None:
    x, tokens = probes()
    for placement in ("topk", "reduce"):
        layer = random_layer(SMALL, generator(), plan=ScalingPlan(other=placement))
        torch.testing.assert_close(replace(layer, fuse_shared=True)(x, tokens), layer(x, tokens), rtol=1e-4, atol=1e-5)


def test_a_factor_fault_is_no_rescale_of_the_layer() -> None:
    x, _ = probes()
    right, doubled = (random_layer(SMALL, generator(), plan=ScalingPlan(other=p)) for p in ("reduce", "both"))
    a, b = right(x), doubled(x)
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    assert float(cosine.max()) < 0.999, "a norm behind the layer would have removed a pure rescale"


@pytest.mark.parametrize("name", ["v2", "v3", "v3.2", "v4-flash", "v4-pro", "glm-5"])
def test_presets_run(name: str) -> None:
    p = preset(name)
    small = replace(p, num_experts=16, num_topk=3, hidden=64, intermediate_hidden=32)
    x, tokens = torch.randn(6, 64, generator=generator()), torch.arange(6)
    layer = random_layer(small, generator(), hash_routed=p.num_hash_layers > 0)
    assert scale_exponent(layer, x, tokens).routed.reading == "once"


def test_bad_input_is_named() -> None:
    x, _ = probes()
    layer = random_layer(SMALL, generator(), hash_routed=True)
    with pytest.raises(ValueError, match="needs token_ids"):
        layer(x)
    with pytest.raises(ValueError, match="placement 'twice'"):
        ScalingPlan(other="twice")
    with pytest.raises(ValueError, match="needs a shared expert of the routed experts' size"):
        replace(layer, fuse_shared=True, weights=replace(layer.weights, shared_w13=None))(x, torch.zeros(48).long())
    with pytest.raises(ValueError, match="there are 12"):
        w = layer.weights
        moe_experts(x, w.w13, w.w2, TopK(torch.ones(48, 1), torch.full((48, 1), 12)), backend="torch")
    with pytest.raises(ValueError, match=r"topk_weights has shape \(3,\)"):
        moe_sum_reduce(torch.ones(2, 3, 4), torch.ones(3))
    assert isinstance(layer, MoeLayer) and unpack_experts(pack_experts(torch.ones(1, 2, 32), "bf16")).shape == (
        1,
        2,
        32,
    )
