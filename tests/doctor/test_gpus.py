"""What doctor makes of nvidia-smi, in good health and bad."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from sparsekv_cli.doctor.check import Level
from sparsekv_cli.doctor.checks import (
    gpu_display,
    gpu_driver,
    gpu_ecc,
    gpu_memory,
    gpu_mig,
    gpu_model,
    gpu_module,
    gpu_power,
    gpu_processes,
    gpu_xid,
)
from sparsekv_cli.doctor.gpus import Trouble, number, query_gpus, same_model

Make = Callable[..., Any]
Row = dict[str, str]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("350.00 W", 350.0),
        ("350.00", 350.0),
        ("350,00 W", 350.0),
        ("350", 350.0),
        ("24576 MiB", 24576.0),
        ("[N/A]", None),
        ("[Not Supported]", None),
        ("[Unknown Error]", None),
        ("N/A", None),
        ("", None),
        (None, None),
        ("W", None),
    ],
)
def test_number(text: str | None, value: float | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize("locale", ["C", "de_DE.UTF-8", "fr_FR.UTF-8"])
def test_fields_without_numbers(make_machine: Make, card: Row, run: Make, locale: str) -> None:
    """One card per variant: unknown stays unknown, good rows give one number in every locale, nothing breaks."""
    variants = ["[N/A]", "[Not Supported]", "[Unknown Error]", "", "350,00 W", "350.00", "350.00 W"]
    cards = [card | {"index": str(n), "uuid": f"GPU-{n:08}-0000", "power.limit": text} for n, text in enumerate(variants)]
    machine = make_machine(cards=cards, environ={"LC_ALL": locale, "LANG": locale})
    assert [gpu.power_limit for gpu in machine.gpu_list.gpus] == [None] * 4 + [350.0] * 3
    findings = run(gpu_power.CHECK, machine)
    assert [finding.level for finding in findings].count(Level.UNKNOWN) == 4
    assert Level.OK not in [finding.level for finding in findings]


def test_all_is_well(make_machine: Make, make_profile: Make, run: Make) -> None:
    machine = make_machine(profile=make_profile())
    for check in (gpu_driver, gpu_model, gpu_memory, gpu_processes, gpu_display, gpu_mig, gpu_power, gpu_module):
        findings = run(check.CHECK, machine)
        assert [finding.level for finding in findings] == [Level.OK], (check.__name__, findings)
    assert run(gpu_model.CHECK, machine)[0].summary == "2 x RTX 3090"


TROUBLES = {
    "mismatch": (
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
        Trouble.FAILED,
        "kernel module and its library differ",
    ),
    "not loaded": ("echo 'NVIDIA-SMI has failed: it cannot reach the driver.'; exit 9", Trouble.FAILED, "nvidia-smi fails"),
    "none": ("echo 'No devices were found'", Trouble.NONE_FOUND, "finds no GPU"),
    "silent": ("exit 0", Trouble.NONE_FOUND, "finds no GPU"),
    "hangs": ("sleep 60", Trouble.TIMEOUT, "does not answer"),
    "hangs in a child": ("sleep 60 & wait", Trouble.TIMEOUT, "does not answer"),
}


@pytest.mark.parametrize(("script", "trouble", "summary"), TROUBLES.values(), ids=TROUBLES.keys())
def test_every_trouble_has_its_name(make_machine: Make, script: str, trouble: Trouble, summary: str, run: Make) -> None:
    machine = make_machine(cards=[], tools={"nvidia-smi": script})
    started = time.monotonic()
    machine.__dict__["gpu_list"] = query_gpus(machine.host, seconds=1.0)
    assert time.monotonic() - started < 5
    assert machine.gpu_list.trouble is trouble
    assert machine.gpu_list.gpus == ()
    (finding,) = run(gpu_driver.CHECK, machine)
    assert finding.level is Level.ERROR
    assert summary in finding.summary
    assert finding.cause
    assert finding.remedy
    assert {f.level for check in (gpu_model, gpu_memory, gpu_mig, gpu_ecc, gpu_power) for f in run(check.CHECK, machine)} == {Level.SKIP}


def test_no_nvidia_smi(make_machine: Make, run: Make) -> None:
    machine = make_machine(cards=[], environ={"PATH": "/nowhere"})
    (finding,) = run(gpu_driver.CHECK, machine)
    assert (finding.level, finding.summary) == (Level.ERROR, "nvidia-smi is not installed")
    machine = make_machine(cards=[], environ={"PATH": "/nowhere"}, files={"/.dockerenv": ""})
    assert "--gpus all" in run(gpu_driver.CHECK, machine)[0].remedy
    machine = make_machine(
        cards=[], environ={"PATH": "/nowhere"}, files={"/proc/version": "Linux version 5.15.153.1-microsoft-standard-WSL2 (x) #1\n"}
    )
    assert "/usr/lib/wsl/lib" in run(gpu_driver.CHECK, machine)[0].remedy


def test_a_lost_card(make_machine: Make, card: Row, run: Make) -> None:
    row = ", ".join(card.values())
    script = f"echo 'Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost.  Reboot the system'\necho '{row}'\nexit 15"
    machine = make_machine(cards=[], tools={"nvidia-smi": script})
    assert [gpu.bus_id for gpu in machine.gpu_list.gpus] == ["0000:21:00.0"]
    (finding,) = run(gpu_driver.CHECK, machine)
    assert finding.level is Level.ERROR
    assert "lost; 1 still" in finding.summary


def test_a_field_that_an_old_driver_lacks(make_machine: Make, card: Row) -> None:
    without = ", ".join(value for key, value in card.items() if key != "compute_cap")
    script = f"""\
        case "$*" in *compute_cap*) echo 'Field "compute_cap" is not a valid field to query.'; exit 2;; esac
        echo '{without}'
        """
    (gpu,) = make_machine(cards=[], tools={"nvidia-smi": script}).gpu_list.gpus
    assert gpu.capability is None
    assert gpu.memory_total == 24 * 2**30


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("NVIDIA GeForce RTX 3090", True),
        ("GeForce RTX 3090", True),
        ("  NVIDIA GeForce RTX 3090  ", True),
        ("NVIDIA GeForce RTX 3090 Ti", False),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", False),
        ("NVIDIA GeForce RTX 3090 D", False),
        ("NVIDIA RTX A6000", False),
        ("NVIDIA Graphics Device", None),
        ("", None),
    ],
)
def test_names(name: str, same: bool | None) -> None:
    assert same_model(name, "GeForce RTX 3090") is same


def test_a_mixed_machine(make_machine: Make, make_profile: Make, card: Row, second_card: Row, run: Make) -> None:
    """A 3080 comes first on the bus; the profile wants the two 3090."""
    small = card | {
        "uuid": "GPU-30800000",
        "name": "NVIDIA GeForce RTX 3080",
        "pci.bus_id": "00000000:01:00.0",
        "memory.total": "10240 MiB",
    }
    cards = [small, card | {"index": "1"}, second_card | {"index": "2"}]
    machine = make_machine(cards=cards, profile=make_profile())
    assert [gpu.index for gpu in machine.cards] == [1, 2]
    findings = run(gpu_model.CHECK, machine)
    assert [finding.level for finding in findings] == [Level.INFO, Level.OK]
    assert len(findings[0].evidence) == 2

    first = make_machine(cards=cards, profile=make_profile(), environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert first.cards == ()
    levels = [finding.level for finding in run(gpu_model.CHECK, first)]
    assert levels == [Level.WARN, Level.ERROR]
    one = make_profile(hardware__gpus=1, parallel__tensor=1, model__weights="2GiB")
    by_uuid = make_machine(cards=cards, profile=one, environ={"CUDA_VISIBLE_DEVICES": second_card["uuid"]})
    assert [gpu.index for gpu in by_uuid.cards] == [2]
    hidden = make_machine(cards=cards, profile=make_profile(), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.visible == ()
    assert run(gpu_model.CHECK, hidden)[0].summary.startswith("CUDA_VISIBLE_DEVICES is set to nothing")


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 3090 Laptop GPU"])
def test_another_variant_is_not_taken(make_machine: Make, make_profile: Make, card: Row, second_card: Row, run: Make, name: str) -> None:
    machine = make_machine(cards=[card, second_card | {"name": name}], profile=make_profile())
    (finding,) = run(gpu_model.CHECK, machine)
    assert finding.level is Level.ERROR
    assert "the profile needs 2 x GeForce RTX 3090" in finding.summary


def test_a_nameless_card_is_unknown(make_machine: Make, make_profile: Make, card: Row, second_card: Row, run: Make) -> None:
    machine = make_machine(cards=[card, second_card | {"name": "NVIDIA Graphics Device"}], profile=make_profile())
    assert [finding.level for finding in run(gpu_model.CHECK, machine)] == [Level.UNKNOWN]


def test_memory_in_use(make_machine: Make, make_profile: Make, card: Row, second_card: Row, run: Make) -> None:
    machine = make_machine(cards=[card, second_card | {"memory.used": "9000 MiB"}], profile=make_profile())
    (finding,) = run(gpu_memory.CHECK, machine)
    assert finding.level is Level.ERROR
    assert "15.21 GiB free, the server claims 22.08 GiB" in finding.summary
    assert "gpu_memory_utilization to 0.61" in finding.remedy
    machine = make_machine(cards=[card | {"memory.total": "[N/A]"}, second_card], profile=make_profile())
    levels = {finding.level for finding in run(gpu_memory.CHECK, machine)}
    assert levels == {Level.UNKNOWN}


def test_switches(make_machine: Make, card: Row, second_card: Row, run: Make) -> None:
    cards = [
        card | {"mig.mode.current": "Enabled", "display_active": "Enabled", "ecc.errors.uncorrected.volatile.total": "3"},
        second_card | {"display_active": "[N/A]"},
    ]
    machine = make_machine(cards=cards)
    assert [f.level for f in run(gpu_mig.CHECK, machine)] == [Level.ERROR]
    assert [f.level for f in run(gpu_display.CHECK, machine)] == [Level.WARN, Level.UNKNOWN]
    assert [f.level for f in run(gpu_ecc.CHECK, machine)] == [Level.ERROR]
    assert [f.level for f in run(gpu_ecc.CHECK, make_machine())] == [Level.INFO]


def test_power(make_machine: Make, make_profile: Make, card: Row, second_card: Row, run: Make) -> None:
    cards = [card | {"power.limit": "350.00 W"}, second_card | {"persistence_mode": "Disabled"}]
    findings = run(gpu_power.CHECK, make_machine(cards=cards, profile=make_profile()))
    assert [finding.level for finding in findings] == [Level.WARN, Level.WARN]
    assert "the limit is 350 W, the profile's is 250 W" in findings[0].summary
    assert "100 to 390 W" in findings[0].evidence[0]
    assert "persistence mode is off" in findings[1].summary
    findings = run(gpu_power.CHECK, make_machine(cards=[card]))
    assert [finding.level for finding in findings] == [Level.INFO]


def test_processes(make_machine: Make, card: Row, run: Make) -> None:
    row = ", ".join(card.values())
    script = f"""\
        case "$*" in
          *query-gpu*) echo '{row}' ;;
          *) echo '{card["uuid"]}, 4242, [N/A], /usr/bin/python3' ;;
        esac
        """
    (finding,) = run(gpu_processes.CHECK, make_machine(cards=[], tools={"nvidia-smi": script}))
    assert finding.level is Level.WARN
    assert "pid 4242, /usr/bin/python3, memory unknown" in finding.evidence[0]
    script = f"""case "$*" in *query-gpu*) echo '{row}' ;; *) exit 6 ;; esac"""
    (finding,) = run(gpu_processes.CHECK, make_machine(cards=[], tools={"nvidia-smi": script}))
    assert finding.level is Level.UNKNOWN


def test_xid(make_machine: Make, run: Make) -> None:
    refused = {"dmesg": "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1", "journalctl": "exit 1"}
    (finding,) = run(gpu_xid.CHECK, make_machine(tools=refused))
    assert finding.level is Level.UNKNOWN
    log = "2026-11-30T10:00:00 kernel: NVRM: Xid (PCI:0000:21:00): 31, pid=4242, name=python3, MMU Fault: ENGINE GRAPHICS"
    (finding,) = run(gpu_xid.CHECK, make_machine(tools={"dmesg": f"echo '{log}'"}))
    assert finding.level is Level.WARN
    assert "Xid 31" in finding.summary
    assert "4242" not in finding.evidence[0]
    (finding,) = run(gpu_xid.CHECK, make_machine(tools={"dmesg": "echo all quiet"}))
    assert finding.level is Level.OK


def test_a_module_that_changes_rates(make_machine: Make, run: Make) -> None:
    files = {"/proc/modules": "gpu_unlock 16384 0 - Live 0x0 (OE)\nnvidia 14381056 1 nvidia_uvm, Live 0x0 (OE)\n"}
    findings = run(gpu_module.CHECK, make_machine(files=files, tools={"modinfo": "echo NVIDIA"}))
    assert [finding.level for finding in findings] == [Level.INFO, Level.OK]
    assert "`gpu_unlock` is loaded" in findings[0].summary
