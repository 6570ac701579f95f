"""What two builds' parts on the same inputs say: a fault shows in the part that it is in, and in no other."""

import pytest
import torch
from torch import Tensor

from longrecall.kernels.moe import Parts
from longrecall.runners.reference.config import ReferenceConfig
from longrecall.runners.reference.evidence import DECODE_AT, DECODE_STEPS, MIXED_LAYERS, MOE_LAYERS, ROWS, rows_of

FACTOR, TOPK = 2.5, 32
CONFIG = ReferenceConfig(routed_scaling_factor=FACTOR, num_hash_layers=3, index_topk=TOPK)
WANTED = {"scale_exponent", "mhc_shift", "selection_shift", "decode_shift", "kv_shift"}


def parts() -> dict[int, Parts]:
    g = torch.Generator().manual_seed(0)
    return {i: Parts(*torch.randn(2, 16, 48, generator=g, dtype=torch.float64)) for i in MOE_LAYERS}


def build(**faults: float) -> dict[str, Tensor]:
    """Outputs of a build: healthy, or with one part off by the given amount."""
    g = torch.Generator().manual_seed(1)
    made: dict[str, Tensor] = {}
    for i, (routed, shared) in parts().items():
        n = 1 + faults.get("exponent_hash" if i < 3 else "exponent_other", 0.0)
        made[f"moe{i}"] = (FACTOR**n * routed + shared).float()
    for i in MIXED_LAYERS:
        for n in range(2):
            made[f"mix{i}.{n}.u"] = 900 * torch.rand(ROWS, 640, generator=g)
            made[f"mix{i}.{n}.post"] = torch.rand(ROWS, 4, generator=g) * (1 + faults.get("mixing", 0.0))
    rows = torch.arange(TOPK).expand(ROWS, -1).clone()
    rows[:, : int(faults.get("selection", 0.0) * TOPK)] += 100
    rows[-1, -1] = 199
    made["selected5"] = rows.int()
    for length in DECODE_AT:
        made[f"decode{length}"] = torch.full((DECODE_STEPS,), 0.01 + faults.get("decode", 0.0))
        made[f"packed{length}"] = torch.full((DECODE_STEPS,), 0.01 + faults.get("rounding", 0.0))
    made["kv"] = torch.ones(2, 30, 8) * (1 + faults.get("kv", 0.0))
    return made


def signs(**faults: float) -> dict[str, float]:
    rows = rows_of("p", build(), build(**faults), parts(), CONFIG)
    assert {row["feature"] for row in rows} == WANTED and all(row["source"] == "in-process" for row in rows)
    return {str(row["feature"]): float(str(row["estimate"])) for row in rows}


@pytest.mark.parametrize(
    ("fault", "feature", "size"),
    [
        ({"exponent_hash": 1.0}, "scale_exponent", 1.0),
        ({"exponent_other": -1.0}, "scale_exponent", 1.0),
        ({"mixing": 0.05}, "mhc_shift", 0.05),
        ({"selection": 0.5}, "selection_shift", 0.5),
        ({"decode": 0.3}, "decode_shift", 0.3),
        ({"kv": 0.1}, "kv_shift", 0.1),
        ({}, "", 0.0),
        ({"decode": 0.2, "rounding": 0.1}, "", 0.0),  # broken elsewhere: every rounding counts, in prefill as well
    ],
)
def test_a_fault_shows_in_its_own_part_alone(fault: dict[str, float], feature: str, size: float) -> None:
    found = signs(**fault)
    for name, estimate in found.items():
        assert estimate == pytest.approx(size if name == feature else 0.0, abs=0.02), name
