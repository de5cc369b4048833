"""The options that the installed vLLM really has, asked of its own parser once and then kept."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sparsekv.patches.tree import VllmTree
from sparsekv.profiles.env import cache_dir
from sparsekv.profiles.errors import ExitCode, SparsekvError
from sparsekv.profiles.free_options import option_name
from sparsekv.profiles.launch import SINCE

LIMIT_S = 180
"""Importing vLLM takes seconds, and minutes from a slow disk."""

_ASK = """
import argparse, json, sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
subparsers = FlexibleArgumentParser().add_subparsers()
parser = cmd_init()[0].subparser_init(subparsers)
names = sorted(name for action in parser._actions for name in action.option_strings)
with open(sys.argv[1], "w") as file:
    json.dump(names, file)
"""


def vllm_options(tree: VllmTree) -> frozenset[str]:
    """Every spelling of every option of `vllm serve`.

    Raises:
        SparsekvError: vLLM cannot be imported, or its parser cannot be built on this machine.
    """
    path = cache_dir() / "vllm-options" / f"{_fingerprint(tree)}.json"
    try:
        return frozenset(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        answer = Path(folder) / "options.json"
        _ask(answer)
        names = frozenset(json.loads(answer.read_text("utf-8")))
        os.replace(answer, path)
    return names


def unknown_options(words: Iterable[str], known: frozenset[str]) -> list[str]:
    """One line for each option that vLLM lacks. An abbreviation counts as unknown: what it means changes with the version."""
    problems = []
    for word in words:
        if (name := option_name(word)) and name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.6)
            note = f" is in vLLM from {SINCE[name]} on" if name in SINCE else f"; did you mean {close[0]}?" if close else ""
            problems.append(f"{name}{note}")
    return problems


def _fingerprint(tree: VllmTree) -> str:
    """Changes with the version, the place, and whenever the file that declares the options does."""
    source = tree.root / "engine" / "arg_utils.py"
    stamp = source.stat().st_mtime_ns if source.is_file() else 0
    digest = hashlib.sha256(f"{tree.root} {stamp}".encode()).hexdigest()[:12]
    return f"{tree.version}-{digest}"


def _ask(answer: Path) -> None:
    # No plug-ins: they cost time, and a broken one is another check's matter.
    environment = {**os.environ, "VLLM_PLUGINS": "", "PYTHONSAFEPATH": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("SPARSEKV_PROFILE", None)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK, str(answer)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SparsekvError(
            f"vLLM did not say within {LIMIT_S} s which options it has", hint="try `vllm serve --help`", exit_code=ExitCode.ENVIRONMENT
        ) from None
    if done.returncode:
        last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit status {done.returncode}")
        raise SparsekvError(f"vLLM's options cannot be read: {last}", hint="try `vllm serve --help`", exit_code=ExitCode.ENVIRONMENT)
