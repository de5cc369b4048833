"""A code base as agents may see it: text files under one folder, read-only, whatever else lies there."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sparsekv.profiles.errors import SparsekvError

MAX_FILE_BYTES = 1 << 20
MAX_TOTAL_BYTES = 64 << 20
MAX_ENTRIES = 100_000
MAX_DEPTH = 64
SCAN_SECONDS = 30.0
LONG_LINE = 4000
"""A file with a line longer than this is minified or data: nobody reads it line by line."""
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv", "site-packages", "dist", "build", "target"})
SECRET_SUFFIXES = (".pem", ".key", ".p12", ".pfx", ".jks", ".keystore")


class Unreadable(Exception):
    """Why a file is not shown."""


@dataclass
class Repository:
    """The text files of a folder. Names are shown as JSON can hold them; bytes that are not UTF-8 appear as escapes."""

    root: Path
    files: dict[str, list[str]] = field(default_factory=dict)
    """Shown name -> lines, in sorted order."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Shown name -> reason; of the first thousand."""
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        return self.root.name or "root"

    @property
    def chars(self) -> int:
        return sum(len(line) + 1 for lines in self.files.values() for line in lines)

    def skip(self, name: str, reason: str) -> None:
        self.reasons[reason] += 1
        if len(self.skipped) < 1000:
            self.skipped[name] = reason


def scan(root: Path) -> Repository:
    """Reads every text file once, within limits of size, number and time.

    Raises:
        SparsekvError: no such folder, or nothing in it can be read as text.
    """
    try:
        resolved = root.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise SparsekvError(
            f"{root}: {getattr(error, 'strerror', None) or 'cannot be resolved'}", hint="give a folder with `--repo`"
        ) from None
    if not resolved.is_dir():
        raise SparsekvError(f"{root} is not a folder", hint="give the folder of a code base with `--repo`")
    repository = Repository(resolved)
    deadline = time.monotonic() + SCAN_SECONDS
    total = 0
    for path in _walk(repository, deadline):
        name = shown(os.path.relpath(path, resolved))
        try:
            if total >= MAX_TOTAL_BYTES:
                raise Unreadable("over the limit of all files together")
            if time.monotonic() > deadline:
                raise Unreadable("over the time limit of the scan")
            text = read_text(path, resolved)
        except Unreadable as reason:
            repository.skip(name, str(reason))
            continue
        total += len(text)
        repository.files[name] = text.splitlines()
    if not repository.files:
        found = ", ".join(f"{count} {reason}" for reason, count in repository.reasons.most_common(5))
        raise SparsekvError(
            f"{root} holds no text file to read" + (f" (skipped: {found})" if found else ""), hint="point `--repo` at source code"
        )
    repository.files = dict(sorted(repository.files.items()))
    return repository


def read_text(path: str, root: Path) -> str:
    """The text of a regular file inside `root`.

    Raises:
        Unreadable: with the reason.
    """
    if path.lower().endswith(SECRET_SUFFIXES):
        raise Unreadable("looks like a secret")
    try:
        # Not following links and not blocking: between the listing and now it may have become anything, a FIFO too.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        raise Unreadable("no permission") from None
    except OSError as error:
        raise Unreadable(error.strerror or "cannot be opened") from None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("not a regular file")
        real = os.path.realpath(path)
        if not real.startswith(os.path.join(str(root), "")) or not os.path.samestat(facts, os.stat(real)):
            raise Unreadable("outside the folder")
        if facts.st_size > MAX_FILE_BYTES:
            raise Unreadable(f"larger than {MAX_FILE_BYTES >> 20} MiB")
        try:
            raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise Unreadable(error.strerror or "cannot be read") from None
    return _decode(raw)


def shown(name: str) -> str:
    """A file name that any JSON, terminal or report can hold."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _decode(raw: bytes) -> str:
    if not raw:
        raise Unreadable("empty")
    if raw.startswith(b"version https://git-lfs.github.com/spec/"):
        raise Unreadable("a git-lfs pointer")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            text = raw.decode("utf-16")
        except UnicodeDecodeError:
            raise Unreadable("binary") from None
    elif b"\0" in raw:
        raise Unreadable("binary")
    else:
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = raw.decode("cp1252", "replace")
            odd = sum(not (c.isprintable() or c in "\t\n\r\f") for c in text)
            if odd * 50 > len(text):
                raise Unreadable("binary") from None
    if max(map(len, text.splitlines()), default=0) > LONG_LINE:
        raise Unreadable("minified or data: a line is too long to read")
    if not text.strip():
        raise Unreadable("empty")
    return text


def _walk(repository: Repository, deadline: float) -> Iterator[str]:
    """Regular files, folder by folder; links are not followed, so there are no loops and no way out."""
    pending: list[tuple[str, int]] = [(str(repository.root), 0)]
    entries = 0
    while pending:
        folder, depth = pending.pop()
        try:
            with os.scandir(folder) as listing:
                found = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            repository.skip(shown(os.path.relpath(folder, repository.root)), error.strerror or "cannot be listed")
            continue
        for entry in found:
            entries += 1
            name = shown(os.path.relpath(entry.path, repository.root))
            if entries > MAX_ENTRIES or time.monotonic() > deadline:
                repository.skip(name, "over the limit of entries or time of the scan")
                return
            if entry.is_symlink():
                repository.skip(name, "a link")
            elif entry.name.startswith("."):
                repository.skip(name, "hidden")
            elif entry.is_dir(follow_symlinks=False):
                if entry.name in SKIPPED_FOLDERS:
                    repository.skip(name, "a folder of built or fetched files")
                elif depth >= MAX_DEPTH:
                    repository.skip(name, "too deep")
                else:
                    pending.append((entry.path, depth + 1))
            elif entry.is_file(follow_symlinks=False):
                yield entry.path
            else:
                repository.skip(name, "not a regular file")
