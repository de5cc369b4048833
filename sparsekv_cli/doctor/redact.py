"""Taking out of a report what identifies a person or opens a door, so that it can be pasted anywhere."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRET_NAME = re.compile(r"(?i)(key|token|secret|passwd|password|credential|auth)")
_UUID = re.compile(r"\b((?:GPU|MIG)-[0-9a-f]{4})[0-9a-f]{4}-[0-9a-f-]{4,27}", re.IGNORECASE)
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b(?!\.\d)")
_MAC = re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE)


_NO_NAMES = {
    "root",
    "localhost",
    "user",
    "dev",
    "home",
    "data",
    "admin",
    "nobody",
    "ubuntu",
    "docker",
    "vllm",
    "sparsekv",
    "server",
    "model",
    "gpu",
}
"""User and host names that say nothing, and would tear holes into paths and sentences."""


class Redactor:
    """Replaces home folder, user and host name, addresses, the tail of GPU UUIDs, and the values of secret variables."""

    def __init__(self, environ: Mapping[str, str], *, home: Path | None = None, user: str | None = None, host: str | None = None) -> None:
        self._texts: list[tuple[re.Pattern[str], str]] = []
        for name, value in sorted(environ.items(), key=lambda item: -len(item[1])):
            if SECRET_NAME.search(name) and len(value) >= 4:
                self._texts.append((re.compile(re.escape(value)), f"<{name}>"))
        home_text = str(home or environ.get("HOME") or Path.home()).rstrip("/")
        if len(home_text) > 1:
            self._texts.append((re.compile(re.escape(home_text) + r"(?=/|\b|$)"), "~"))
        for text, label in ((user or _user(), "<user>"), (host or socket.gethostname(), "<host>")):
            if len(text) >= 3 and text not in _NO_NAMES:
                self._texts.append((re.compile(rf"(?<![\w.-]){re.escape(text)}(?![\w-])"), label))

    def text(self, value: str) -> str:
        for pattern, label in self._texts:
            value = pattern.sub(label, value)
        return _MAC.sub("<mac>", _ADDRESS.sub("<address>", _UUID.sub(r"\1…", value)))

    def tree(self, value: Any) -> Any:
        """The same for every text inside lists and maps."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.tree(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]
        return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
