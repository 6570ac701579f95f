"""In-process evidence of a run: what cannot be measured is said, and leaves the run as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longrecall.results.in_process import evidence_path, explain_losses, gather_evidence
from longrecall.results.report import write_reports
from longrecall.runners.builds import ModelFolder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, campaign40: Any, run_writer: Callable[..., Path]) -> Path:
    folder = run_writer(tmp_path_factory.mktemp("runs") / campaign40.campaign.run_id, campaign40)
    write_reports(folder)
    return folder


def model_at(folder: Path) -> ModelFolder:
    return ModelFolder(path=folder, weights_hash=None, tokenizer_hash=None, template_hash=None)


def test_losses_that_cannot_be_measured_are_said_and_the_run_stays(run_dir: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    notes: list[str] = []
    assert not explain_losses(run_dir, model_at(tmp_path), notes.append)
    (said,) = notes
    assert said.startswith("not measured in-process: ")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_evidence_that_is_kept_is_not_measured_again(run_dir: Path, tmp_path: Path) -> None:
    names = ["topk-256", "index-rotation-one-sided", "hash-topk-double-scaling"]
    for name in names:
        evidence_path(run_dir, name).write_text("[]")
    assert gather_evidence(run_dir, names) == [evidence_path(run_dir, name) for name in names]
    notes: list[str] = []
    assert not explain_losses(run_dir, model_at(tmp_path), notes.append) and notes == []
