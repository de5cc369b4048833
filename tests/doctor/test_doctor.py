"""Running checks, the report, redaction, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from sparsekv.profiles.errors import SparsekvError
from sparsekv_cli.doctor.check import Check, Findings, Level, error, ok, unknown, warn
from sparsekv_cli.doctor.checks import LIVE, MACHINE
from sparsekv_cli.doctor.redact import Redactor
from sparsekv_cli.doctor.render import render
from sparsekv_cli.doctor.report import Report, build_report
from sparsekv_cli.doctor.runner import run_checks

Make = Callable[..., Any]


def check(*findings: Any, limit_s: float = 5.0, area: str = "Area") -> Check:
    return Check("test.check", area, "a test", lambda machine: iter(findings), limit_s)


def test_a_check_per_file_and_none_forgotten() -> None:
    folder = resources.files("sparsekv_cli.doctor.checks")
    files = {item.name.removesuffix(".py") for item in folder.iterdir() if item.name.endswith(".py")} - {"__init__"}
    names = [check.id.replace(".", "_").replace("-", "_") for check in (*MACHINE, *LIVE)]
    assert sorted(names) == sorted(files)
    assert all(check.measures and check.area and check.limit_s > 0 for check in (*MACHINE, *LIVE))


def test_what_goes_wrong_is_unknown(make_machine: Make) -> None:
    def hangs(machine: Any) -> Findings:
        yield ok("so far")
        time.sleep(30)

    def breaks(machine: Any) -> Findings:
        yield ok("so far")
        raise ZeroDivisionError("x")

    def refuses(machine: Any) -> Findings:
        yield ok("so far")
        raise SparsekvError("the record is damaged", hint="reinstall")

    machine = make_machine()
    (refused,) = run_checks([Check("d", "A", "", refuses)], machine)
    assert refused.findings[-1] == error("the record is damaged", remedy="reinstall")
    started = time.monotonic()
    slow, broken, silent = run_checks(
        [Check("a", "A", "", hangs, 0.3), Check("b", "A", "", breaks), Check("c", "A", "", lambda machine: ())], machine
    )
    assert time.monotonic() - started < 3
    assert [result.worst for result in (slow, broken, silent)] == [Level.UNKNOWN] * 3
    assert slow.findings[-1].summary == "no answer within 0.3 s"
    assert "ZeroDivisionError" in broken.findings[-1].summary


@pytest.mark.parametrize(
    ("findings", "code", "verdict"),
    [
        ([ok("fine")], 0, "ready to serve"),
        ([ok("fine"), warn("hm"), warn("hm")], 0, "ready to serve: 2 warnings"),
        ([unknown("hm")], 0, "ready to serve: 1 unknown"),
        ([error("bad"), warn("hm")], 1, "not ready: 1 error, 1 warning"),
    ],
)
def test_exit_status_by_severity(make_machine: Make, findings: list[Any], code: int, verdict: str) -> None:
    machine = make_machine()
    report = build_report(run_checks([check(*findings)], machine), machine, "0.1", None)
    assert report.exit_code == code
    assert list(render(report))[-1] == verdict


def test_text(make_machine: Make) -> None:
    machine = make_machine()
    bad = error("no room", "3 GiB free", cause="it is full", remedy="rm -i FILE")
    results = run_checks([check(ok("roomy", "9 GiB"), area="First"), check(bad, unknown("dark"), area="Second")], machine)
    report = build_report(results, machine, "0.1", None)
    assert list(render(report)) == [
        "✓ ok       First: roomy",
        "✗ error    Second: see below",
        "  ✗ error    test.check: no room",
        "      3 GiB free",
        "      likely cause: it is full",
        "      → rm -i FILE",
        "  ? unknown  test.check: dark",
        "",
        "not ready: 1 error, 1 unknown",
    ]
    assert "      9 GiB" in list(render(report, verbose=True))


def test_a_whole_machine_as_json(make_machine: Make, make_profile: Make) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    machine = make_machine(profile=make_profile())
    report = build_report(run_checks(MACHINE, machine), machine, "0.1", Redactor(machine.host.environ))
    document = json.loads(report.model_dump_json())
    jsonschema.validate(document, Report.model_json_schema(mode="serialization"))
    assert document["schema_version"] == 1
    assert [card["name"] for card in document["cards"]] == ["NVIDIA GeForce RTX 3090"] * 2
    assert document["cards"][0]["uuid"] == "GPU-1111…"
    assert len(document["checks"]) == len(MACHINE)
    # The model is not there: that alone makes this machine unfit, and a missing measurement is never `ok`.
    assert document["verdict"] == "not ready"
    by_id = {entry["id"]: entry for entry in document["checks"]}
    assert by_id["pcie.link"]["worst"] == "unknown"
    assert by_id["model.files"]["worst"] == "error"


def test_redaction() -> None:
    environ = {"HOME": "/home/alice", "HF_TOKEN": "hf_canary123", "MY_PASSWORD": "hunter22", "EMPTY_KEY": "", "PATH": "/usr/bin"}
    redactor = Redactor(environ, user="alice", host="alicebox")
    cases = {
        "/home/alice/models, not /home/alicia": "~/models, not /home/alicia",
        "on alicebox as alice": "on <host> as <user>",
        "with hf_canary123 and hunter22": "with <HF_TOKEN> and <MY_PASSWORD>",
        "at 192.168.1.20, 127.0.0.1, aa:bb:cc:dd:ee:ff": "at <address>, 127.0.0.1, <mac>",
        "GPU-0a1b2c3d-1111-2222-3333-444455556666 at 0000:21:00.0": "GPU-0a1b… at 0000:21:00.0",
        "driver 580.95.05, torch 2.13.0": "driver 580.95.05, torch 2.13.0",
    }
    for text, redacted in cases.items():
        assert redactor.text(text) == redacted
    assert redactor.tree({"a": ["/home/alice", 3, None]}) == {"a": ["~", 3, None]}
    assert Redactor({"HOME": "/root"}, user="dev", host="localhost").text("/dev/shm at localhost") == "/dev/shm at localhost"


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    import os

    run = [sys.executable, "-c", "from sparsekv_cli.app import main; main()", "doctor", *arguments]
    return subprocess.run(run, capture_output=True, text=True, timeout=120, env={**os.environ, **environ})


def test_command(tmp_path: Path) -> None:
    """On a machine without a GPU: named, exit status 1; no secret of the environment anywhere in the output."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    smi.chmod(0o755)
    secrets = {"HF_TOKEN": "hf_canary_0123", "SPARSEKV_API_KEY": "canary-key-0123456789"}
    run = command("--json", "--quick", PATH=f"{tmp_path}:/usr/bin:/bin", **secrets)
    document = json.loads(run.stdout)
    assert run.returncode == document["exit_code"] == 1
    driver = next(entry for entry in document["checks"] if entry["id"] == "gpu.driver")
    assert "differ in version" in driver["findings"][0]["summary"]
    text = command("--quick", "-v", PATH=f"{tmp_path}:/usr/bin:/bin", **secrets)
    assert text.returncode == 1
    assert "not ready:" in text.stdout
    assert "canary" not in run.stdout + run.stderr + text.stdout + text.stderr


def test_command_for_a_profile_without_a_gpu(tmp_path: Path) -> None:
    run = command("--profile", "cpu-demo", "--json", SPARSEKV_CACHE=str(tmp_path))
    document = json.loads(run.stdout)
    assert document["profile"] == "cpu-demo"
    gpu = [entry["worst"] for entry in document["checks"] if entry["area"] in ("GPUs", "PCIe")]
    assert set(gpu) == {"skip"}
    assert run.returncode == 1  # the model is not in that cache
    wrong = command("--profile", "cpu-demoo")
    assert wrong.returncode == 2
    assert wrong.stdout == ""


def test_schema_is_printed() -> None:
    run = command("--json-schema")
    assert json.loads(run.stdout) == Report.model_json_schema()


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from sparsekv_cli.app import app\n"
        "result = CliRunner().invoke(app, ['doctor', '--help']); assert result.exit_code == 0, result.output\n"
        "print([name for name in ('torch', 'vllm', 'prometheus_client', 'yaml') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stderr
