"""Hyper-connections: the literal definition, the doubly stochastic matrix, and what each precision costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.kernels.mhc import PRECISIONS, drift_through_layers, mhc_head, mhc_post, mhc_pre, sinkhorn
from longrecall.kernels.mhc.faults import FAULTS
from longrecall.kernels.mhc.mixing import round_to_tf32


def site(T: int, C: int, n: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32):
    g = torch.Generator().manual_seed(seed)
    rows = 2 * n + n * n
    streams = torch.randn(T, n, C, generator=g).to(dtype)
    fn = torch.randn(rows, n * C, generator=g) * (n * C) ** -0.5
    return streams, fn, torch.rand(3, generator=g) + 0.5, torch.randn(rows, generator=g)


def literal(streams, fn, scale, base, out):
    """The definition of internals of DeepSeek-V4, one token at a time in fp64: u, post, comb and the next streams."""
    eps = 1e-6
    results = []
    for R, F in zip(streams.double(), out.double(), strict=True):
        n = len(R)
        x = R.reshape(-1)
        m = (fn.double() @ x) / (x.square().mean() + eps).sqrt()
        pre = 1 / (1 + (-(m[:n] * scale[0].double() + base[:n].double())).exp()) + eps
        post = 2 / (1 + (-(m[n : 2 * n] * scale[1].double() + base[n : 2 * n].double())).exp())
        c = (m[2 * n :] * scale[2].double() + base[2 * n :].double()).reshape(n, n)
        c = c.exp() / c.exp().sum(1, keepdim=True) + eps
        c = c / (c.sum(0, keepdim=True) + eps)
        for _ in range(19):
            c = c / (c.sum(1, keepdim=True) + eps)
            c = c / (c.sum(0, keepdim=True) + eps)
        u = sum(pre[k] * R[k] for k in range(n))
        after = [post[k] * F + sum(c[j, k] * R[j] for j in range(n)) for k in range(n)]
        results.append((u, post, c, torch.stack(after)))
    return [torch.stack(part) for part in zip(*results, strict=True)]


@pytest.mark.parametrize("T", [1, 5, 60], ids=["decode", "few", "prefill"])
@pytest.mark.parametrize("n", [2, 4])
def test_matches_the_definition(T: int, n: int) -> None:
    streams, fn, scale, base = site(T, 32, n)
    out = torch.randn(T, 32, generator=torch.Generator().manual_seed(1))
    u, post, comb, after = literal(streams, fn, scale, base, out)
    got = mhc_pre(streams, fn, scale, base)
    torch.testing.assert_close(got.u.double(), u, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.post.double(), post, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.comb.double(), comb, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(mhc_post(streams, out, got.post, got.comb).double(), after, rtol=1e-5, atol=5e-6)
    exact = mhc_pre(streams, fn, scale, base, precision="fp64")
    torch.testing.assert_close(exact.comb, comb, rtol=1e-12, atol=1e-13)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 100), st.floats(0.1, 3))
def test_mixing_matrix_is_doubly_stochastic(seed: int, T: int, spread: float) -> None:
    c = sinkhorn(torch.randn(T, 4, 4, generator=torch.Generator().manual_seed(seed)) * spread)
    assert float(c.min()) > 0
    torch.testing.assert_close(c.sum(1), torch.ones(T, 4), rtol=0, atol=3e-6)
    # columns are normalised last; rows follow as far as twenty steps have converged
    assert float((c.sum(2) - 1).abs().median()) < 1e-2


def test_few_and_many_tokens_agree() -> None:
    logits = torch.randn(100, 4, 4, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.cat([sinkhorn(row[None]) for row in logits])
    torch.testing.assert_close(sinkhorn(logits), one_by_one, rtol=2e-6, atol=1e-7)


def test_equal_streams_stay_a_plain_residual_connection() -> None:
    streams, fn, scale, base = site(6, 32)
    one = streams[:, :1].expand_as(streams)
    base[4:8] = 0.0  # 2 sigmoid(0) = 1
    fn[4:8] = 0.0
    got = mhc_pre(one, fn, scale, base)
    out = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    after = mhc_post(one, out, got.post, got.comb)
    # columns sum to 1 - 1e-6: the copies stay copies, each residual + F(u)
    torch.testing.assert_close(after, (one[:, 0] + out)[:, None].expand_as(after), rtol=1e-5, atol=1e-5)


def test_head_is_the_pre_mix_alone() -> None:
    streams, fn, _, base = site(5, 32)
    scale = torch.tensor([0.7])
    got = mhc_head(streams, fn[:4], scale, base[:4])
    x = streams.double().reshape(5, -1)
    m = x @ fn[:4].double().T / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    pre = (m * 0.7 + base[:4].double()).sigmoid() + 1e-6
    torch.testing.assert_close(got.double(), torch.einsum("tk,tkc->tc", pre, streams.double()), rtol=1e-5, atol=2e-6)


def test_tf32_rounding_keeps_ten_bits_to_nearest_even() -> None:
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 1 + 2**-11 + 2**-20, 0.0, 3e38])
    want = torch.tensor([1 + 2**-10, 1.0, 1 + 2**-9, -1.0, 1 + 2**-10, 0.0])
    assert torch.equal(round_to_tf32(x)[:6], want)
    assert abs(float(round_to_tf32(x)[6]) / 3e38 - 1) < 2**-11


def test_each_precision_errs_by_its_own_rounding_and_no_more() -> None:
    streams, fn, scale, base = site(64, 256, dtype=torch.bfloat16)
    exact = mhc_pre(streams, fn, scale, base, precision="fp64")
    error = {}
    for precision in PRECISIONS[1:]:
        got = mhc_pre(streams, fn, scale, base, precision=precision)
        error[precision] = float((got.comb.double() - exact.comb).abs().max())
    assert error["fp32"] < 2e-6 < error["tf32-weights"] < error["bf16-weights"] < error["bf16-in-out"] < 3e-2
    assert error["bf16-after-sinkhorn"] < 2**-8


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_every_precision_is_below_the_rounding_that_bf16_streams_bring(fault) -> None:
    g = torch.Generator
    arguments = {"layers": 12, "hidden": 64, "tokens": 16}
    [alone] = drift_through_layers(
        **arguments, generator=g().manual_seed(0), precisions=(fault.switch["precision"],), streams_bf16=False
    )
    [streams] = drift_through_layers(**arguments, generator=g().manual_seed(0), precisions=("fp32",), streams_bf16=True)
    [both] = drift_through_layers(
        **arguments, generator=g().manual_seed(0), precisions=(fault.switch["precision"],), streams_bf16=True
    )
    assert 0 < alone.final < 0.7 * streams.final
    assert both.final < 1.3 * streams.final
    assert len(alone.per_layer) == 12


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda s, f, c, b: mhc_pre(s, f[:, 1:], c, b),
            r"need fn \[24, 64\], scale \[3\], base \[24\]; got \[24, 63\]",
        ),
        (lambda s, f, c, b: mhc_pre(s, f, c, b, precision="fp16"), "'fp16'; known: fp64, fp32"),
        (lambda s, f, c, b: mhc_pre(s, f, c, b, sinkhorn_steps=0), "sinkhorn steps is 0"),
        (lambda s, f, c, b: mhc_post(s, s[:, 0, 1:], c, b), r"need out \[2, 16\]"),
        (lambda s, f, c, b: mhc_head(s, f, c, b), r"need fn \[4, 64\]"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*site(2, 16))
