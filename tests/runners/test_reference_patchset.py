"""The shipped patchset applies to this checkout, line for line, and each patch changes what it says."""

from pathlib import Path

import pytest

from longrecall.runners.builds import ModelFolder, prepare_builds
from longrecall.runners.engines import ENGINES
from longrecall.runners.patchset import load_patchset

PATCHSETS = sorted((Path(__file__).parent.parent.parent / "patchsets").glob("*.toml"))
OURS = [path for path in PATCHSETS if load_patchset(path).engine in ("reference", "llamacpp")]
"""Those whose base source is this checkout; the others need another project's source."""
NAMED = {
    "index-rotation-one-sided": "culprit",
    "hash-topk-double-scaling": "culprit",
    "index-keys-fp8": "exonerated",
    "mhc-bf16": "exonerated",
    "split-kv-decode": "exonerated",
    "noop": "exonerated",
}


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_every_shipped_patchset_makes_its_builds(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path))
    patchset = load_patchset(path)
    unknown = ModelFolder(path=tmp_path, weights_hash=None, tokenizer_hash=None, template_hash=None)
    prepared = prepare_builds(patchset, ENGINES[patchset.engine], unknown, threads=1)
    hashes = [item.build.manifest.tree_hash for item in prepared if item.build.manifest]
    patched = sum(bool(patch.diffs) for patch in patchset.patches)
    assert len(set(hashes)) == 1 + patched, "two builds have one source"


def test_the_reference_patchset_names_its_answers_and_controls() -> None:
    patchset = load_patchset(PATCHSETS[0].with_name("reference.toml"))
    assert {patch.patch_id: patch.expect for patch in patchset.patches} == NAMED
    roles = [patch.role for patch in patchset.patches]
    assert roles.count("positive-control") == 1 and roles.count("negative-control") == 1
