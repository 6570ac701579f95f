"""Charts: labels keep apart, numbers read as people write them, files stand alone."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.results import charts


@given(st.lists(st.floats(0, 400), max_size=20))
def test_labels_keep_their_distance_and_order(wanted: list[float]) -> None:
    placed = charts.spread(wanted, 17, 0, 400)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert all(placed[b] - placed[a] >= 17 - 1e-6 for a, b in pairwise(order))
    assert all(p >= -1e-6 for p in placed)
    assert all(p <= 400 + 1e-6 for p in placed)


@given(st.lists(st.integers(0, 20), max_size=8, unique=True))
def test_labels_that_do_not_touch_stay_where_they_belong(rows: list[int]) -> None:
    wanted = [20.0 * row for row in rows]
    assert charts.spread(wanted, 17, 0, 400) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("n", "text"),
    [(448, "448"), (512, "512"), (1024, "1K"), (2560, "2.5K"), (131072, "128K"), (1 << 20, "1M"), (2051, "2,051")],
)
def test_lengths_read_as_people_write_them(n: int, text: str) -> None:
    assert charts.tokens(n) == text


def test_points_have_true_minus_and_no_negative_zero() -> None:
    assert charts.points(-0.125, signed=True) == "−12.5"
    assert charts.points(0.03, signed=True) == "+3.0"
    assert charts.points(-0.0001, signed=True) == "0.0"
    assert charts.points(None) == "–"


def example() -> str:
    series = [
        charts.Series(
            label=name,
            tone=tone,
            points=tuple(
                charts.Point(rung=r, recall=v, ci_low=v - 0.1, ci_high=v + 0.05)
                for r, v in ((448, 0.9), (2048, recall))
            ),
        )
        for name, tone, recall in (("base", "base", 0.9), ("<b>&\"'", "culprit", 0.4))
    ]
    return charts.recall_chart(series, [448, 2048], key="k", title="t", onset=512)


def test_standalone_svg_names_its_colours() -> None:
    svg = charts.standalone(example())
    root = ET.fromstring(svg)
    assert "var(" not in svg
    assert charts.LIGHT["culprit"] in svg
    assert root.attrib["role"] == "img"
    assert charts.png(svg).startswith(b"\x89PNG")


def test_chart_is_told_in_words() -> None:
    root = ET.fromstring(example())
    spoken = root.find("{http://www.w3.org/2000/svg}desc")
    assert spoken is not None and spoken.text is not None
    assert "base: 90.0 % at 448, 90.0 % at 2,048" in spoken.text


def test_one_rung_and_nothing_measured_still_draw() -> None:
    one = charts.Series(
        label="base", tone="base", points=(charts.Point(rung=448, recall=0.9, ci_low=0.8, ci_high=1.0),)
    )
    none = charts.Series(
        label="b", tone="quiet", points=(charts.Point(rung=448, recall=None, ci_low=None, ci_high=None),)
    )
    svg = charts.recall_chart([one, none], [448], key="k", title="t", onset=None)
    assert "nan" not in svg.lower().replace("font", "")
    assert not re.search(r"[ML,]inf", svg)


def test_forest_shades_the_margin() -> None:
    row = charts.ForestRow(label="448", delta=-0.3, ci_low=-0.4, ci_high=-0.2, bound=-0.38, tone="culprit")
    group = charts.ForestGroup(label="p", verdict="culprit", tone="culprit", rows=(row,))
    svg = charts.forest_chart([group], 0.1, key="f", title="t")
    assert 'class="zone"' in svg
    assert "margin ±10" in svg
    assert "−30.0" in svg


def test_steps_show_every_build_at_every_place_that_was_measured() -> None:
    series = [
        charts.Steps(label="base", tone="base", shares=(0.9, 0.85, 0.9)),
        charts.Steps(label="<cold>", tone="culprit", shares=(0.5, None, 0.1)),
        charts.Steps(label="never asked", tone="quiet", shares=(None, None, None)),
    ]
    svg = charts.steps_chart(series, ("warm", "cold", "branched"), key="arms", title="By arm", axis="arm")
    words = ["".join(e.itertext()) for e in ET.fromstring(svg).iter() if e.tag.endswith(("title", "text"))]
    marks = [word for word in words if word.endswith(" %")]
    assert marks == [
        "base, warm: 90.0 %", "base, cold: 85.0 %", "base, branched: 90.0 %",
        "<cold>, warm: 50.0 %", "<cold>, branched: 10.0 %",
    ]  # fmt: skip
    assert {"warm", "cold", "branched", "base", "<cold>"} <= set(words)
    assert "never asked: – % warm" in svg
