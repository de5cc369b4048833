"""The key that clients must send: from the environment or a file, never from a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sparsekv.profiles.schema import Server


@dataclass(frozen=True)
class ApiKey:
    value: str = field(repr=False)
    shell: str
    """What stands for it in a command to paste."""


def find_api_key(server: Server, environ: Mapping[str, str]) -> ApiKey | None:
    """The first that is there and not empty. A file that cannot be read counts as none; `server.exposure` says why."""
    for name in ("SPARSEKV_API_KEY", "VLLM_API_KEY"):
        if value := environ.get(name, "").strip():
            return ApiKey(value, f'"${name}"')
    if server.api_key_file:
        try:
            value = Path(server.api_key_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        if value:
            return ApiKey(value, f'"$(cat {shlex.quote(server.api_key_file)})"')
    return None
