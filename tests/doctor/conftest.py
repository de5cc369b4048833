"""Machines made on the spot: a folder for /proc, /sys and /dev, and a PATH with tools that say what they are told."""

from __future__ import annotations

import stat
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparsekv.profiles.loader import LoadedProfile, load_profile
from sparsekv_cli.doctor.check import Check, Finding, Level
from sparsekv_cli.doctor.gpus import FIELDS
from sparsekv_cli.doctor.host import Host
from sparsekv_cli.doctor.machine import Machine
from sparsekv_cli.doctor.runner import run_checks

GIB = 2**30

CARD = {
    "index": "0",
    "uuid": "GPU-11111111-2222-3333-4444-555555555555",
    "name": "NVIDIA GeForce RTX 3090",
    "pci.bus_id": "00000000:21:00.0",
    "driver_version": "580.95.05",
    "compute_cap": "8.6",
    "memory.total": "24576 MiB",
    "memory.used": "310 MiB",
    "display_active": "Disabled",
    "persistence_mode": "Enabled",
    "mig.mode.current": "[N/A]",
    "ecc.errors.uncorrected.volatile.total": "[N/A]",
    "pcie.link.gen.current": "1",
    "pcie.link.gen.max": "4",
    "pcie.link.width.current": "8",
    "pcie.link.width.max": "8",
    "power.limit": "250.00 W",
    "power.default_limit": "370.00 W",
    "power.min_limit": "100.00 W",
    "power.max_limit": "390.00 W",
}
SECOND = CARD | {"index": "1", "uuid": "GPU-99999999-2222-3333-4444-555555555555", "pci.bus_id": "00000000:41:00.0"}

FILES = {
    "/proc/meminfo": "MemTotal: 98566144 kB\nMemAvailable: 90177536 kB\nSwapTotal: 8388604 kB\nSwapFree: 8388604 kB\nHugePages_Total: 0\n",
    "/proc/version": "Linux version 6.8.0-60-generic (buildd@host) #63 SMP\n",
    "/proc/cpuinfo": "".join(f"processor\t: {n}\nmodel name\t: 12th Gen Intel(R) Core(TM) i9-12900K\nflags\t: fpu\n\n" for n in range(24)),
    "/proc/self/cgroup": "0::/user.slice\n",
    "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-23\n",
    "/proc/modules": "nvidia_uvm 2158592 0 - Live 0x0 (OE)\nnvidia 14381056 1 nvidia_uvm, Live 0x0 (OE)\n",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/devices/system/node/node0/cpulist": "0-23\n",
    "/dev/shm/.keep": "",
}


class FakeHost(Host):
    """Disk sizes and limits are what the test says, since a folder has those of its own file system."""

    disks: Mapping[str, tuple[int, int]] = {}
    locked: int | None = None

    def disk(self, path: Path) -> tuple[int, int] | None:
        text = str(path).removeprefix(str(self.root))
        fitting = [key for key in self.disks if text.startswith(key)]
        return self.disks[max(fitting, key=len)] if fitting else None

    def locked_memory_limit(self) -> int | None:
        return self.locked


@pytest.fixture
def card() -> dict[str, str]:
    return dict(CARD)


@pytest.fixture
def second_card() -> dict[str, str]:
    return dict(SECOND)


@pytest.fixture
def make_machine(tmp_path: Path) -> Callable[..., Machine]:
    """A workstation with two RTX 3090 on which all is well; the arguments make it different.

    `cards` are rows of nvidia-smi, `tools` are shell scripts by name, `files` are put over those above (None removes one).
    """

    def make(
        *,
        cards: list[dict[str, str]] | None = None,
        tools: Mapping[str, str] | None = None,
        files: Mapping[str, str | None] | None = None,
        environ: Mapping[str, str] | None = None,
        profile: LoadedProfile | None = None,
        disks: Mapping[str, tuple[int, int]] | None = None,
        locked: int | None = None,
        measure: bool = False,
        url: str = "",
    ) -> Machine:
        root, bin_ = tmp_path / "root", tmp_path / "bin"
        bin_.mkdir(exist_ok=True)
        for name, content in {**FILES, **(files or {})}.items():
            if content is not None:
                path = root / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
        rows = [", ".join(row[field] for field in FIELDS) for row in ([CARD, SECOND] if cards is None else cards)]
        smi = {"nvidia-smi": nvidia_smi(rows)} if cards is None or cards else {}
        for name, script in {**smi, **(tools or {})}.items():
            path = bin_ / name
            path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        host = FakeHost(root, {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": "/home/alice", **(environ or {})})
        host.disks = disks or {"/": (1000 * GIB, 500 * GIB), "/dev/shm": (47 * GIB, 47 * GIB)}
        host.locked = locked
        return Machine(host, profile, measure=measure, url=url)

    return make


def nvidia_smi(rows: list[str]) -> str:
    """A script that answers the queries of doctor as nvidia-smi does."""
    listing = "\n".join(rows)
    return f"""\
        case "$*" in
          *query-gpu*) cat <<'ROWS'
{listing}
ROWS
            ;;
          *query-compute-apps*) ;;
          *"topo -p2p"*) printf ' \\tGPU0\\tGPU1\\t\\n GPU0\\tX\\tCNS\\t\\n GPU1\\tCNS\\tX\\t\\n' ;;
          *"topo -m"*) printf '\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tPHB\\t0-23\\nGPU1\\tPHB\\t X \\t0-23\\n' ;;
          *) exit 2 ;;
        esac
        """


@pytest.fixture
def run() -> Callable[[Check, Machine], list[Finding]]:
    def go(check: Check, machine: Machine) -> list[Finding]:
        (result,) = run_checks([check], machine)
        return list(result.findings)

    return go


@pytest.fixture
def worst() -> Callable[[list[Finding]], Level]:
    return lambda findings: max((finding.level for finding in findings), key=list(Level).index)


@pytest.fixture
def make_profile(tmp_path: Path) -> Callable[..., LoadedProfile]:
    """A profile for two RTX 3090, with `section__key=value` changes."""

    def make(name: str = "pair", **changes: Any) -> LoadedProfile:
        path = tmp_path / f"{name}.yaml"
        path.write_text(PROFILE.format(folder=tmp_path / "model", basis=tmp_path / "basis.safetensors"))
        return load_profile(str(path), [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])

    return make


PROFILE = """\
description: two RTX 3090
hardware:
  gpu: GeForce RTX 3090
  gpus: 2
  vram: 24GiB
  compute_capability: "8.6"
  pcie:
    generation: 4
    width: 8
  ram: 96GB
  power_cap: 250W
model:
  path: {folder}
  name: qwen
  max_model_len: 262144
  weights: 14.3GiB
  shape:
    attention_layers: 16
    query_heads: 24
    kv_heads: 4
    head_dim: 256
    recurrent_layers: 48
    recurrent_state: 150MiB
parallel:
  tensor: 2
kv:
  dtype: int8
  pool: 62GiB
  hot: 1GiB
sketch:
  basis: {basis}
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_PLUGINS", "SPARSEKV_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
