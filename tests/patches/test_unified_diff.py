"""Diffs: what is read, what is refused, and that placing them never guesses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.patches.hunks import HunkError, patch_file, reversed_diff, split_lines
from sparsekv.patches.unified_diff import parse
from sparsekv.profiles.errors import SparsekvError

Unified = Callable[[str, bytes | None, bytes | None], bytes]

# Few distinct lines, so that the same ones stand in many places; line ends of all kinds; bytes that are no UTF-8.
LINE = st.sampled_from([b"a\n", b"b\n", b"\n", b" a\n", b"a\r\n", b"-- a\n", b"++ b\n", b"\xff\xfe\n", b"@@ -1 +1 @@\n", b"\r\n"])
CONTENT = st.builds(lambda lines, last: b"".join(lines) + last, st.lists(LINE, max_size=40), st.sampled_from([b"", b"x", b"a"]))


@given(before=CONTENT, after=CONTENT)
def test_a_diff_leads_there_and_back(unified: Unified, before: bytes, after: bytes) -> None:
    if before == after:
        return
    (diff,) = parse(unified("v1/x.txt", before, after), "x.patch")
    assert patch_file(before, diff, known=True).content == after
    assert patch_file(after, reversed_diff(diff), known=True).content == before
    assert (diff.added, diff.removed) == (
        sum(line[:1] == b"+" for h in diff.hunks for line in [t + c for t, c in h.body]),
        sum(line[:1] == b"-" for h in diff.hunks for line in [t + c for t, c in h.body]),
    )


@given(before=CONTENT, after=CONTENT, other=CONTENT)
def test_another_file_is_never_patched_by_guess(unified: Unified, before: bytes, after: bytes, other: bytes) -> None:
    """What a patched file gained and lost is exactly what the diff says, wherever its hunks went."""
    if before == after:
        return
    (diff,) = parse(unified("v1/x.txt", before, after), "x.patch")
    try:
        patched = patch_file(other, diff, known=False)
    except HunkError:
        return
    assert patched.content is not None
    at = 0
    lines, result = split_lines(other), split_lines(patched.content)
    rebuilt: list[bytes] = []
    for hunk, offset in zip(diff.hunks, patched.offsets, strict=True):
        start = (hunk.old_start - 1 if hunk.old else hunk.old_start) + offset
        assert lines[start : start + len(hunk.old)] == hunk.old
        rebuilt += lines[at:start] + hunk.new
        at = start + len(hunk.old)
    assert rebuilt + lines[at:] == result


@given(content=CONTENT)
def test_created_and_deleted(unified: Unified, content: bytes) -> None:
    if not content:
        return
    (created,) = parse(unified("v1/new.txt", None, content), "x.patch")
    assert created.creates
    assert patch_file(None, created, known=True).content == content
    assert patch_file(content, reversed_diff(created), known=False).content is None
    with pytest.raises(HunkError, match="exists already"):
        patch_file(b"", created, known=False)
    with pytest.raises(HunkError, match="other content"):
        patch_file(content + b"more\n", reversed_diff(created), known=False)


BEFORE = b"".join(b"line %d\n" % i for i in range(1, 31))
AFTER = BEFORE.replace(b"line 15\n", b"line fifteen\n")


def test_context_must_be_exact(unified: Unified) -> None:
    (diff,) = parse(unified("v1/x.txt", BEFORE, AFTER), "x.patch")
    for changed in (
        BEFORE.replace(b"line 14\n", b"line 14\n\n"),  # a blank line inside the context
        BEFORE.replace(b"line 13\n", b"line 13 \n"),  # white space at the end of a line
        BEFORE.replace(b"\n", b"\r\n"),  # other line ends
        AFTER,  # applied already
    ):
        with pytest.raises(HunkError, match="not in the file"):
            patch_file(changed, diff, known=False)


def test_offset_is_found_only_if_it_is_the_only_place(unified: Unified) -> None:
    (diff,) = parse(unified("v1/x.txt", BEFORE, AFTER), "x.patch")
    moved = b"new\n" * 70 + BEFORE
    assert patch_file(moved, diff, known=False).content == b"new\n" * 70 + AFTER
    assert patch_file(moved, diff, known=False).offsets == (70,)
    with pytest.raises(HunkError, match="not in the file"):
        patch_file(moved, diff, known=True)
    with pytest.raises(HunkError, match="stand in 2 places"):
        patch_file(BEFORE * 2, diff, known=False)


def test_an_addition_at_the_end_is_not_applied_twice(unified: Unified) -> None:
    (diff,) = parse(unified("v1/x.txt", BEFORE, BEFORE + b"tail\n"), "x.patch")
    once = patch_file(BEFORE, diff, known=False).content
    with pytest.raises(HunkError):
        patch_file(once, diff, known=False)


def test_git_headers_and_free_text_are_read() -> None:
    text = (
        b"From abc\nSubject: x\n\n---\n v1/a.py | 2 +-\n\n"
        b"diff --git a/v1/a.py b/v1/a.py\nindex 1234567..89abcde 100644\n--- a/v1/a.py\n+++ b/v1/a.py\n@@ -1 +1 @@ def f():\n-a\n+b\n"
        b"diff --git a/v1/n.py b/v1/n.py\nnew file mode 100644\nindex 0000000..89abcde\n"
        b"--- /dev/null\n+++ b/v1/n.py\n@@ -0,0 +1,2 @@\n+a\n+b\n"
    )
    diffs = parse(text, "x.patch")
    assert [(d.path, d.creates, d.added, d.removed) for d in diffs] == [("v1/a.py", False, 1, 1), ("v1/n.py", True, 2, 0)]


HEAD = b"--- a/v1/x.py\n+++ b/v1/x.py\n"
MALFORMED = {
    "empty": (b"", "changes no file"),
    "text only": (b"nothing here\n", "changes no file"),
    "hunk without a file": (b"@@ -1 +1 @@\n-a\n+b\n", "a hunk before"),
    "no hunk": (HEAD, "expected a hunk"),
    "range": (HEAD + b"@@ -1 1 @@\n-a\n+b\n", "a hunk begins with"),
    "too few lines": (HEAD + b"@@ -1,3 +1,3 @@\n a\n-b\n+c\n", "ends inside a hunk"),
    "too many lines": (HEAD + b"@@ -1 +1 @@\n-b\n+c\n d\n", "more lines than its header counts"),
    "counts disagree": (HEAD + b"@@ -1,2 +1 @@\n-b\n+c\n+d\n", "more lines than its header counts"),
    "white space was cut": (HEAD + b"@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n", "begins with a blank"),
    "last line is cut off": (HEAD + b"@@ -1 +1 @@\n-b\n+c", "cut off"),
    "changes nothing": (HEAD + b"@@ -1 +1 @@\n a\n", "changes nothing"),
    "out of order": (HEAD + b"@@ -9 +9 @@\n-a\n+b\n@@ -1 +1 @@\n-a\n+b\n", "in order"),
    "overlap": (HEAD + b"@@ -1,2 +1,2 @@\n-a\n+b\n c\n@@ -2 +2 @@\n-c\n+d\n", "must not overlap"),
    "new side misnumbered": (HEAD + b"@@ -1 +1,2 @@\n-a\n+b\n+c\n@@ -9 +9 @@\n-a\n+b\n", "should start at line 10"),
    "line zero": (HEAD + b"@@ -0 +0 @@\n-a\n+b\n", "in order"),
    "insertion without context": (HEAD + b"@@ -4,0 +5 @@\n+a\n", "needs context"),
    "line after the end": (HEAD + b"@@ -1,2 +1,2 @@\n-a\n\\ No newline at end of file\n-b\n+b\n+c\n", "after the end of the file"),
    "crlf headers": (HEAD.replace(b"\n", b"\r\n") + b"@@ -1 +1 @@\r\n-a\r\n+b\r\n", "malformed"),
    "two names": (b"--- a/v1/x.py\n+++ b/v1/y.py\n@@ -1 +1 @@\n-a\n+b\n", "different files"),
    "no prefix": (b"--- a/v1/x.py\n+++ v1/x.py\n@@ -1 +1 @@\n-a\n+b\n", "expected `b/PATH`"),
    "parent": (b"--- a/../x.py\n+++ b/../x.py\n@@ -1 +1 @@\n-a\n+b\n", "not a plain path"),
    "absolute": (b"--- a//etc/x\n+++ b//etc/x\n@@ -1 +1 @@\n-a\n+b\n", "not a plain path"),
    "hidden": (b"--- a/.sparsekv-patches/x\n+++ b/.sparsekv-patches/x\n@@ -1 +1 @@\n-a\n+b\n", "not a plain path"),
    "backup": (b"--- /dev/null\n+++ b/v1/x.py.orig\n@@ -0,0 +1 @@\n+b\n", "backup or a cache"),
    "quoted": (b'--- "a/v1/\\303.py"\n+++ "b/v1/\\303.py"\n@@ -1 +1 @@\n-a\n+b\n', "a hunk before"),
    "rename": (b"diff --git a/v1/x.py b/v1/y.py\nsimilarity index 100%\nrename from v1/x.py\nrename to v1/y.py\n", "one path"),
    "mode": (b"diff --git a/v1/x.py b/v1/x.py\nold mode 100644\nnew mode 100755\n", "only plain text"),
    "link": (b"diff --git a/v1/x b/v1/x\nnew file mode 120000\n--- /dev/null\n+++ b/v1/x\n@@ -0,0 +1 @@\n+y\n", "only plain text"),
    "binary": (b"diff --git a/v1/x b/v1/x\nindex 1..2 100644\nGIT binary patch\n", "only plain text"),
    "header disagrees": (b"diff --git a/v1/x b/v1/x\n--- a/v1/y\n+++ b/v1/y\n@@ -1 +1 @@\n-a\n+b\n", "names `v1/x`"),
    "twice": ((HEAD + b"@@ -1 +1 @@\n-a\n+b\n") * 2, "occurs twice"),
    "created with old lines": (b"--- /dev/null\n+++ b/v1/x\n@@ -1 +1 @@\n-a\n+b\n", "has old lines"),
    "nothing at all": (b"--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "both sides"),
    "nul": (HEAD + b"@@ -1 +1 @@\n-a\0\n+b\n", "NUL byte"),
    "html": (b"<!DOCTYPE html>\n<html>404</html>\n", "changes no file"),
}


@pytest.mark.parametrize(("text", "rule"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_is_refused_whole(text: bytes, rule: str) -> None:
    with pytest.raises(SparsekvError, match=rule) as raised:
        parse(text, "0001-x.patch")
    assert "0001-x.patch:" in raised.value.message


@given(text=st.binary(max_size=200))
def test_no_input_breaks_the_reader(text: bytes) -> None:
    for candidate in (text, HEAD + text, HEAD + b"@@ -1,2 +1,2 @@\n" + text):
        try:
            parse(candidate, "x.patch")
        except SparsekvError:
            continue
