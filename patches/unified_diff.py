"""Unified diffs, read strictly: a file that is not exactly one is refused whole, with its line and the rule.

The usual libraries are lenient where a patch of somebody else's program must not be: patch-ng 1.19 compares lines without
their line ends, ignores "\\ No newline at end of file", deletes files without comparing them, applies at the stated line
only, and gives up where a `.orig` file lies about; unidiff reads but does not apply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from sparsekv.profiles.errors import SparsekvError

_RANGE = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: [^\n]*)?\n?")
_GIT_HEADER = re.compile(rb"index [0-9a-f]+\.\.[0-9a-f]+(?: 100644)?\n|(?:new file|deleted file) mode 100644\n")
_NO_NEWLINE = b"\\ No newline at end of file"
_LEFTOVERS = (".orig", ".rej", ".bak", ".pyc", ".swp", "~")


@dataclass(frozen=True)
class Hunk:
    """Lines that change together: `body` holds (tag, line), the tag one of b" ", b"-", b"+".

    Lines carry their line end; only the last line of a file may be without one.
    """

    old_start: int
    """Line number of the first old line, from 1; of a hunk without old lines, that of the line before it."""
    body: tuple[tuple[bytes, bytes], ...]

    @cached_property
    def old(self) -> list[bytes]:
        return [line for tag, line in self.body if tag != b"+"]

    @cached_property
    def new(self) -> list[bytes]:
        return [line for tag, line in self.body if tag != b"-"]

    @cached_property
    def context(self) -> tuple[int, int]:
        """Unchanged lines before the first change and after the last."""
        changed = [i for i, (tag, _) in enumerate(self.body) if tag != b" "]
        return changed[0], len(self.body) - 1 - changed[-1]

    def count(self, tag: bytes) -> int:
        return sum(1 for t, _ in self.body if t == tag)


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file: `path` is relative to the package, `hunks` are in the file's order."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False

    @property
    def added(self) -> int:
        return sum(hunk.count(b"+") for hunk in self.hunks)

    @property
    def removed(self) -> int:
        return sum(hunk.count(b"-") for hunk in self.hunks)


def parse(text: bytes, name: str) -> tuple[FileDiff, ...]:
    """Reads a patch: free text, then file diffs (`--- a/…`, `+++ b/…`, hunks) with or without git's headers.

    Args:
        text: the patch file's bytes.
        name: what messages call it.

    Raises:
        SparsekvError: it is malformed; the message names the file, the line and the rule.
    """
    return _Parser(text, name).parse()


class _Parser:
    def __init__(self, text: bytes, name: str) -> None:
        self._lines = text.split(b"\n")
        self._lines = [line + b"\n" for line in self._lines[:-1]] + ([self._lines[-1]] if self._lines[-1] else [])
        self._name = name
        self._at = 0
        if b"\0" in text:
            self._fail("holds a NUL byte; binary patches are not supported")

    def _fail(self, rule: str) -> NoReturn:
        raise SparsekvError(
            f"{self._name}:{self._at + 1}: malformed patch: {rule}", hint="restore the file as it was published; nothing was changed"
        )

    @property
    def _line(self) -> bytes:
        return self._lines[self._at] if self._at < len(self._lines) else b""

    def parse(self) -> tuple[FileDiff, ...]:
        while self._at < len(self._lines) and not self._line.startswith((b"diff --git ", b"--- a/", b"--- /dev/null")):
            if self._line.startswith(b"@@ "):
                self._fail("a hunk before any `--- a/PATH` line")
            self._at += 1
        found: dict[str, FileDiff] = {}
        while self._at < len(self._lines):
            start = self._at
            diff = self._file_diff()
            if diff.path in found:
                self._at = start
                self._fail(f"`{diff.path}` occurs twice")
            found[diff.path] = diff
        if not found:
            self._at = 0
            self._fail("it changes no file")
        return tuple(found.values())

    def _file_diff(self) -> FileDiff:
        git_path = None
        if self._line.startswith(b"diff --git "):
            match = re.fullmatch(rb"diff --git a/(\S+) b/(\S+)\n", self._line)
            if match is None or match[1] != match[2]:
                self._fail("expected `diff --git a/PATH b/PATH` with one path; renames and copies are not supported")
            git_path = self._path(match[1])
            self._at += 1
            while not self._line.startswith(b"--- "):
                if not _GIT_HEADER.fullmatch(self._line):
                    self._fail("only plain text changes are supported: no renames, modes, links or binary files")
                self._at += 1
        old = self._side(b"--- ", b"a/")
        new = self._side(b"+++ ", b"b/")
        if old is None and new is None:
            self._fail("both sides are /dev/null")
        if old is not None and new is not None and old != new:
            self._fail(f"the two sides name different files: `{old}` and `{new}`")
        path = new if new is not None else old
        assert path is not None
        if git_path is not None and git_path != path:
            self._fail(f"`diff --git` names `{git_path}`, this line `{path}`")
        hunks = self._hunks()
        if old is None and (len(hunks) != 1 or hunks[0].old):
            self._fail(f"`{path}` is created, but its hunk has old lines")
        if new is None and (len(hunks) != 1 or hunks[0].new):
            self._fail(f"`{path}` is deleted, but its hunk leaves lines")
        return FileDiff(path, tuple(hunks), creates=old is None, deletes=new is None)

    def _side(self, mark: bytes, prefix: bytes) -> str | None:
        if not self._line.startswith(mark):
            self._fail(f"expected a line `{mark.decode()}{prefix.decode()}PATH`")
        name = self._line[len(mark) :].rstrip(b"\n").split(b"\t")[0]
        if name == b"/dev/null":
            path = None
        elif name.startswith(prefix):
            path = self._path(name[len(prefix) :])
        else:
            self._fail(f"expected `{prefix.decode()}PATH` or `/dev/null`")
        self._at += 1
        return path

    def _path(self, raw: bytes) -> str:
        if not re.fullmatch(rb"[A-Za-z0-9_./+~-]+", raw):
            self._fail("a path may hold letters, digits and `_ . / + ~ -` only")
        path = raw.decode()
        parts = path.split("/")
        if any(part in ("", ".", "..") or part.startswith(".") for part in parts) or "__pycache__" in parts:
            self._fail(f"`{path}` is not a plain path inside the package")
        if path.endswith(_LEFTOVERS):
            self._fail(f"`{path}` is a backup or a cache file, left in the patch by mistake")
        return path

    def _hunks(self) -> list[Hunk]:
        hunks: list[Hunk] = []
        end = shift = 0
        while self._line.startswith(b"@@"):
            match = _RANGE.fullmatch(self._line)
            if match is None:
                self._fail("a hunk begins with `@@ -LINE,COUNT +LINE,COUNT @@`")
            old_start, old_count, new_start, new_count = (1 if group is None else int(group) for group in match.groups())
            # A side without lines is numbered by the line before it.
            old_first, new_first = old_start + (not old_count), new_start + (not new_count)
            if old_first < 1 or old_first <= end:
                self._fail("hunks must be in order and must not overlap")
            if old_start and not old_count:
                self._fail("an insertion needs context lines around it")
            if new_first != old_first + shift:
                self._fail(f"the new side should start at line {old_first + shift - (not new_count)}, after the hunks before it")
            at = self._at
            self._at += 1
            hunks.append(Hunk(old_start, self._body(old_count, new_count)))
            if not any(tag != b" " for tag, _ in hunks[-1].body):
                self._at = at
                self._fail("the hunk changes nothing")
            end, shift = old_first + old_count - 1, shift + new_count - old_count
        if not hunks:
            self._fail("expected a hunk `@@ -LINE,COUNT +LINE,COUNT @@`")
        if self._at < len(self._lines) and not self._line.startswith((b"diff --git ", b"--- ")):
            self._fail("the hunk has more lines than its header counts")
        return hunks

    def _body(self, old_count: int, new_count: int) -> tuple[tuple[bytes, bytes], ...]:
        body: list[tuple[bytes, bytes]] = []
        ended: set[bytes] = set()  # sides that have had their last line, the one without a line end
        while old_count or new_count:
            tag, line = self._line[:1], self._line[1:]
            if not self._line:
                self._fail(f"the patch ends inside a hunk, {max(old_count, new_count)} lines short")
            if tag not in (b" ", b"-", b"+"):
                self._fail(f"a line of a hunk begins with a blank, `-` or `+`; {max(old_count, new_count)} are still to come")
            if not line.endswith(b"\n"):
                self._fail("the last line is cut off")
            sides = {b" ": b"-+"}.get(tag, tag)
            if ended & {sides[i : i + 1] for i in range(len(sides))}:
                self._fail("a line after the end of the file")
            old_count, new_count = old_count - (tag != b"+"), new_count - (tag != b"-")
            if old_count < 0 or new_count < 0:
                self._fail("the hunk has more lines than its header counts")
            self._at += 1
            if self._line.rstrip(b"\n") == _NO_NEWLINE:
                line = line[:-1]
                ended |= {sides[i : i + 1] for i in range(len(sides))}
                self._at += 1
            body.append((tag, line))
        return tuple(body)
