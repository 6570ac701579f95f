"""The plain part of a vocabulary encodes plain text as the whole does; its file in the cache may be lost or broken."""

import json
import random
import string
from pathlib import Path

import pytest
import tokenizers

from longrecall.needles.tokenizer_file import TokenizerFile

FOLDERS = ("gemma_folder", "tekken_folder")


def texts(seed: int, count: int, extra: tuple[str, ...]) -> list[str]:
    """Words, digits, runs of space, control characters and the given strings in any order."""
    rng = random.Random(seed)
    kinds = [
        lambda: "".join(rng.choices(string.ascii_letters, k=rng.randint(1, 12))),
        lambda: "".join(rng.choices(string.digits, k=rng.randint(1, 9))),
        lambda: rng.choice(["the", " captain", "'s", " repaired", "http://a.b/c?d=e", "def f(x):\n    return x"]),
        lambda: " " * rng.randint(1, 5) + "\n" * rng.randint(0, 3) + "\t" * rng.randint(0, 2),
        lambda: "".join(map(chr, rng.choices(range(128), k=rng.randint(1, 8)))),
        lambda: rng.choice(extra),
    ]
    return ["".join(rng.choice(kinds)() for _ in range(rng.randint(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_plain_text_gets_the_same_tokens_from_the_part_as_from_the_whole(
    folder: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path))
    path = request.getfixturevalue(folder) / "tokenizer.json"
    whole = tokenizers.Tokenizer.from_file(str(path))
    control = tuple(token.content for token in whole.get_added_tokens_decoder().values())[:200]
    for read in (TokenizerFile.read(path), TokenizerFile.read(path)):  # made, then from the cache
        part = read.for_text("a")
        assert part.get_vocab_size(with_added_tokens=False) < 0.7 * whole.get_vocab_size()
        for text in texts(7, 400, control):
            assert text.isascii() and read.for_text(text) is part
            mine, theirs = (t.encode(text, add_special_tokens=False) for t in (part, whole))
            assert (mine.ids, mine.offsets) == (theirs.ids, theirs.offsets), text
        assert [t.content for t in part.get_added_tokens_decoder().values()] == [
            t.content for t in whole.get_added_tokens_decoder().values()
        ]
        assert read.for_text("Zoë 文 Ελλάδα") is read.whole
    assert len(list(tmp_path.rglob("*.part"))) == 1


def test_markers_in_other_scripts_are_no_reason_to_read_the_whole(
    tekken_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's markers hold the full-width bar and SentencePiece's space."""
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path / "cache"))
    document = json.loads((tekken_folder / "tokenizer.json").read_text())
    token = {**document["added_tokens"][0], "id": 130_075, "content": "<｜begin▁of▁sentence｜>"}
    document["added_tokens"].append(token)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    read = TokenizerFile.read(path)
    text = "<｜begin▁of▁sentence｜>What is the code of Ada?"
    assert read.for_text(text) is read.any and read.any is not read.whole
    assert read.any.encode(text).ids == read.whole.encode(text).ids and read.any.encode(text).ids[0] == 130_075
    assert read.for_text("<｜begin of▁sentence｜>") is read.whole


def test_a_broken_or_unwritable_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path))
    path = tmp_path / "tokenizer.json"
    model = tokenizers.models.BPE({"a": 0, "b": 1, "文": 2, "ab": 3, "aba": 4}, [("a", "b"), ("ab", "a")])
    tokenizers.Tokenizer(model).save(str(path))
    assert TokenizerFile.read(path).any.get_vocab_size() == 4
    [kept] = tmp_path.rglob("*.part")
    good = kept.read_bytes()
    for bad in (b"", good[:100], good[:-1] + bytes([good[-1] ^ 1])):
        kept.write_bytes(bad)
        assert TokenizerFile.read(path).any.encode("ababa").ids == [3, 4]
        assert kept.read_bytes() == good
    monkeypatch.setenv("LONGRECALL_CACHE", str(path))  # a file where a folder is needed
    assert TokenizerFile.read(path).any.encode("ababa").ids == [3, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "文"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
    ],
)
def test_tokenizers_that_leave_plain_text_are_read_whole(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGRECALL_CACHE", str(tmp_path / "cache"))
    model = tokenizers.models.BPE({"a": 0, "文": 1, "_": 2}, [])
    document = json.loads(tokenizers.Tokenizer(model).to_str()) | change
    read = TokenizerFile(json.dumps(document).encode(), "0" * 64)
    assert read._part is None
    assert not list(tmp_path.rglob("*.part"))
