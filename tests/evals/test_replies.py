"""What equal texts, reused tokens, prompt lengths and send order say of a patch, beside right and wrong."""

import numpy as np
import pyarrow as pa
import pytest

from longrecall.evals.attribute import observe
from longrecall.evals.cells import make_cells
from longrecall.evals.replies import as_alike, observe_replies, replies_of, same_under
from longrecall.evals.simulate import scores_of

RUNGS = [448, 1024]
C, M = 12, 4


def table(right, texts, *, rungs=RUNGS, cached=None, order=None):
    """right {build: [R, C, M]}, texts {build: list of its replies or a number to draw them from}."""
    builds = list(right)
    made = scores_of(np.stack([right[b] for b in builds]), builds=builds, rungs=list(rungs))
    n = len(rungs) * C * M
    hashes = [t for b in builds for t in (texts[b] if isinstance(texts[b], list) else [texts[b]] * n)]
    columns = {
        "reply_hash": pa.array(hashes),
        "context_tokens": made["rung"],
        "cached_tokens": pa.array([400] * made.num_rows if cached is None else cached),
        "send_order": pa.array(range(made.num_rows) if order is None else order),
    }
    for name, values in columns.items():
        made = made.set_column(made.column_names.index(name), name, values)
    return made


def all_right(rungs=RUNGS):
    return np.ones((len(rungs), C, M), dtype=bool)


def lossy(share, rungs=RUNGS):
    return np.random.default_rng(3).random((len(rungs), C, M)) > share


UNLIKE = [f"t{i}" for i in range(len(RUNGS) * C * M)]
OTHER = [f"u{i}" for i in range(len(RUNGS) * C * M)]


def arms(under_base, under_patch, *, again=UNLIKE):
    right = {b: all_right() for b in ("base", "base-again", "base--scaling-1", "patch--scaling-1")}
    right["patch"] = lossy(0.6)
    texts = {"base": UNLIKE, "base-again": again, "patch": OTHER}
    return table(right, {**texts, "base--scaling-1": under_base, "patch--scaling-1": under_patch})


def test_an_arm_that_makes_all_replies_equal_takes_the_cause_away():
    scores = arms(OTHER, OTHER)
    replies = replies_of(scores, "warm")
    assert same_under(replies, "base", "patch", "scaling-1")[0] is True
    names = ["base", "base-again", "base--scaling-1", "patch--scaling-1", "patch"]
    cells = make_cells(scores, builds=names, rungs=RUNGS)
    found = {o.feature: o for o in observe(cells, "base", "patch", onset=512, replies=replies)}
    assert found["scaling_recovers"].estimate == 1.0 and "96 of 96 replies" in found["scaling_recovers"].detail
    # nobody recalls anything with a factor of 1, so without texts that arm says nothing
    assert "scaling_recovers" not in {o.feature for o in observe(cells, "base", "patch", onset=512)}


def test_an_arm_under_which_replies_still_differ_takes_nothing_away():
    half = [*OTHER[:48], *UNLIKE[48:]]
    assert same_under(replies_of(arms(OTHER, half), "warm"), "base", "patch", "scaling-1")[0] is False


def nearly(texts, unlike):
    """The same replies, but for the first few."""
    return [*(f"v{i}" for i in range(unlike)), *texts[unlike:]]


@pytest.mark.parametrize(("unlike", "gone"), [(0, True), (12, True), (30, False)])
def test_where_batches_round_otherwise_an_arm_is_held_against_the_bases_own_repetition(unlike, gone):
    scores = arms(OTHER, nearly(OTHER, unlike), again=nearly(UNLIKE, 6))
    found, detail = same_under(replies_of(scores, "warm"), "base", "patch", "scaling-1")
    assert found is gone and "90 of 96 of the base's own again" in detail


@pytest.mark.parametrize(
    ("equal", "again", "alike"),
    [((39, 40), (120, 120), True), ((30, 40), (120, 120), False), ((36, 40), (112, 120), True), ((1, 1), (1, 1), True)],
)
def test_a_base_is_the_same_base_until_more_replies_differ_than_chance_explains(equal, again, alike):
    assert as_alike(equal, again) is alike


def test_a_patch_that_differs_hardly_more_than_the_base_itself_cannot_be_seen_by_equal_replies():
    scores = arms(OTHER, OTHER, again=nearly(UNLIKE, 12))
    place = scores.column_names.index("reply_hash")
    builds, hashes = scores["build_id"].to_pylist(), scores["reply_hash"].to_pylist()
    own = iter(nearly(UNLIKE, 22))
    hashes = [next(own) if b == "patch" else h for b, h in zip(builds, hashes, strict=True)]
    scores = scores.set_column(place, "reply_hash", pa.array(hashes))
    assert same_under(replies_of(scores, "warm"), "base", "patch", "scaling-1") is None


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (arms(OTHER, OTHER, again=OTHER), "the engine does not repeat itself"),
        (arms(["x"] * 96, ["x"] * 96), "the base says one thing to everything"),
        (arms([None] * 96, [None] * 96), "texts are not known"),
    ],
)
def test_equal_replies_say_nothing_where_they_could_not_differ(scores, why):
    assert same_under(replies_of(scores, "warm"), "base", "patch", "scaling-1") is None, why


def seen(scores):
    return {o.feature: o for o in observe_replies(replies_of(scores, "warm"), "base", "patch")}


def two(base, patch, **more):
    n = base.shape[0] * C * M
    return table({"base": base, "patch": patch}, {"base": ["a"] * n, "patch": ["b"] * n}, **more)


def test_reuse_is_compared_over_whole_conversations():
    n = 2 * C * M
    moved = [0, 800] * (n // 2)  # who computes the common beginning is a matter of arrival
    same = seen(two(all_right(), all_right(), cached=[400] * n + moved))
    assert same["reuse_changed"].estimate == pytest.approx(0, abs=1e-9)
    less = seen(two(all_right(), all_right(), cached=[400] * n + [100] * n))
    assert less["reuse_changed"].estimate == pytest.approx(300 / 736, abs=0.01)


def test_loss_at_one_residue_of_the_prompt_length_is_seen_and_length_alone_is_not():
    rungs = [1021, 1022, 1023, 1024]
    tail = all_right(rungs)
    tail[2] = False  # 1023 % 4 == 3
    hit = seen(two(all_right(rungs), tail, rungs=rungs))
    assert hit["residue"].estimate == pytest.approx(1.0) and "modulo 4" in hit["residue"].detail
    assert abs(seen(two(all_right(rungs), lossy(0.3, rungs), rungs=rungs))["residue"].estimate) < 0.15
    by_length = all_right()
    by_length[1] = False
    assert "residue" not in seen(two(all_right(), by_length))  # 448 and 1,024 are not neighbours


def test_a_loss_that_comes_with_the_servers_age_is_seen():
    late = all_right()
    late[:, C // 2 :] = False
    found = seen(two(all_right(), late, order=list(np.indices((2, 2, C, M))[2].ravel())))
    assert found["age"].estimate == pytest.approx(1.0)
    assert abs(seen(two(all_right(), lossy(0.4)))["age"].estimate) < 0.3


def test_older_files_without_the_columns_say_nothing():
    scores = two(all_right(), lossy(0.4)).drop_columns(["reply_hash", "send_order", "context_tokens", "cached_tokens"])
    assert observe_replies(replies_of(scores, "warm"), "base", "patch") == []
