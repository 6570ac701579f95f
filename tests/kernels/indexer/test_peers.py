"""Peers of the bench: found, left out by name, and fed in their own layouts."""

import sys
from types import ModuleType

import pytest
import torch

from longrecall.kernels.indexer.bench_cases import Shape, select_rows
from longrecall.kernels.indexer.peers import Peers, deep_gemm_scores, paged_cache


def test_a_peer_that_does_not_load_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    peers = Peers()
    assert "flashinfer.top_k" not in peers.selections(4)
    assert peers.left_out["flashinfer"].startswith("ModuleNotFoundError: import of flashinfer halted")


def test_a_peer_that_loads_selects_with_its_version_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.__version__ = "9"  # type: ignore[attr-defined]
    module.top_k = lambda scores, k: scores.topk(k, dim=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    peers = Peers()
    scores = torch.arange(12.0).view(1, 12)
    select = peers.selections(3)["flashinfer.top_k"](scores)
    assert sorted(select(scores)[0].tolist()) == [9, 10, 11]
    assert peers.versions["flashinfer"] == "9"


def test_a_paged_cache_holds_a_pages_keys_before_its_scales() -> None:
    keys = torch.arange(128 * 4, dtype=torch.int32).remainder(256).to(torch.uint8).view(128, 4)
    scale = torch.arange(128.0)
    pages = paged_cache(keys, scale).view(2, -1)
    assert torch.equal(pages[1, : 64 * 4].view(64, 4), keys[64:])
    assert torch.equal(pages[1, 64 * 4 :].clone().view(torch.float32), scale[64:])


def test_many_queries_over_shared_keys_go_to_the_contiguous_scores() -> None:
    seen: dict[str, object] = {}

    class Module:
        @staticmethod
        def fp8_mqa_logits(q, keys, weights, start, end, clean_logits):  # type: ignore[no-untyped-def]
            seen.update(keys=keys, start=start, clean=clean_logits)
            return torch.zeros(len(q), len(keys[0]))

    q, keys = torch.zeros(65, 2, 4), torch.zeros(128, 4)
    visible = torch.full((65,), 128, dtype=torch.int32)
    call = deep_gemm_scores(Module, q, keys, torch.ones(128), torch.ones(65, 2), visible)
    assert call().shape == (65, 128)
    assert seen["clean"] is False and seen["keys"][0] is keys  # type: ignore[index]


def test_a_cpu_bench_of_selections_asks_for_no_gpu_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrecall.kernels.indexer.bench_cases.time_cpu", lambda call: (1.0, 2.0, 3.0))
    peers = Peers()
    rows = list(select_rows(Shape.parse("2x4K"), "cpu", peers))
    assert [row.provider for row in rows] == ["longrecall", "torch.topk"]
    assert not peers.left_out and not peers.versions
