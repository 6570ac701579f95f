"""Against the pure-torch oracles inside the sglang wheel (0.5.23), read as files and never imported.

Importing sglang starts CUDA compilation; the named functions need torch alone, so each is taken out of its file by
name. Without an installed package it is that of `make sglang-cpu` in this checkout, or the `sglang` folder of an
unpacked wheel, which LONGRECALL_SGLANG names.
"""

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longrecall.kernels.indexer import indexer_logits_ref, quantize
from longrecall.kernels.indexer.emulate import Activations, Pipeline, scores
from longrecall.kernels.indexer.formats import decode_bytes
from longrecall.kernels.indexer.paged import SLOTS, new_pages, write_pages
from longrecall.kernels.indexer.presets import preset


def sglang_folder() -> Path | None:
    named = os.environ.get("LONGRECALL_SGLANG")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("sglang")
    if spec and spec.origin:
        return Path(spec.origin).parent
    checkout = Path(__file__).resolve().parents[3]
    return next(checkout.glob(".venv-sglang/lib/python3*/site-packages/sglang"), None)


FOLDER = sglang_folder()
COMMON = "test/kernels/deepseek_v4/common.py"
PAGED = "test/kernels/paged_mqa.py"
INDEXER = "srt/layers/attention/dsv4/indexer.py"
DSA = "srt/layers/attention/dsa/utils.py"
pytestmark = pytest.mark.skipif(
    FOLDER is None or not (FOLDER / COMMON).is_file(),
    reason="sglang 0.5.23 is neither installed, nor in .venv-sglang, nor named by LONGRECALL_SGLANG",
)


def oracle(file: str, *names: str, **given: Any) -> Callable[..., Any]:
    """The last of the named functions, with those before it and the module's plain constants in scope."""
    assert FOLDER is not None
    tree = ast.parse((FOLDER / file).read_text())
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "Any": Any, "Tuple": tuple, **given}
    for node in tree.body:
        constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.Dict | ast.BinOp)
        if constant or (isinstance(node, ast.FunctionDef) and node.name in names):
            try:
                exec(compile(ast.Module([node], []), file, "exec"), scope)
            except NameError:  # a constant computed from what was not imported
                assert constant
    missing = [name for name in names if name not in scope]
    assert not missing, f"{file} of this sglang has no {missing}"
    return scope[names[-1]]


