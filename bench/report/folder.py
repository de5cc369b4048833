"""The folder of one run: created for it alone, written as things happen, readable at any moment."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from sparsekv.profiles.errors import ExitCode, SparsekvError

MIN_FREE_BYTES = 64 << 20


class RunFolder:
    """Appends records line by line, each flushed; replaces whole files atomically. Only its owner may read it."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._columns = columns
        self._stack = ExitStack()
        self._files: dict[str, TextIO] = {}
        self._rows = csv.DictWriter(self._open("timeseries.csv"), columns, extrasaction="ignore")
        self._rows.writeheader()
        for name in ("requests.jsonl", "server_metrics.jsonl"):
            self._open(name)

    @classmethod
    def create(cls, parent: Path, stem: str, columns: Sequence[str]) -> RunFolder:
        """A new folder `parent/stem-TIME`, with a number where that exists: two runs never share one.

        Raises:
            SparsekvError: it cannot be made, or the disk is full.
        """
        name = re.sub(r"[^\w.+-]+", "-", f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            usage = os.statvfs(parent)
            if usage.f_bavail * usage.f_frsize < MIN_FREE_BYTES:
                raise SparsekvError(
                    f"{parent}: less than {MIN_FREE_BYTES >> 20} MiB free",
                    hint="make room, or name another folder with --out",
                    exit_code=ExitCode.ENVIRONMENT,
                )
            for number in range(1, 1000):
                path = parent / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir(mode=0o700)
                except FileExistsError:
                    continue
                return cls(path, columns)
        except OSError as error:
            raise SparsekvError(f"{parent}: {error.strerror}", hint="name a folder that can be written with --out") from None
        raise SparsekvError(f"{parent} already holds a thousand runs named {name}")

    def append(self, name: str, line: str) -> None:
        file = self._files[name]
        file.write(line + "\n")
        file.flush()

    def append_sample(self, row: dict[str, Any]) -> None:
        self._rows.writerow(row)
        self._files["timeseries.csv"].flush()

    def append_text(self, line: str) -> None:
        """text.jsonl, which exists only if texts are recorded."""
        if "text.jsonl" not in self._files:
            self._open("text.jsonl")
        self.append("text.jsonl", line)

    def write(self, name: str, text: str) -> None:
        write_atomic(self.path / name, text)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=1) + "\n")

    def close(self) -> None:
        self._stack.close()

    def _open(self, name: str) -> TextIO:
        descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._files[name] = self._stack.enter_context(os.fdopen(descriptor, "w", newline=""))
        return self._files[name]


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file at once: a reader finds the old text or the new one. Readable by the owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
