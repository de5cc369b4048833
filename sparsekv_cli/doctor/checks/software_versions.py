"""vLLM, torch, Triton and Python are versions that work together."""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.version import Version

from ..check import Check, Findings, error, ok, unknown, warn
from ..machine import Machine

SUPPORTED = ("0.30", "0.34")
"""vLLM from the first up to, not including, the second."""
TESTED = "0.31.0"


def _run(machine: Machine) -> Findings:
    found = {name: version for name in ("torch", "triton", "transformers", "safetensors") if (version := _version(name))}
    evidence = [f"{name} {version}" for name, version in found.items()] + [f"Python {platform.python_version()}"]
    tree = machine.vllm
    if tree is None:
        yield error("vLLM is not installed for this Python", *evidence, remedy="pip install 'sparsekv[cuda]'")
        return
    if tree.version is None:
        yield unknown(f"the vLLM in {tree.root} does not state its version", *evidence)
        return
    low, high = map(Version, SUPPORTED)
    release = Version(tree.version.base_version)
    if not low <= release < high:
        yield error(
            f"vLLM {tree.version} is not supported: sparsekv works with {SUPPORTED[0]} up to {SUPPORTED[1]}, that one excluded",
            *evidence,
            remedy=f"pip install vllm=={TESTED}",
        )
    elif release != Version(TESTED):
        yield warn(f"vLLM {tree.version}: supported, but releases of sparsekv are tested with {TESTED}", *evidence)
    else:
        yield ok(f"vLLM {tree.version}, torch {found.get('torch', 'missing')}, Triton {found.get('triton', 'missing')}", *evidence)
    missing = [name for name in ("torch", "triton", "safetensors") if name not in found]
    if missing:
        yield error(f"missing: {', '.join(missing)}", remedy=f"pip install {' '.join(missing)}")


def _version(name: str) -> str | None:
    for candidate in (name, f"pytorch-{name}"):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return None


CHECK = Check("software.versions", "Software", "versions of vLLM, torch, Triton and Python", _run)
