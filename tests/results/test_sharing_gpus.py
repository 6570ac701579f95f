"""Builds that share a GPU: how many are served at a time, and which GPU each one gets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longrecall.results.plan import Options
from longrecall.results.serving import plan_waves
from longrecall.runners.engines import ENGINES
from longrecall.runners.schema import PatchSet


def sizes(servers_per_gpu: int, builds: int) -> list[int]:
    plan: Any = SimpleNamespace(
        options=Options(patchset=Path("p.toml"), servers_at_once=50, servers_per_gpu=servers_per_gpu),
        engine=ENGINES["sglang"],
        patchset=PatchSet(name="p", path="p.toml", engine="sglang", patches=()),
    )
    some: Any = list(range(builds))
    return [len(wave) for wave in plan_waves(plan, some, lambda text: None)]


def test_a_gpu_serves_one_build_unless_told_that_builds_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert sizes(1, 7) == [2, 2, 2, 1]
    assert sizes(3, 7) == [6, 1]
    assert sizes(12, 11) == [11]
