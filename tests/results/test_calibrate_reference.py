"""Known faults of the reference build as patches, and what a calibration on them says."""

import ast
import dataclasses
import json
import random

import pytest

from longrecall.evals.causes import FAMILIES
from longrecall.evals.schema import Attribution, NextArm
from longrecall.results.calibrate_reference import (
    FaultResult,
    ReferenceCalibration,
    arms_wanted,
    draw_faults,
    faults_of,
    report_lines,
    with_controls,
    write_catalogue,
)
from longrecall.runners.diffs import apply_to_text, parse_diff
from longrecall.runners.engines import ROOT
from longrecall.runners.patchset import load_patchset
from longrecall.runners.reference.faults import FAULTS, Edit, FaultEditError, fault_diff


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_every_fault_is_a_diff_that_applies_to_this_source_and_still_parses(fault):
    for file in parse_diff(fault_diff(fault, ROOT), fault.name):
        before = (ROOT / file.path).read_text(encoding="utf-8")
        after = apply_to_text(before, file, fault.name)
        assert after != before and ast.parse(after)
    assert fault.family in FAMILIES


def test_an_edit_whose_text_has_moved_is_named():
    moved = dataclasses.replace(FAULTS[0], edits=(Edit("runners/reference/moe.py", "no such line", ""),))
    with pytest.raises(FaultEditError, match=r"moe\.py holds 'no such line' 0 times, not 1"):
        fault_diff(moved, ROOT)


def test_the_catalogue_is_a_patchset_and_the_draw_is_seeded(tmp_path):
    patchset = load_patchset(write_catalogue(tmp_path, FAULTS))
    assert [p.patch_id for p in patchset.patches] == [f.name for f in FAULTS] and patchset.onset_tokens == 272
    assert draw_faults(5, 0) == draw_faults(5, 0) != draw_faults(5, 1)
    names = [f.name for f in with_controls(draw_faults(5, 1))]
    assert len(set(names)) == len(names) and {"scaling-twice", "scaling-twice-hash"} <= set(names)


def test_a_second_draw_can_leave_out_what_an_earlier_calibration_drew(tmp_path):
    first = [result(f.name) for f in draw_faults(20, 0)]
    stored = dataclasses.asdict(calibration(first[:15], first[15:]))
    (tmp_path / "calibration.json").write_text(json.dumps(stored))
    known = faults_of(tmp_path)
    second = {f.name for f in draw_faults(len(FAULTS), 1, known)}
    assert len(known) == 20 and second == {f.name for f in FAULTS} - known
    with pytest.raises(ValueError, match=r"calibration\.json: no finished calibration"):
        faults_of(tmp_path / "nowhere")


def attribution(patch, feature):
    arm = feature and NextArm(feature=feature, question="?", how="!", cost=1.0, bits=1.0, separates=())
    return Attribution(
        patch=patch, causes=(), observations=(), length_dependent_share=None, share_ci_low=None, share_ci_high=None,
        next_arm=arm, sentence="",
    )  # fmt: skip


def test_only_open_attributions_ask_for_arms_that_can_be_served():
    found = [attribution("a", "scaling_recovers"), attribution("b", None), attribution("c", "cache_off_recovers")]
    assert arms_wanted(found) == [("a", "scaling-1"), ("c", "cache-off")]
    assert arms_wanted([attribution("d", "kv_shift")]) == []


def result(name, *, verdict="culprit", right=True, loss=0.5):
    return FaultResult(
        name=name, title=name, family="index keys", loss=(0.0, loss), verdict=verdict,
        attributed=None if right is None else "index keys" if right else "MHC", probability=0.99, cause="x",
        right=right, right_from_ladder=right, arms=("in-process",), served_tokens=1234,
        sentence="",
    )  # fmt: skip


def calibration(drawn, harmless=()):
    return ReferenceCalibration(
        rungs=(256, 832), conversations=12, seed=0, base_recall=(0.9, 0.5), drawn=tuple(drawn),
        harmless=tuple(harmless), served_tokens=1000, replies=100,
    )  # fmt: skip


def test_the_bars_are_eighteen_of_twenty_and_no_exoneration():
    names = [f"f{i}" for i in range(20)]
    random.Random(0).shuffle(names)
    good = [result(n, right=i >= 2) for i, n in enumerate(names)]
    assert calibration(good).within_bars()
    assert not calibration([result(n, right=i >= 3) for i, n in enumerate(names)]).within_bars()
    assert not calibration([result("x", verdict="exonerated"), *good[1:]]).within_bars()
    harmless = [result("h", verdict="culprit", right=None, loss=0.01)]
    assert not calibration(good, harmless).within_bars()
    text = "\n".join(report_lines(calibration(good, harmless)))
    assert "attributed to the right cause: 18 of 20 [0.68, 0.99] (bar: 18)" in text
    assert "harmless faults convicted: 1 of 1" in text and "| `h` |" in text
    assert "exonerated: 0 of 20 [0.00, 0.17]" in text and "| 1,234 |" in text
