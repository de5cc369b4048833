"""Placing hunks in a file with no fuzz: every old line must be there, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .unified_diff import FileDiff, Hunk


class HunkError(Exception):
    """A hunk has no place, or no certain place, in the file; the text says which hunk and why."""


@dataclass(frozen=True)
class Patched:
    """The file after the patch, None where it is deleted, and how far each hunk lies from the line its header states."""

    content: bytes | None
    offsets: tuple[int, ...]


def split_lines(content: bytes) -> list[bytes]:
    r"""Lines with their line ends; only `\n` ends a line, as in diffs."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def patch_file(content: bytes | None, diff: FileDiff, *, known: bool) -> Patched:
    """Applies one file's hunks.

    Args:
        content: the file now; None if it does not exist.
        diff: what to do.
        known: the file is byte for byte the one that the diff was cut from. Then the line numbers are right and nothing else
            will do. In any other file a hunk goes where its old lines stand, if that is one place only.

    Raises:
        HunkError: it does not apply.
    """
    if diff.creates:
        if content is not None:
            raise HunkError("the file exists already")
        return Patched(b"".join(diff.hunks[0].new), (0,))
    if content is None:
        raise HunkError("the file is missing")
    lines = split_lines(content)
    if diff.deletes:
        if lines != diff.hunks[0].old:
            raise HunkError("hunk 1: the file to delete has other content")
        return Patched(None, (0,))

    result: list[bytes] = []
    offsets: list[int] = []
    done = 0
    for number, hunk in enumerate(diff.hunks, 1):
        stated = hunk.old_start - 1 if hunk.old else hunk.old_start
        places = [stated] if known else range(done, len(lines) - len(hunk.old) + 1)
        found = [at for at in places if at >= done and lines[at : at + len(hunk.old)] == hunk.old and (known or _anchored(lines, hunk, at))]
        if not found:
            raise HunkError(f"hunk {number} (line {hunk.old_start}): its old lines are not in the file")
        if len(found) > 1:
            raise HunkError(f"hunk {number} (line {hunk.old_start}): its old lines stand in {len(found)} places")
        result += lines[done : found[0]] + hunk.new
        offsets.append(found[0] - stated)
        done = found[0] + len(hunk.old)
    return Patched(b"".join(result + lines[done:]), tuple(offsets))


def reversed_diff(diff: FileDiff) -> FileDiff:
    """The diff that takes `diff` back."""
    swap = {b" ": b" ", b"-": b"+", b"+": b"-"}
    shift = 0
    hunks = []
    for hunk in diff.hunks:
        old_first = hunk.old_start + (not hunk.old) + shift
        hunks.append(Hunk(old_first - (not hunk.new), tuple((swap[tag], line) for tag, line in hunk.body)))
        shift += len(hunk.new) - len(hunk.old)
    return FileDiff(diff.path, tuple(hunks), creates=diff.deletes, deletes=diff.creates)


def _anchored(lines: Sequence[bytes], hunk: Hunk, at: int) -> bool:
    """Whether a hunk that was cut off by an end of its file lies at that end: one side has less context, or lacks its line end."""
    before, after = hunk.context
    at_start, at_end = at == 0, at + len(hunk.old) == len(lines)
    whole = all(line.endswith(b"\n") for _, line in hunk.body)
    return (before >= after or at_start) and (after >= before or at_end) and (whole or at_end) and (bool(hunk.old) or not lines)
