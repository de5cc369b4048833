"""`import kernels` gives what other programs expect: Hugging Face's package or nothing, never a folder of this project."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

from ..check import Check, Findings, error, ok
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    spec = PathFinder.find_spec("kernels", [entry for entry in sys.path if entry])
    if spec is None or spec.origin is None:
        yield ok("no package `kernels`, and nothing in its place")
    elif "sparsekv" in spec.origin or (spec.submodule_search_locations and _is_ours(spec.submodule_search_locations[0])):
        yield error(
            "`import kernels` finds this project's folder, which transformers would take for Hugging Face's package",
            spec.origin,
            cause="Python runs with the repository as its working folder or on PYTHONPATH",
            remedy="unset PYTHONPATH; export PYTHONSAFEPATH=1",
        )
    else:
        yield ok("`kernels` is Hugging Face's package", spec.origin)


def _is_ours(folder: str) -> bool:
    from pathlib import Path

    return (Path(folder) / "layout.py").is_file() and (Path(folder) / "policy.py").is_file()


CHECK = Check("software.kernels-name", "Software", "what `import kernels` finds", _run)
