"""On the reference build: exponents by outputs and by source, mixing and split decode by divergence.

The full tables are docs/benchmarks/reference_suspects.md; here the same code runs on a short prompt.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "reference_suspects.py"


@pytest.fixture(scope="module")
def suspects() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_suspects", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder() -> Path:
    from longrecall.runners.reference.convert import reference_folder

    return reference_folder()


def test_exponents_from_outputs_and_from_source_agree(suspects: ModuleType, folder: Path) -> None:
    rows = suspects.measure_exponents(folder, lines=2, layers=[0, 2, 3, 17])
    assert {row["build"]: row["traced"] for row in rows} == suspects.EXPECTED
    for row in rows:
        for kind, wanted in zip(("hash", "other"), suspects.EXPECTED[row["build"]], strict=True):
            read = row[kind]["relative"]
            assert abs(read["value"] - wanted) < max(0.01, 3 * read["stderr"]), (row["build"], kind, read)
            assert read["reading"] == ("never", "once", "twice")[wanted]
    assert [row["all"]["relative"]["reading"] for row in rows] == ["once", "mixed", "never"]


def test_lower_precision_mixing_stays_near_the_rounding_of_packing(suspects: ModuleType, folder: Path) -> None:
    measured = suspects.measure_mhc(
        folder, prompts=1, lines=6, tail=32, precisions=("bf16-in-out", "bf16-after-sinkhorn")
    )
    rows = {row["variant"]: row for row in measured}
    [packing] = [row for name, row in rows.items() if name.startswith("packing")]
    assert packing["kl_mean_nats"] > 0, "the prompt fits one chunk: nothing was compared"
    for name, row in rows.items():
        assert row["kl_mean_nats"] < 10 * packing["kl_mean_nats"], name


def test_split_decode_agrees_with_prefill_and_faults_do_not(suspects: ModuleType, folder: Path) -> None:
    rows = {row["variant"]: row["kl_mean_nats"] for row in suspects.measure_decode(folder, lengths=(300,), steps=3)}
    healthy = max(kl for name, kl in rows.items() if not name.startswith("fault"))
    assert healthy < 1e-4  # measured 3e-6
    assert rows["fault: lse_base2"] > 5 * healthy
    assert rows["fault: garbage_padding"] > 0.01
    # 512 slots of which the last 212 are padding: lengths that are 64 slots old lose nothing yet
    assert rows["fault: stale_lengths"] < 2 * healthy + 1e-6
