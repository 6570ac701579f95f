"""Run folder I/O: what is read back, what a torn or damaged file says."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longrecall.evals.scores_file import ScoresError
from longrecall.evals.stored_run import load_run
from longrecall.results import run_folder
from longrecall.results.run_folder import RunFolderError
from longrecall.runners.journal import encode_replay


def test_campaign_reads_back_as_written(tmp_path: Path, campaign40: Any) -> None:
    run_folder.write_campaign(tmp_path, campaign40.campaign)
    assert run_folder.load_campaign(tmp_path) == campaign40.campaign


def test_replays_read_back_in_order(tmp_path: Path, campaign40: Any) -> None:
    lines = b"".join(encode_replay(r) for r in campaign40.replays[:50])
    (tmp_path / run_folder.REPLAYS).write_bytes(lines)
    assert run_folder.load_replays(tmp_path) == campaign40.replays[:50]


def test_every_torn_length_of_the_last_line_is_tolerated(tmp_path: Path, campaign40: Any) -> None:
    whole, last = encode_replay(campaign40.replays[0]), encode_replay(campaign40.replays[1])
    for cut in range(len(last) - 1):
        (tmp_path / run_folder.REPLAYS).write_bytes(whole + last[:cut])
        assert run_folder.load_replays(tmp_path) == campaign40.replays[:1]
    (tmp_path / run_folder.REPLAYS).write_bytes(whole + last[:-1])  # whole, only the newline is missing
    assert run_folder.load_replays(tmp_path) == campaign40.replays[:2]


def test_damage_before_the_last_line_names_file_and_line(tmp_path: Path, campaign40: Any) -> None:
    lines = [encode_replay(r) for r in campaign40.replays[:3]]
    lines[1] = lines[1].replace(b'"rung":', b'"rung":"x",  "was":')
    (tmp_path / run_folder.REPLAYS).write_bytes(b"".join(lines))
    with pytest.raises(RunFolderError, match=r"replays\.jsonl:2: rung"):
        run_folder.load_replays(tmp_path)


def test_half_an_emoji_in_a_reply_is_replaced_not_refused(tmp_path: Path, campaign40: Any) -> None:
    response = replace(campaign40.replays[0].response, text="half \ud83d and whole \U0001f600")
    replay = replace(campaign40.replays[0], response=response)
    (tmp_path / run_folder.REPLAYS).write_bytes(encode_replay(replay))
    [read] = run_folder.load_replays(tmp_path)
    assert read.response.text == "half � and whole \U0001f600"


def test_no_journal_yet_means_no_replays(tmp_path: Path) -> None:
    assert run_folder.load_replays(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], r"campaign\.json: not JSON at line \d+"),
        (lambda text: text.replace('"seed": 1', '"seed": "one"'), r"campaign\.json: seed: .*'one'"),
        (
            lambda text: text.replace('"schema_version": 1', '"schema_version": 99', 1),
            "schema_version 99 is newer than 1",
        ),
    ],
)
def test_damaged_campaign_names_the_file(
    tmp_path: Path, campaign40: Any, damage: Callable[[str], str], message: str
) -> None:
    run_folder.write_campaign(tmp_path, campaign40.campaign)
    path = tmp_path / run_folder.CAMPAIGN
    changed = damage(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with pytest.raises(RunFolderError, match=message):
        run_folder.load_campaign(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"builds": []}, "builds: exactly one has role base; here 0 of 0 have"),
        ({"arms": ["mirrored"]}, "arms: one besides mirrored is needed"),
        ({"rungs": [448, 448]}, "rungs: at least one, and none twice"),
        ({"conversation_order": []}, "conversation_order: at least one, and none twice"),
        ({"block_size": 0}, r"block_size: 1 or more is needed \(got 0\)"),
        ({"verdict": {"margin": 0.0}}, r"verdict\.margin: a share between 0 and 0\.5 is needed \(got 0\.0\)"),
        ({"verdict": {"alpha": 0.0}}, r"verdict\.alpha: a share between 0 and 0\.5 is needed \(got 0\.0\)"),
    ],
)
def test_what_no_campaign_can_have_is_named(
    tmp_path: Path, campaign40: Any, changed: dict[str, Any], message: str
) -> None:
    run_folder.write_campaign(tmp_path, campaign40.campaign)
    path = tmp_path / run_folder.CAMPAIGN
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(RunFolderError, match=rf"campaign\.json: {message}"):
        run_folder.load_campaign(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"wall_s": "long"}', "{"])
def test_damaged_timing_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / run_folder.TIMING).write_text(text)
    with pytest.raises(RunFolderError, match=r"timing\.json"):
        run_folder.load_timing(tmp_path)


def test_a_journal_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / run_folder.REPLAYS).mkdir()
    with pytest.raises(RunFolderError, match=r"cannot read .*replays\.jsonl: Is a directory"):
        run_folder.load_replays(tmp_path)


def test_a_folder_without_campaign_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"is not a run folder: it has no campaign\.json$"):
        run_folder.load_campaign(tmp_path)


@pytest.mark.parametrize(
    ("command", "error"), [(run_folder.load_campaign, RunFolderError), (load_run, ScoresError)], ids=["plan", "compare"]
)
def test_a_published_folder_is_said_to_hold_reports_only(
    tmp_path: Path, command: Callable[[Path], Any], error: type[Exception]
) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(error, match=r"no campaign\.json; it holds reports only, as published folders do"):
        command(tmp_path)


def test_fields_of_a_later_version_are_ignored(tmp_path: Path, campaign40: Any) -> None:
    run_folder.write_campaign(tmp_path, campaign40.campaign)
    path = tmp_path / run_folder.CAMPAIGN
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_later": {"x": 1}}))
    assert run_folder.load_campaign(tmp_path) == campaign40.campaign


def test_failed_write_leaves_the_old_file_and_no_debris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    run_folder.write_bytes(path, b"before")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"cannot write .*report\.json: No space left on device"):
        run_folder.write_bytes(path, b"after")
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_nan_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        run_folder.write_json(tmp_path / "x.json", {"recall": float("nan")})
    assert list(tmp_path.iterdir()) == []
