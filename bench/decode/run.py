"""Runs arms one after another, each in a process of its own, and gathers their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.kernels.policy import SelectionPolicy

from .arms import ARMS, Case
from .setup import cut_model, random_basis, write_profile

SKETCH_RANK = 128


@dataclass(frozen=True)
class Task:
    """One boot of one arm."""

    arm: str
    cases: tuple[Case, ...]
    drafts: int = 0
    kv_memory_gib: float | None = None
    """Cap of the GPU memory vLLM may use for its own KV cache."""
    hot_gib: float = 2.0
    policy: SelectionPolicy = field(default_factory=SelectionPolicy)
    max_model_len: int = 262144


def run(tasks: Iterable[Task], config: dict[str, Any], layers: int, log_folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Runs what fits into `seconds`; the rest comes back as rows with `event` "skipped"."""
    deadline = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    log_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "model"
        cut = cut_model(config, layers, model)
        basis = folder / "basis.safetensors"
        random_basis(cut, SKETCH_RANK, basis)
        for number, task in enumerate(tasks):
            left = deadline - time.monotonic()
            if left < 30:
                rows.append({"arm": task.arm, "event": "skipped", "reason": "no time left"})
                continue
            rows += _run_task(task, model, basis, folder / f"profile-{number}.json", log_folder / f"{number}-{task.arm}.log", left)
    return rows


def _run_task(task: Task, model: Path, basis: Path, profile: Path, log: Path, seconds: float) -> list[dict[str, Any]]:
    environment = dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", PYTHONUNBUFFERED="1")
    arm = ARMS[task.arm]
    if arm.sparse:
        tokens = max(case.requests * (case.context + case.steps + 512) for case in task.cases)
        write_profile(profile, basis, arm.kv_dtype, max(tokens, task.max_model_len), int(task.hot_gib * 2**30), task.policy)
        environment["SPARSEKV_PROFILE"] = str(profile)
    command = [sys.executable, "-m", "sparsekv.bench.decode.worker", task.arm, "--model", str(model), "--drafts", str(task.drafts)]
    command += ["--cases", json.dumps([[case.requests, case.context, case.steps] for case in task.cases])]
    command += ["--max-model-len", str(task.max_model_len)]
    if task.kv_memory_gib is not None:
        command += ["--kv-memory-gib", str(task.kv_memory_gib)]
    with log.open("w") as errors:
        try:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=seconds, check=False)
            out, failure = done.stdout, f"exit {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired as expired:
            out, failure = (expired.stdout or b"").decode(), f"stopped after {seconds:.0f} s"
    rows = [json.loads(line) | {"kv_memory_gib": task.kv_memory_gib} for line in out.splitlines() if line.startswith('{"arm"')]
    if failure:
        rows.append({"arm": task.arm, "event": "failed", "reason": failure, "log": log.read_text()[-2000:]})
    return rows
