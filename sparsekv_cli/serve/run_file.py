"""The resolved profile as a file: vLLM's processes read it, so that all of them work with the same values."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsekv.profiles.env import cache_dir
from sparsekv.profiles.errors import ExitCode, SparsekvError


def write_run_file(name: str, document: Mapping[str, Any]) -> Path:
    """Writes `document` for its owner alone and returns where.

    The file is named after its content: one that a server reads is never changed, and equal launches share it.

    Raises:
        SparsekvError: the folder cannot be written.
    """
    data = json.dumps(document, indent=2).encode()
    path = cache_dir() / "runs" / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SparsekvError(
            f"cannot write the resolved profile {path}: {error.strerror}",
            hint="set SPARSEKV_CACHE to a folder of yours",
            exit_code=ExitCode.ENVIRONMENT,
        ) from None
    return path
