"""The measured error rates keep their bars, and the tests that are not used are seen breaking them."""

import json

import pytest
from typer.testing import CliRunner

from longrecall.evals.calibration import campaign_table, mcnemar_mid_p_loss, run_calibration
from longrecall.evals.simulate import QUIET
from longrecall.results.main import build_app


@pytest.fixture(scope="module")
def rows():
    return run_calibration(reps=300, seed=11, only=["type1", "exonerate"])


def test_no_rate_of_the_products_rules_is_above_its_bar(rows):
    assert [r for r in rows if r.verdict == "above the bar"] == []
    assert sum(r.verdict == "within the bar" for r in rows) == 8 + 16


@pytest.mark.parametrize(
    ("table", "rule"), [("type1", "McNemar"), ("exonerate", "bootstrap"), ("exonerate", "Tango per")]
)
def test_tests_that_are_not_used_are_seen_failing(rows, table, rule):
    failing = [r for r in rows if r.table == table and rule in r.rule and r.verdict == "not used: fails here"]
    assert len(failing) >= 4


def test_ten_point_loss_is_convicted_within_15_conversations_on_a_quiet_engine():
    rows = run_calibration(reps=200, seed=3, only=["power"])
    row = next(r for r in rows if r.setting == "loss of 10 points, quiet")
    assert row.value <= 15 and row.verdict == "within the bar"
    assert all(r.verdict == "within the bar" for r in rows if r.rule.startswith("running conviction"))
    assert all(r.verdict == "not used: fails here" for r in rows if r.rule.startswith("t-test at every"))


def test_whole_campaigns_convict_the_steep_loss_and_nobody_else():
    rows = {(r.setting, r.rule): r.value for r in campaign_table(20, 5, [(40, QUIET)])}
    assert rows["40 × 10, quiet", "steep loss convicted"] == 1.0
    assert rows["40 × 10, quiet", "any innocent convicted"] == 0.0
    assert rows["40 × 10, quiet", "innocent-1 exonerated"] >= 0.9


def test_mid_p_by_counting():
    import numpy as np

    assert mcnemar_mid_p_loss(np.array([3.0]), np.array([1.0]))[0] == pytest.approx(1 / 16 + 0.5 * 4 / 16)
    assert mcnemar_mid_p_loss(np.array([0.0]), np.array([0.0]))[0] == 0.5


def test_command_prints_rows_as_json_and_refuses_unknown_tables():
    args = ["calibrate", "--reps", "40", "--only", "type1", "--json"]
    result = CliRunner().invoke(build_app(args), args)
    assert result.exit_code == 0 and len(json.loads(result.stdout)) == 32
    args = ["calibrate", "--only", "everything"]
    result = CliRunner().invoke(build_app(args), args)
    assert result.exit_code == 2 and "known tables are type1" in result.stderr
