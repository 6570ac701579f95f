"""A diff applies exactly or not at all."""

import difflib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrecall.runners.diffs import DiffError, apply_diff, apply_to_text, parse_diff

BASE = "".join(f"line {i}\n" for i in range(1, 21))


def unified(before: str, after: str, path: str = "kernels/a.py", context: int = 3) -> str:
    def lines(text: str) -> list[str]:
        return text.splitlines(keepends=True)

    out = []
    for line in difflib.unified_diff(lines(before), lines(after), f"a/{path}", f"b/{path}", n=context):
        out.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(out)


TEXTS = st.lists(st.sampled_from(["a", "b", "", "  c", "\x0cd", "--- x", "@@ y"]), max_size=12).flatmap(
    lambda lines: st.sampled_from(["\n".join(lines), "".join(f"{line}\n" for line in lines)])
)


@given(before=TEXTS, after=TEXTS, context=st.integers(0, 3))
def test_applying_the_diff_of_two_texts_gives_the_second(before: str, after: str, context: int) -> None:
    before, after = before.replace("\x0c", "~"), after.replace("\x0c", "~")
    if before == after or not before:
        return
    (diff,) = parse_diff(unified(before, after, context=context), "x.diff")
    assert apply_to_text(before, diff, "x.diff") == after


def test_a_hunk_one_line_off_is_refused_and_the_place_named() -> None:
    (diff,) = parse_diff(unified(BASE, BASE.replace("line 10\n", "changed\n")), "x.diff")
    with pytest.raises(DiffError) as problem:
        apply_to_text("new first line\n" + BASE, diff, "x.diff")
    said = str(problem.value)
    assert "x.diff: kernels/a.py hunk 1 does not apply at line 7" in said
    assert "expected 'line 7\\n', found 'line 6\\n'" in said and "stand at line 8" in said


def test_white_space_is_not_ignored() -> None:
    (diff,) = parse_diff(unified(BASE, BASE.replace("line 10\n", "changed\n")), "x.diff")
    with pytest.raises(DiffError, match=r"line 8.*expected 'line 8\\n', found 'line 8 \\n'"):
        apply_to_text(BASE.replace("line 8\n", "line 8 \n"), diff, "x.diff")


def test_form_feeds_do_not_split_lines() -> None:
    before = "one\x0cstill one\ntwo\u2028still two\nthree\n"
    text = "--- a/k/a.py\n+++ b/k/a.py\n@@ -2,2 +2,2 @@\n two\u2028still two\n-three\n+3\n"
    (diff,) = parse_diff(text, "x.diff")
    assert apply_to_text(before, diff, "x.diff") == before.replace("three", "3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no change"),
        ("hello\n", "holds no change"),
        ("--- a/k/a.py\n+++ b/k/a.py\n@@ -1,3 +1,3 @@\n x\n", "announces 3 lines before and 3 after, and has 1 and 1"),
        ("--- a/k/a.py\n+++ b/k/b.py\n@@ -1 +1 @@\n-x\n+y\n", "renames"),
        ("--- a/../etc/a\n+++ b/../etc/a\n@@ -1 +1 @@\n-x\n+y\n", "leaves the tree"),
        ("--- a.py\n+++ a.py\n@@ -1 +1 @@\n-x\n+y\n", "no a/ or b/"),
        ("--- a/k/a.py\n+++ b/k/a.py\n", "no hunk"),
        ("@@ -1 +1 @@\n-x\n+y\n", "without the --- and [+]{3} lines"),
        ("diff --git a/k b/k\nGIT binary patch\n", "only plain changes"),
        ("--- a/k/a.py\n+++ b/k/a.py\n@@ one @@\n", "is not a hunk header"),
    ],
)
def test_malformed_diffs_are_refused(text: str, said: str) -> None:
    with pytest.raises(DiffError, match=said):
        parse_diff(text, "x.diff")


def test_files_are_changed_created_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k/a.py").write_text(BASE)
    (tmp_path / "k/old.py").write_text("gone\n")
    linked = tmp_path / "base.py"
    linked.hardlink_to(tmp_path / "k/a.py")
    text = (
        unified(BASE, BASE.replace("line 3\n", ""), "k/a.py")
        + "--- /dev/null\n+++ b/k/new.py\n@@ -0,0 +1,2 @@\n+x = 1\n+y = 2\n"
        + "--- a/k/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n"
    )
    assert set(apply_diff(tmp_path, text, "x.diff")) == {"k/a.py", "k/new.py", "k/old.py"}
    assert (tmp_path / "k/a.py").read_text() == BASE.replace("line 3\n", "")
    assert (tmp_path / "k/new.py").read_text() == "x = 1\ny = 2\n" and not (tmp_path / "k/old.py").exists()
    assert linked.read_text() == BASE, "a hard-linked base must stay as it is"


def test_nothing_is_written_when_the_second_file_fails(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k/a.py").write_text(BASE)
    text = unified(BASE, BASE.replace("line 3\n", ""), "k/a.py") + unified("x\n", "y\n", "k/missing.py")
    with pytest.raises(DiffError, match=r"k/missing\.py is not a file of the base source"):
        apply_diff(tmp_path, text, "x.diff")
    assert (tmp_path / "k/a.py").read_text() == BASE
