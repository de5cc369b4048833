"""Links, memory and the system around the cards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparsekv_cli.doctor.check import Level
from sparsekv_cli.doctor.checks import (
    memory_available,
    memory_hugepages,
    memory_numa,
    memory_pinned,
    memory_shm,
    memory_swap,
    pcie_link,
    pcie_p2p,
    pcie_rates,
    system_cpu,
    system_disk,
    system_leftovers,
    system_platform,
)
from sparsekv_cli.doctor.machine import Machine
from sparsekv_cli.doctor.probe import CardProbe, ProbeResult, run_probe

Make = Callable[..., Any]
GIB = 2**30
WSL = {"/proc/version": "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x) #1 SMP\n"}


def probed(machine: Machine, **fields: Any) -> Machine:
    """The machine, as if the measurement had found this on every card."""
    machine.measure = True
    machine.__dict__["probe"] = ProbeResult({gpu.uuid: CardProbe(gpu.uuid, **fields) for gpu in machine.cards})
    return machine


def levels(findings: list[Any]) -> list[Level]:
    return [finding.level for finding in findings]


HEALTHY = {"pinned_bytes": 2 * GIB, "copy_rate": 13.1e9, "gather_rates": {512: 11.9e9}, "link_gen": 4, "link_width": 8}


def test_all_is_well(make_machine: Make, make_profile: Make, run: Make) -> None:
    machine = probed(make_machine(profile=make_profile()), **HEALTHY)
    for module in (
        pcie_link,
        pcie_rates,
        pcie_p2p,
        memory_available,
        memory_pinned,
        memory_shm,
        memory_swap,
        memory_numa,
        memory_hugepages,
        system_platform,
        system_cpu,
        system_disk,
        system_leftovers,
    ):
        findings = run(module.CHECK, machine)
        assert set(levels(findings)) == {Level.OK}, (module.__name__, findings)
    assert run(pcie_rates.CHECK, machine)[0].evidence == ("gather of 512 B rows: 11.9 GB/s",)


def test_idle_links_say_nothing(make_machine: Make, make_profile: Make, run: Make, card: dict[str, str]) -> None:
    """The cards stand at generation 1 while idle: without a measurement that is unknown, not an error."""
    machine = make_machine(profile=make_profile())
    assert levels(run(pcie_link.CHECK, machine)) == [Level.UNKNOWN] * 2
    assert levels(run(pcie_rates.CHECK, machine)) == [Level.SKIP]
    one = make_profile(hardware__gpus=1, parallel__tensor=1, model__weights="2GiB")
    narrow = make_machine(cards=[card | {"pcie.link.width.max": "4"}], profile=one)
    (finding,) = run(pcie_link.CHECK, narrow)
    assert finding.level is Level.ERROR
    assert finding.summary.endswith("the slot has 4 lanes, the profile counts with 8")


def test_links_under_load(make_machine: Make, make_profile: Make, run: Make) -> None:
    machine = probed(make_machine(profile=make_profile()), **{**HEALTHY, "link_width": 4})
    findings = run(pcie_link.CHECK, machine)
    assert levels(findings) == [Level.ERROR] * 2
    assert "generation 4 x4 under load, the profile counts with 4 x8" in findings[0].summary
    slow = probed(make_machine(profile=make_profile()), **{**HEALTHY, "copy_rate": 6e9})
    findings = run(pcie_rates.CHECK, slow)
    assert levels(findings) == [Level.WARN] * 2
    assert "(generation 4 x8) carries 15.8 GB/s" in findings[0].evidence[-1]
    claimed = probed(make_machine(profile=make_profile(hardware__link_rate="16GB/s")), **HEALTHY)
    assert "link_rate: 11.9GB/s" in run(pcie_rates.CHECK, claimed)[0].remedy


def test_a_measurement_that_fails(make_machine: Make, make_profile: Make, run: Make) -> None:
    machine = make_machine(profile=make_profile(), measure=True)
    machine.__dict__["probe"] = ProbeResult({}, "torch finds no CUDA device: a CPU build")
    for module in (pcie_link, pcie_rates, memory_pinned):
        findings = run(module.CHECK, machine)
        assert Level.UNKNOWN in levels(findings)
        assert Level.OK not in levels(findings)
        assert "CPU build" in str(findings)
    refused = probed(make_machine(profile=make_profile()), problems=("page-locking: SparsekvError: cudaHostRegister refused",))
    assert levels(run(memory_pinned.CHECK, refused)) == [Level.ERROR] * 2
    assert levels(run(pcie_rates.CHECK, refused)) == [Level.UNKNOWN] * 2
    partial = probed(make_machine(profile=make_profile()), **{**HEALTHY, "gather_rates": {}, "problems": ("gather: out of memory",)})
    assert levels(run(pcie_rates.CHECK, partial)) == [Level.OK, Level.UNKNOWN] * 2


def test_the_measurement_is_a_process_of_its_own(make_machine: Make) -> None:
    """Where torch has no CUDA it says so in one line, whatever the cards were said to be."""
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run_probe(make_machine().host, make_machine().cards, (512,))
    assert result.cards == {}
    assert "torch finds no CUDA device" in result.failure
    assert run_probe(make_machine().host, (), (512,)).failure == "there is no card to measure"


P2P = """\
    case "$*" in
      *query-gpu*) printf '%s\\n' "{rows}" ;;
      *"topo -p2p"*) printf ' \\tGPU0\\tGPU1\\t\\n GPU0\\tX\\t{peer}\\t\\n GPU1\\t{peer}\\tX\\t\\n\\nLegend:\\n' ;;
      *"topo -m"*) printf '\\t\\033[4mGPU0\\tGPU1\\tCPU Affinity\\033[0m\\nGPU0\\t X \\t{wire}\\t0-23\\nGPU1\\t{wire}\\t X \\t0-23\\n' ;;
    esac
    """


@pytest.mark.parametrize(
    ("peer", "wire", "changes", "expected"),
    [
        ("CNS", "PHB", {}, [Level.OK]),
        ("OK", "NV4", {"hardware__p2p": "nvlink", "parallel__custom_all_reduce": "on"}, [Level.OK]),
        ("CNS", "PHB", {"hardware__p2p": "nvlink"}, [Level.ERROR]),
        ("CNS", "PHB", {"parallel__custom_all_reduce": "on"}, [Level.ERROR]),
        ("OK", "PHB", {"hardware__p2p": "patched", "parallel__custom_all_reduce": "on"}, [Level.ERROR]),
        ("OK", "PIX", {"hardware__p2p": "patched", "parallel__custom_all_reduce": "on"}, [Level.WARN]),
        ("OK", "PHB", {"hardware__p2p": "patched"}, [Level.OK]),
        ("OK", "PHB", {}, [Level.OK]),
    ],
)
def test_peer_access(
    make_machine: Make, make_profile: Make, run: Make, card: Any, second_card: Any, peer: str, wire: str, changes: Any, expected: Any
) -> None:
    rows = "\n".join(", ".join(row.values()) for row in (card, second_card))
    script = P2P.format(rows=rows, peer=peer, wire=wire)
    findings = run(pcie_p2p.CHECK, make_machine(cards=[], tools={"nvidia-smi": script}, profile=make_profile(**changes)))
    assert levels(findings) == expected


def test_memory_that_a_container_may_use(make_machine: Make, make_profile: Make, run: Make) -> None:
    files = {
        "/proc/self/cgroup": "0::/docker/abc\n",
        "/sys/fs/cgroup/docker/abc/memory.max": f"{64 * GIB}\n",
        "/sys/fs/cgroup/docker/abc/memory.current": f"{10 * GIB}\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/.dockerenv": "",
    }
    machine = make_machine(files=files, profile=make_profile())
    assert machine.available == 54 * GIB
    (finding,) = run(memory_available.CHECK, machine)
    assert finding.level is Level.ERROR
    assert "66.00 GiB needed, 54.00 GiB available" in finding.summary
    assert finding.remedy == "--set kv.pool=50GiB"
    assert "this Docker may use 64.00 GiB" in finding.evidence[1]


def test_memory_with_old_cgroups(make_machine: Make) -> None:
    files = {
        "/proc/self/cgroup": "5:cpuset:/\n4:memory:/job/1\n0::/\n",
        "/sys/fs/cgroup/memory/job/1/memory.limit_in_bytes": f"{8 * GIB}\n",
        "/sys/fs/cgroup/memory/job/1/memory.usage_in_bytes": f"{GIB}\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert make_machine(files=files).available == 7 * GIB


@pytest.mark.parametrize(("pool", "expected"), [("80GiB", Level.INFO), ("70GiB", Level.OK), ("83GiB", Level.ERROR)])
def test_memory_for_the_pool(make_machine: Make, make_profile: Make, run: Make, pool: str, expected: Level) -> None:
    assert levels(run(memory_available.CHECK, make_machine(profile=make_profile(kv__pool=pool)))) == [expected]


def test_memory_that_is_not_stated(make_machine: Make, run: Make) -> None:
    machine = make_machine(files={"/proc/meminfo": ""})
    assert levels(run(memory_available.CHECK, machine)) == [Level.UNKNOWN]
    assert levels(run(memory_swap.CHECK, machine)) == [Level.UNKNOWN]


def test_page_locking(make_machine: Make, make_profile: Make, run: Make) -> None:
    machine = probed(make_machine(profile=make_profile(), locked=8 * 2**20), **HEALTHY)
    assert levels(run(memory_pinned.CHECK, machine)) == [Level.INFO, Level.OK, Level.OK]
    machine = probed(make_machine(profile=make_profile(), files=WSL), **HEALTHY)
    assert levels(run(memory_pinned.CHECK, machine)) == [Level.WARN, Level.OK, Level.OK]
    on_card = make_profile(kv__placement="gpu", kv__hot="", kv__pool="16GiB")
    assert levels(run(memory_pinned.CHECK, make_machine(profile=on_card))) == [Level.SKIP]


def test_shared_memory(make_machine: Make, make_profile: Make, run: Make) -> None:
    small = {"/": (1000 * GIB, 500 * GIB), "/dev/shm": (64 * 2**20, 60 * 2**20)}
    (finding,) = run(memory_shm.CHECK, make_machine(profile=make_profile(), disks=small, files={"/.dockerenv": ""}))
    assert finding.level is Level.ERROR
    assert "--shm-size" in finding.remedy
    files = {
        "/dev/shm/vllm_offload_dead.mmap": "x" * 1000,
        "/dev/shm/vllm_offload_live.mmap": "x",
        "/proc/77/maps": "7f00 rw-s 0 00:19 3 /dev/shm/vllm_offload_live.mmap\n",
    }
    (finding,) = run(memory_shm.CHECK, make_machine(files=files))
    assert finding.level is Level.WARN
    assert finding.remedy == "rm /dev/shm/vllm_offload_dead.mmap"


def test_swap(make_machine: Make, run: Make) -> None:
    def with_swap(total: int, free: int) -> list[Level]:
        files = {"/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: 1 kB\nSwapTotal: {total} kB\nSwapFree: {free} kB\n"}
        return levels(run(memory_swap.CHECK, make_machine(files=files)))

    assert with_swap(0, 0) == [Level.INFO]
    assert with_swap(8 << 20, 1 << 20) == [Level.WARN]
    assert with_swap(8 << 20, 8 << 20) == [Level.OK]


def test_memory_nodes(make_machine: Make, make_profile: Make, run: Make) -> None:
    two = {"/sys/devices/system/node/node1/cpulist": "12-23\n"}
    assert levels(run(memory_numa.CHECK, make_machine(files=two))) == [Level.UNKNOWN]
    homes = two | {f"/sys/bus/pci/devices/0000:{bus}:00.0/numa_node": f"{n}\n" for n, bus in enumerate(("21", "41"))}
    assert levels(run(memory_numa.CHECK, make_machine(files=homes, profile=make_profile()))) == [Level.WARN]
    bound = make_profile(hardware__numa_bind="on")
    assert levels(run(memory_numa.CHECK, make_machine(files=homes, profile=bound))) == [Level.OK]


def test_huge_pages(make_machine: Make, run: Make) -> None:
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    assert levels(run(memory_hugepages.CHECK, make_machine(files={path: "always madvise [never]\n"}))) == [Level.WARN]
    assert levels(run(memory_hugepages.CHECK, make_machine(files={path: ""}))) == [Level.UNKNOWN]


def test_platforms(make_machine: Make, make_profile: Make, run: Make) -> None:
    assert levels(run(system_platform.CHECK, make_machine(files=WSL, profile=make_profile()))) == [
        Level.WARN,
        Level.INFO,
        Level.WARN,
        Level.OK,
    ]
    wsl = make_profile(hardware__platform="wsl2")
    assert levels(run(system_platform.CHECK, make_machine(files=WSL, profile=wsl))) == [Level.INFO, Level.OK]
    old = {"/proc/version": "Linux version 4.19.84-microsoft-standard (x) #1\n"}
    assert Level.ERROR in levels(run(system_platform.CHECK, make_machine(files=old)))
    guest = {"/proc/cpuinfo": "processor\t: 0\nflags\t: fpu hypervisor\n"}
    assert levels(run(system_platform.CHECK, make_machine(files=guest))) == [Level.INFO, Level.OK]
    assert levels(run(system_platform.CHECK, make_machine(files={"/proc/version": ""}))) == [Level.UNKNOWN]


def test_processor(make_machine: Make, make_profile: Make, run: Make) -> None:
    quota = {"/sys/fs/cgroup/cpu.max": "200000 100000\n"}
    (finding,) = run(system_cpu.CHECK, make_machine(files=quota, profile=make_profile()))
    assert (finding.level, finding.summary[:10]) == (Level.WARN, "2 core(s) ")
    governors = {f"/sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": "powersave\n" for n in range(2)}
    driver = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"
    assert levels(
        run(system_cpu.CHECK, make_machine(files=governors | {"/sys/fs/cgroup/cpu.max": "max 100000\n", driver: "acpi-cpufreq\n"}))
    ) == [Level.WARN]
    assert levels(run(system_cpu.CHECK, make_machine(files={driver: "intel_pstate\n"}))) == [Level.OK]


def test_disk(make_machine: Make, run: Make) -> None:
    full = {"/": (100 * GIB, 20 * GIB), "/home/alice/.cache/vllm": (100 * GIB, 100 * 2**20), "/tmp": (4 * GIB, 2 * GIB)}
    findings = run(system_disk.CHECK, make_machine(disks=full))
    assert levels(findings) == [Level.ERROR, Level.WARN]
    assert levels(run(system_disk.CHECK, make_machine(disks={"/nowhere": (1, 1)}))) == [Level.UNKNOWN] * 3


def test_servers_of_earlier_runs(make_machine: Make, run: Make) -> None:
    """Their arguments stay out of the report: a key may be among them."""
    files = {
        "/proc/41/cmdline": "/usr/bin/python3\0-m\0vllm.entrypoints.openai.api_server\0--api-key\0canary-key\0",
        "/proc/41/comm": "python3\n",
        "/proc/42/cmdline": "VLLM::EngineCore\0",
        "/proc/42/comm": "VLLM::EngineCor\n",
        "/proc/43/cmdline": "/bin/bash\0",
        "/proc/43/comm": "bash\n",
    }
    (finding,) = run(system_leftovers.CHECK, make_machine(files=files))
    assert finding.level is Level.WARN
    assert finding.evidence == ("pid 41: vllm.entrypoints", "pid 42: VLLM::EngineCore")
    assert "canary" not in str(finding)
