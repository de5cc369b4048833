"""Every environment variable of sparsekv, with its meaning and default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIX = "SPARSEKV_"

VARIABLES: dict[str, str] = {
    "SPARSEKV_PROFILE": "path of the resolved profile; `sparsekv serve` sets it for vLLM's processes, and the plug-in is inert without it",
    "SPARSEKV_CACHE": "folder for converted models and other derived files (default: ~/.cache/sparsekv)",
    "SPARSEKV_API_KEY": "key that clients of the server must send; preferred over a key file where both are given",
}


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for derived files; it can be deleted at any time."""
    value = environ.get("SPARSEKV_CACHE")
    return Path(value).expanduser().absolute() if value else Path.home() / ".cache" / "sparsekv"


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that are set, look like ours and mean nothing: mostly misspelt ones."""
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in VARIABLES)