def keys_with_ties(count: int) -> torch.Tensor:
    """bf16 values, a third of them exact multiples of a quarter: power-of-two scales then produce exact ties."""
    x = torch.randn(count, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[: count // 3] = (x[: count // 3] * 4).round() / 4
    return x.float()


def test_fp4_keys_and_scales_are_the_same_bytes() -> None:
    quantize_ref = oracle(COMMON, "ceil_ue8m0_exp_ref", "fp4_e2m1_code_ref", "quantize_fp4_indexer_ref")
    x = keys_with_ties(300)
    theirs, their_scale = quantize_ref(x)
    ours = quantize(x, "fp4_ties_down")
    packed = sum(ours.scale[:, g].int() << (8 * g) for g in range(4))
    assert torch.equal(packed, their_scale)
    # their code of a negative value that rounds to zero has no sign; ours keeps it, and both mean 0
    assert torch.equal(ours.data.where(ours.data & 0x0F != 8, ours.data & 0xF0) & 0x7F, theirs & 0x7F) or torch.equal(
        _without_minus_zero(ours.data), theirs
    )
    assert torch.equal(_without_minus_zero(ours.data), theirs)


def _without_minus_zero(data: torch.Tensor) -> torch.Tensor:
    low, high = data & 15, data >> 4
    return low.where(low != 8, 0) | (high.where(high != 8, 0) << 4)


def test_fp4_pages_are_the_same_bytes() -> None:
    quantize_ref = oracle(COMMON, "ceil_ue8m0_exp_ref", "fp4_e2m1_code_ref", "quantize_fp4_indexer_ref")
    store_ref = oracle(COMMON, "store_fp4_index_cache_ref")
    x = keys_with_ties(50)
    where = torch.randperm(2 * SLOTS, generator=torch.Generator().manual_seed(1))[:50]
    theirs = store_ref(*quantize_ref(x), where, 2)
    packed = quantize(x, "fp4_ties_down")
    pages = new_pages(2, "fp4_ties_down")
    write_pages(pages, type(packed)(fmt=packed.fmt, data=_without_minus_zero(packed.data), scale=packed.scale), where)
    assert torch.equal(pages, theirs)


def test_fp8_pages_are_the_same_bytes() -> None:
    fused = oracle(DSA, "fp8_mqa_logits_make_fused_kv")
    packed = quantize(keys_with_ties(3 * SLOTS), "fp8")
    assert packed.scale is not None
    pages = new_pages(3, "fp8")
    write_pages(pages, packed, torch.arange(3 * SLOTS))
    theirs = fused(
        packed.data.view(torch.float8_e4m3fn).view(3, SLOTS, 128), packed.scale.view(3, SLOTS), SLOTS, 128
    )  # fmt: skip
    assert torch.equal(pages, theirs.view(3, -1))


def test_power_of_two_scales_are_the_same() -> None:
    ceil_to_ue8m0 = oracle(DSA, "fp8_mqa_logits_ceil_to_ue8m0")
    x = keys_with_ties(3000)
    scale = quantize(x, "fp8_ue8m0").scale
    assert scale is not None
    assert torch.equal(scale, ceil_to_ue8m0(x.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448))


def paged_case() -> SimpleNamespace:
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 64, 128, generator=g), torch.randn(4 * SLOTS, 128, generator=g)
    weights = torch.randn(2, 64, generator=g)
    q8 = q.to(torch.float8_e4m3fn)
    packed = quantize(k, "fp8")
    table = torch.tensor([[2, 0, 3], [1, 3, 0]], dtype=torch.int32)
    lengths = torch.tensor([150, 190])
    slots = (table.long().unsqueeze(2) * SLOTS + torch.arange(SLOTS)).flatten(1)  # logical → physical
    return SimpleNamespace(q=q8, k=packed, weights=weights, table=table, lengths=lengths, slots=slots)


def test_paged_logits_agree_with_the_fp32_oracle() -> None:
    case = paged_case()
    reference = oracle(PAGED, "ref_fp8_paged_mqa_logits")
    k8 = case.k.data.view(torch.float8_e4m3fn).view(4, SLOTS, 128)
    theirs = reference(
        case.q.unsqueeze(1), k8, case.k.scale.view(4, SLOTS), case.weights, case.lengths, case.table, 192, SLOTS
    )
    for row in range(2):
        own = case.slots[row, : int(case.lengths[row])]
        keys = decode_bytes(case.k.data[own], "e4m3fn") * case.k.scale[own]
        ours = indexer_logits_ref(case.q[row : row + 1].float(), keys, case.weights[row : row + 1])[0]
        # their own tolerance between kernels is atol 5e-5, rtol 1e-5 on logits near 100
        torch.testing.assert_close(ours, theirs[row, : len(own)], atol=2e-4, rtol=1e-5)
        assert bool((theirs[row, len(own) :] == -torch.inf).all())


def test_the_torch_fallback_is_our_bf16_dot_arm_with_zero_masks() -> None:
    case = paged_case()
    fallback = oracle(
        INDEXER, "fp8_paged_mqa_logits_torch", FP8_DTYPE=torch.float8_e4m3fn, _arange_cache={}
    )  # fmt: skip
    pages = new_pages(4, "fp8")
    write_pages(pages, case.k, torch.arange(4 * SLOTS))
    theirs = fallback(
        case.q.unsqueeze(1), pages.view(4, SLOTS, 1, 132), case.weights, case.lengths, case.table, None, 192, False
    )
    for row in range(2):
        length = int(case.lengths[row])
        own = case.slots[row, :length]
        given = Activations(
            preset=preset("v4-flash"), q=case.q[row : row + 1].float(), weights=case.weights[row : row + 1],
            keys=decode_bytes(case.k.data[own], "e4m3fn") * case.k.scale[own], positions=torch.tensor([4 * length]),
        )  # fmt: skip
        exact = scores(given, Pipeline(rotate="none"))[0]
        ours = scores(given, Pipeline(rotate="none", dots="bf16"))[0]
        spread = float(exact.std())
        # same rounding of the dot products to bf16, but theirs multiplies the key scale in after the head sum
        assert float((theirs[row, :length] - exact).abs().max()) < 0.02 * spread
        assert float((theirs[row, :length] - ours).abs().max()) < 0.02 * spread
        assert float(theirs[row, length:].abs().max()) == 0, "masked slots score 0, not -inf"
