"""The three tools of an agent: list, read and search, over a repository that was read into memory. Nothing is written or run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .repository import Repository

MAX_LISTED = 200
MAX_MATCHES = 40
MAX_LINES = 400


def _function(name: str, description: str, required: list[str], **properties: dict[str, str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SCHEMAS: list[dict[str, Any]] = [
    _function("list_files", "List the files under a folder.", [], folder={"type": "string", "description": "empty: everything"}),
    _function(
        "read_file",
        "Read lines of a file.",
        ["path"],
        path={"type": "string"},
        first_line={"type": "integer", "description": "1 is the first"},
        last_line={"type": "integer"},
    ),
    _function("search", "Find the lines that contain a text.", ["text"], text={"type": "string"}, folder={"type": "string"}),
]


class Tools:
    """Runs tool calls. A wrong call is answered with what is wrong, as a model needs it."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self._tools: dict[str, Callable[..., str]] = {"list_files": self.list_files, "read_file": self.read_file, "search": self.search}

    def knows(self, name: str, arguments: str) -> bool:
        """Whether this is a call that can be answered with content."""
        return name in self._tools and isinstance(_parse(arguments), dict)

    def run(self, name: str, arguments: str) -> str:
        """The tool's answer, or a line starting with `error:`."""
        tool = self._tools.get(name)
        if tool is None:
            return f"error: there is no tool {name!r}; there are {', '.join(self._tools)}"
        parsed = _parse(arguments)
        if not isinstance(parsed, dict):
            return "error: the arguments are not a JSON object"
        try:
            return tool(**parsed)
        except TypeError:
            wanted = next(s["function"]["parameters"]["properties"] for s in SCHEMAS if s["function"]["name"] == name)
            return f"error: {name} takes {', '.join(wanted)}"

    def list_files(self, folder: str = "") -> str:
        if not isinstance(folder, str):
            return "error: folder is a text"
        names = self._under(folder)
        if not names:
            return f"error: no folder {folder!r}"
        lines = [f"{name} ({len(self.repository.files[name])} lines)" for name in names[:MAX_LISTED]]
        if len(names) > MAX_LISTED:
            lines.append(f"… and {len(names) - MAX_LISTED} more: name a folder")
        return "\n".join(lines)

    def read_file(self, path: str, first_line: int = 1, last_line: int | None = None) -> str:
        lines = self.repository.files.get(path) if isinstance(path, str) else None
        if lines is None:
            reason = self.repository.skipped.get(str(path))
            return f"error: {path!r} is not shown: {reason}" if reason else f"error: no file {path!r}"
        if not isinstance(first_line, int) or not isinstance(last_line, int | None):
            return "error: first_line and last_line are whole numbers"
        first = max(1, first_line)
        last = min(len(lines), first + MAX_LINES - 1, last_line if last_line is not None else len(lines))
        if first > last:
            return f"error: {path} has {len(lines)} lines"
        return excerpt(path, first, lines[first - 1 : last])

    def search(self, text: str, folder: str = "") -> str:
        if not isinstance(text, str) or not text.strip() or not isinstance(folder, str):
            return "error: text must not be empty"
        matches = []
        for name in self._under(folder):
            for number, line in enumerate(self.repository.files[name], 1):
                if text in line:
                    matches.append(f"{name}:{number}: {line.strip()[:200]}")
                    if len(matches) == MAX_MATCHES:
                        return "\n".join([*matches, "… and more: search for a longer text"])
        return "\n".join(matches) or f"no line contains {text!r}"

    def _under(self, folder: str) -> list[str]:
        prefix = folder.strip("/")
        if prefix in ("", "."):
            return list(self.repository.files)
        return [name for name in self.repository.files if name.startswith(prefix + "/")]


def excerpt(path: str, first: int, lines: list[str]) -> str:
    """Lines of a file as a tool shows them."""
    return f"{path}, lines {first}-{first + len(lines) - 1}:\n" + "\n".join(lines)


def _parse(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return None
