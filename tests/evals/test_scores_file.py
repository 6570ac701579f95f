"""scores.parquet survives a round trip, is written whole or not at all, and says what is wrong with it."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.evals.cells import OUTCOMES
from longrecall.evals.schema import Score
from longrecall.evals.scores_file import ScoresError, read_scores, scores_table, write_scores

names = st.text(min_size=1, max_size=8)
maybe_count = st.none() | st.integers(0, 2**40)
scores = st.builds(
    Score,
    run_id=names,
    build_id=names,
    conversation_id=names,
    cluster_id=names,
    probe_id=names,
    probe_kind=names,
    rung=st.integers(1, 2**20),
    arm=names,
    repeat=st.integers(0, 9),
    outcome=st.sampled_from(OUTCOMES),
    answer=st.none() | names,
    gold_logprob=st.none() | st.floats(-1e3, 0),
    depth_pct=st.none() | st.floats(0, 100),
    distance_tokens=maybe_count,
    distance_turns=maybe_count,
    context_tokens=maybe_count,
    cached_tokens=maybe_count,
)


@settings(max_examples=40)
@given(st.lists(scores, max_size=5))
def test_scores_come_back_as_they_were_written(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("run") / "scores.parquet"
    write_scores(rows, path)
    assert read_scores(path) == rows
    assert [p.name for p in path.parent.iterdir()] == ["scores.parquet"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "scores.parquet"
    write_scores([], path)
    before = path.read_bytes()
    with pytest.raises(AttributeError):
        write_scores([object()], path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_missing_damaged_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "scores.parquet"
    with pytest.raises(ScoresError, match=r"scores.parquet: no such"):
        read_scores(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(ScoresError, match=r"scores.parquet: not a readable Parquet"):
        read_scores(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(ScoresError, match="column run_id is missing"):
        read_scores(path)


def test_columns_added_later_read_as_unknown_and_newer_versions_are_refused(tmp_path):
    path = tmp_path / "scores.parquet"
    row = Score(
        run_id="r",
        build_id="base",
        conversation_id="c",
        cluster_id="c",
        probe_id="p",
        probe_kind="k",
        rung=1,
        arm="warm",
        repeat=0,
        outcome="ok",
        answer=None,
    )
    pq.write_table(scores_table([row]).drop_columns(["cached_tokens"]), path)
    assert read_scores(path) == [row]
    newer = scores_table([row]).set_column(0, "schema_version", [[99]])
    pq.write_table(newer, path)
    with pytest.raises(ScoresError, match=r"schema_version \[99\]"):
        read_scores(path)
