"""The only door from a check to the operating system: files, tools, limits. Every call ends within a stated time."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MAX_FILE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Answer:
    """What a tool said. `failure` is None if it ran to its end, whatever its exit status."""

    status: int | None
    stdout: str = ""
    stderr: str = ""
    failure: Literal["missing", "timeout", "refused"] | None = None

    @property
    def succeeded(self) -> bool:
        return self.failure is None and self.status == 0

    @property
    def first_line(self) -> str:
        return next((line.strip() for line in (self.stdout + "\n" + self.stderr).splitlines() if line.strip()), "")


@dataclass
class Host:
    """This machine. Tests give another `root` for `/proc`, `/sys` and `/dev`, and a PATH with tools of their own."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """A text file; None if it cannot be read."""
        try:
            with self.path(path).open("rb") as file:
                return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError:
            return None

    def glob(self, pattern: str) -> list[Path]:
        """Matching paths, sorted; files that vanish meanwhile and folders that cannot be read are left out."""
        try:
            return sorted(self.root.glob(pattern.lstrip("/")))
        except OSError:
            return []

    def run(self, *command: str, seconds: float = 5.0) -> Answer:
        """Runs a tool with plain number formats. It and its children are killed when the time is over."""
        program = shutil.which(command[0], path=self.environ.get("PATH", os.defpath))
        if program is None:
            return Answer(None, failure="missing")
        try:
            process = subprocess.Popen(
                [program, *command[1:]],
                env={**self.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            return Answer(None, failure="refused")
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one stuck in the kernel is left there
                process.communicate(timeout=2)
            return Answer(None, failure="timeout")
        return Answer(process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))

    def disk(self, path: Path) -> tuple[int, int] | None:
        """Total and free bytes of the file system that holds `path`, or will hold it."""
        for candidate in (path, *path.parents):
            try:
                info = os.statvfs(candidate)
            except OSError:
                continue
            return info.f_frsize * info.f_blocks, info.f_frsize * info.f_bavail
        return None

    def locked_memory_limit(self) -> int | None:
        """Bytes that `ulimit -l` allows; None if unlimited."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def listening(self, host: str, port: int, seconds: float = 1.0) -> bool:
        """Whether something accepts connections there."""
        try:
            with socket.create_connection((host, port), seconds):
                return True
        except OSError:
            return False

    def bindable(self, host: str, port: int) -> str | None:
        """None if a server could listen there, else the reason why not."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
        except OSError as error:
            return error.strerror or str(error)
        return None
