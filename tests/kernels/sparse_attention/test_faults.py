"""Each decode fault does what it was predicted to, and prefill-versus-decode divergence isolates decode."""

import math

import pytest
import torch

from longrecall.kernels.faults import catalogue, fault
from longrecall.kernels.sparse_attention import decode_with_fault, logits_kl, prefill_decode_kl, sparse_decode
from longrecall.kernels.sparse_attention.reference import sparse_decode_ref

H, D = 4, 32
DECODE_ONLY = [f for f in catalogue("sparse_attention") if f.signature.phases == ("decode",)]


def world(keys: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*shape, generator=g) for shape in ((2, H, D), (keys, D), (keys, D)))
    k[0], v[0] = 0.0, float("nan")  # slot 0 is the padding slot that masked entries point to
    indices = torch.arange(1, keys).expand(2, -1).int().clone()
    indices[:, -3:] = -1
    return q * 2, k, v, indices, torch.full((H,), 3.0)


def error(name: str, keys: int, *, with_sink: bool = True) -> float:
    """Relative error of the faulty output against fp64."""
    q, k, v, indices, sink = world(keys)
    sink = sink if with_sink else None
    v[0] = v[0] if name == "nan_in_masked_slot" else 0.0
    want = sparse_decode_ref(q, k, v, indices, scale=D**-0.5, sink=sink).out
    physical = None
    if name == "block_table_as_ids":
        physical = torch.randperm(keys, generator=torch.Generator().manual_seed(5))
        at = torch.empty_like(physical)
        at[physical] = torch.arange(keys)
        k, v = k[at], v[at]  # logical position p lies in slot physical[p]
        healthy = decode_with_fault(
            "none", q, k, v, indices, scale=D**-0.5, sink=sink, split_size=64, physical=physical
        ).out
        torch.testing.assert_close(healthy.double(), want, rtol=1e-4, atol=1e-5)
    got = decode_with_fault(name, q, k, v, indices, scale=D**-0.5, sink=sink, split_size=64, physical=physical).out
    return float((got.double() - want).norm() / want.norm())


def test_the_switch_at_none_is_the_healthy_kernel() -> None:
    q, k, v, indices, sink = world(200)
    healthy = sparse_decode(q, k, v, indices, scale=0.2, sink=sink, split_size=64, backend="torch")
    assert torch.equal(
        decode_with_fault("none", q, k, v, indices, scale=0.2, sink=sink, split_size=64).out, healthy.out
    )


@pytest.mark.parametrize("entry", DECODE_ONLY, ids=lambda f: f.name)
def test_every_decode_fault_is_visible_and_the_selection_is_untouched(entry) -> None:
    found = error(entry.switch["fault"], 300)
    assert math.isnan(found) or found > 0.01
    assert entry.signature.selection == "untouched" and not entry.signature.in_indexer_topk


def test_the_sink_counts_once_per_split_exactly() -> None:
    q, k, v, indices, sink = world(300)
    v[0] = 0.0
    splits = -(-indices.shape[1] // 64)
    got = decode_with_fault("sink_per_split", q, k, v, indices, scale=0.2, sink=sink, split_size=64).out
    want = sparse_decode_ref(q, k, v, indices, scale=0.2, sink=sink + math.log(splits)).out
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    one = decode_with_fault("sink_per_split", q, k, v, indices, scale=0.2, sink=sink, split_size=None).out
    healthy = sparse_decode(q, k, v, indices, scale=0.2, sink=sink, backend="torch").out
    torch.testing.assert_close(one, healthy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sink_per_split", "lse_base2"])
def test_merge_faults_are_absent_in_one_split_and_appear_with_the_second(name: str) -> None:
    # a wrong base also misplaces the sink, within a single split too: without one, only the merge is left
    with_sink = name == "sink_per_split"
    assert error(name, 60, with_sink=with_sink) < 1e-5 < 1e-3 < error(name, 300, with_sink=with_sink)
    assert fault(
        {"sink_per_split": "sink-per-split", "lse_base2": "split-merge-base2"}[name]
    ).signature.grows_with_length


def test_padding_garbage_needs_a_length_that_is_no_multiple_of_64() -> None:
    q, k, v, _, sink = world(400)
    v[0] = 0.0
    for keys, clean in ((128, True), (130, False)):
        indices = torch.arange(1, keys + 1).expand(2, -1).int()
        a = decode_with_fault("garbage_padding", q, k, v, indices, scale=0.2, sink=sink).out
        b = sparse_decode(q, k, v, indices, scale=0.2, sink=sink, backend="torch").out
        assert torch.allclose(a, b, atol=1e-6) is clean


def test_prefill_decode_kl_is_zero_for_equal_paths_and_counts_every_term() -> None:
    logp = -torch.rand(50, generator=torch.Generator().manual_seed(0)) * 4
    assert prefill_decode_kl(logp, logp).value == 0.0
    d = torch.tensor([0.3, -0.3])
    both = prefill_decode_kl(logp[:2] + d, logp[:2])
    assert both.value == pytest.approx(sum(math.exp(x) - 1 - x for x in (0.3, -0.3)) / 2, rel=1e-5)
    assert both.value > 0.04, "opposite differences must not cancel"
    assert prefill_decode_kl(logp[:1], logp[:1]).stderr is None


def test_prefill_decode_kl_estimates_the_true_divergence() -> None:
    g = torch.Generator().manual_seed(0)
    decode, prefill = torch.randn(20, generator=g), torch.randn(20, generator=g)
    truth = float(logits_kl(decode, prefill))
    drawn = torch.multinomial(decode.softmax(-1), 20000, replacement=True, generator=g)
    estimate = prefill_decode_kl(prefill.log_softmax(-1)[drawn], decode.log_softmax(-1)[drawn])
    assert abs(estimate.value - truth) < 4 * estimate.stderr


def test_divergence_isolates_decode_faults() -> None:
    """A toy head on top of attention: a decode fault parts the two paths, a fault of both paths does not."""
    q, k, v, indices, sink = world(300)
    v[0] = 0.0
    head = torch.randn(H * D, 50, generator=torch.Generator().manual_seed(3))

    def logits(out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (out.reshape(2, -1) * scale) @ head

    healthy = sparse_decode(q, k, v, indices, scale=0.2, sink=sink, split_size=64, backend="torch").out
    prefill = sparse_decode(q, k, v, indices, scale=0.2, sink=sink, backend="torch").out
    assert float(logits_kl(logits(prefill), logits(healthy)).max()) < 1e-8
    broken = decode_with_fault("lse_base2", q, k, v, indices, scale=0.2, sink=sink, split_size=64).out
    assert float(logits_kl(logits(prefill), logits(broken)).max()) > 1e-4
    assert float(logits_kl(logits(prefill, 2.25), logits(healthy, 2.25)).max()) < 1e-8


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: decode_with_fault("slow", *world(80)[:4], scale=1.0), "'slow' is unknown; known: none"),
        (lambda: decode_with_fault("block_table_as_ids", *world(80)[:4], scale=1.0), "needs `physical`"),
        (lambda: prefill_decode_kl(torch.zeros(3), torch.zeros(2)), r"got \[3\] and \[2\]"),
        (lambda: prefill_decode_kl(torch.tensor([0.0]), torch.tensor([-math.inf])), "not finite"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
