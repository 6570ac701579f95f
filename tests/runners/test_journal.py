"""The journal keeps every whole line, whatever happens, and knows what may not be asked again."""

import asyncio
import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.runners.journal import AppendFile, Journal, JournalError, Key, encode_replay, key_of
from longrecall.runners.schema import Replay, Response


def answer(number: int, **response: object) -> Replay:
    return Replay(
        run_id="r", build_id="base", conversation_id="c", probe_id=f"p{number}", rung=60, arm="warm", repeat=0,
        send_order=number, response=Response(text=" 1.", **response),  # type: ignore[arg-type]
    )  # fmt: skip


def keys(*numbers: int) -> list[Key]:
    return [key_of(answer(number)) for number in numbers]


def write(run_dir: Path, sent: list[int], answered: list[int]) -> None:
    async def go() -> None:
        journal = Journal(run_dir)
        await journal.sending(keys(*sent))
        await asyncio.gather(*(journal.record(answer(number)) for number in answered))
        journal.close()

    asyncio.run(go())


def test_answered_and_in_flight_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, [0, 1, 2], [0, 2])
    journal = Journal(tmp_path)
    assert journal.answered == set(keys(0, 2)) and list(journal.in_flight) == keys(1)
    assert journal.next_send_order == 3
    journal.close()


def test_a_request_asked_again_keeps_its_place_and_new_ones_come_after(tmp_path: Path) -> None:
    write(tmp_path, [0, 1, 2], [0, 2])
    for _ in range(2):  # broken off twice
        journal = Journal(tmp_path)
        sent = asyncio.run(journal.sending(keys(3, 1)))
        assert [record.send_order for record in sent] == [3, 1]
        journal.close()
    assert Journal(tmp_path).next_send_order == 4


def test_an_answered_probe_cannot_be_sent_or_answered_again(tmp_path: Path) -> None:
    write(tmp_path, [0], [0])
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="answered already and must not be sent again"):
        asyncio.run(journal.sending(keys(0)))
    with pytest.raises(JournalError, match="answered already"):
        asyncio.run(journal.record(answer(0)))
    journal.close()


@given(cut=st.integers(0, 400))
def test_a_torn_line_is_cut_off_and_nothing_before_it(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    run_dir = tmp_path_factory.mktemp("torn")
    write(run_dir, [0, 1], [0, 1])
    path = run_dir / "replays.jsonl"
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    journal = Journal(run_dir)
    whole = data.count(b"\n")
    assert len(journal.answered) == whole and len(journal.in_flight) == 2 - whole
    assert path.read_bytes() == data[: data.rfind(b"\n") + 1]
    journal.close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="being written by another process"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [0, 1], [0])
    journal = Journal(tmp_path)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 20:
            return real(fd, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JournalError, match=r"replays\.jsonl: cannot be written: No space left on device; what was"):
        asyncio.run(journal.record(answer(1)))
    monkeypatch.undo()
    journal.close()
    again = Journal(tmp_path)
    assert again.answered == set(keys(0)) and list(again.in_flight) == keys(1)
    again.close()


def test_a_file_closed_during_a_write_that_fails_is_left_with_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AppendFile(tmp_path / "lines")
    file.append(b"first\n")
    real, half, closing = os.write, threading.Event(), threading.Event()

    def full(fd: int, data: bytes) -> int:
        if not half.is_set():
            half.set()
            return real(fd, data[:3])
        closing.wait(30)
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "write", full)
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(file.append, b"second\n")
        assert half.wait(30)
        closed = threads.submit(file.close)
        closing.set()
        closed.result(30)
    monkeypatch.undo()
    assert isinstance(writing.exception(), JournalError)
    assert (tmp_path / "lines").read_bytes() == b"first\n"
    with pytest.raises(JournalError, match="File too large"):
        file.append(b"third\n")


def test_a_damaged_line_in_the_middle_is_an_error_naming_it(tmp_path: Path) -> None:
    write(tmp_path, [0, 1], [0, 1])
    path = tmp_path / "replays.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(JournalError, match=r"replays\.jsonl line 1: not a replay"):
        Journal(tmp_path)


def test_a_line_reads_back_as_the_record_and_unknown_fields_are_left_out(tmp_path: Path) -> None:
    from longrecall.results.run_folder import load_replays

    write(tmp_path, [0], [0])
    assert load_replays(tmp_path) == [answer(0)]
    record = json.loads(encode_replay(answer(0, prompt_tokens=5)))
    assert record["response"] == {"text": " 1.", "prompt_tokens": 5} and record["schema_version"] == 1
