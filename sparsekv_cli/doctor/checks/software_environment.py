"""No environment variable changes what the profile says, or breaks vLLM."""

from __future__ import annotations

from sparsekv.profiles.env import unknown_variables

from ..check import Check, Findings, error, ok, warn
from ..machine import Machine

NOT_EMPTY = ("VLLM_MARLIN_INPUT_DTYPE", "VLLM_ATTENTION_BACKEND")
"""vLLM takes the empty text for a value, and fails on it."""
OVERRIDES = {
    "VLLM_ATTENTION_BACKEND": "chooses another attention backend than sparsekv's",
    "VLLM_USE_V1": "is from an older vLLM",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "makes every allocation slow",
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait for the one before",
    "NCCL_DEBUG": "writes much to the log",
    "TRITON_INTERPRET": "runs kernels in Python, thousands of times slower",
}


def _run(machine: Machine) -> Findings:
    environ = machine.host.environ
    found = False
    for name in NOT_EMPTY:
        if environ.get(name) == "":
            found = True
            yield error(f"{name} is set to nothing, on which vLLM fails", remedy=f"unset {name}")
    profile_sets = machine.profile.env if machine.profile else {}
    for name, effect in OVERRIDES.items():
        if environ.get(name) and name not in profile_sets and environ[name] not in ("0", "WARN", "ERROR"):
            found = True
            yield warn(f"{name}={environ[name]} {effect}", remedy=f"unset {name}")
    if misspelt := unknown_variables(environ):
        found = True
        yield warn(f"sparsekv has no variable {', '.join(misspelt)}", cause="a misspelt name")
    # torch reads either name; vLLM's own check reads the first only.
    allocator = environ.get("PYTORCH_CUDA_ALLOC_CONF") or environ.get("PYTORCH_ALLOC_CONF") or ""
    tensor = machine.profile.parallel.tensor if machine.profile else 1
    if "expandable_segments:true" in allocator.lower().replace(" ", ""):
        found = True
        message = "expandable segments are on in the environment: KV connectors refuse them, and custom all-reduce fails with them"
        yield (error if tensor > 1 else warn)(
            message, f"PYTORCH_CUDA_ALLOC_CONF={allocator}", remedy="unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"
        )
    if not found:
        yield ok("no variable interferes")


CHECK = Check("software.environment", "Software", "environment variables that interfere", _run)
