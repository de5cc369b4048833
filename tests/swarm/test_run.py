"""A run as a process: killed, interrupted, on a terminal, two at once, and without a server."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsekv.bench.metrics import load
from sparsekv.bench.report import folder as folder_module
from sparsekv.bench.report.folder import RunFolder
from sparsekv.bench.report.write import write_report
from sparsekv.bench.swarm.options import Plan, PromptForm, SwarmOptions, Ui
from sparsekv.bench.swarm.run import Request, run_swarm
from sparsekv.bench.swarm.sampler import COLUMNS
from sparsekv.bench.swarm.server import api_key, base_url
from sparsekv.profiles.errors import SparsekvError

PATIENCE = 120.0
"""For a process on a busy machine; nothing here is measured."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A fake server in a process of its own."""
    command = [sys.executable, "-m", "sparsekv.bench.fake_server", "--port", "0", "--ttft-ms", "5", "--itl-ms", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.kill()
    process.wait()


def command(server: str, repo: Path, out: Path, *more: str) -> list[str]:
    swarm = ["bench", "swarm", "--url", server, "--repo", str(repo), "--out", str(out), "--agents", "2", "--context", "1024"]
    short = ["--read-tokens", "512", "--fill-answer-tokens", "2", "--turns", "1", "--answer-tokens", "4", "--ramp", "0"]
    load = [*short, "--plan", "scripted", "--decode-seconds", "600"]
    return [sys.executable, "-c", "from sparsekv_cli.app import main; main()", *swarm, *load, *more]


def wait_for(condition: Any) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not come")


def decoding(out: Path) -> Path | None:
    """The folder of the run, once its agents decode."""
    for path in out.glob("*/run.json"):
        phases = {p["name"]: p for p in json.loads(path.read_text())["phases"]}
        if phases.get("decode", {}).get("window_start"):
            return path.parent
    return None


def test_a_killed_run_can_be_read(server: str, code_base: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle: the folder has a report already, and a new one can be made from what it holds."""
    process = subprocess.Popen(command(server, code_base, tmp_path, "--ui", "none"), start_new_session=True)
    folder = wait_for(lambda: decoding(tmp_path))
    wait_for(lambda: len((folder / "timeseries.csv").read_text().splitlines()) > 4)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    names = {"summary.json", "report.md", "report.html", "requests.jsonl", "timeseries.csv", "server_metrics.jsonl", "command.sh"}
    assert names | {"trace.mooncake.jsonl", "profile.resolved.yaml", "environment.json", "run.json"} <= {p.name for p in folder.iterdir()}
    partial = json.loads((folder / "summary.json").read_text())
    assert partial["state"] == "running"
    with (folder / "requests.jsonl").open("a") as file:
        file.write('{"agent": 0, "tu')  # cut in the middle of a line
    summary = write_report(folder)
    assert not summary["verdict"]["valid"]
    assert summary["verdict"]["reasons"][0] == {"code": "running", "text": "the run is not over, or was killed"}
    assert {"fill", "warm"} <= {w["name"] for w in summary["windows"]}
    assert "INVALID" in (folder / "report.md").read_text()
    assert len(load(folder).requests) >= 6


def test_an_interrupted_run_ends_in_good_order(server: str, code_base: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(command(server, code_base, tmp_path, "--ui", "simple"), stdout=subprocess.PIPE, text=True)
    folder = wait_for(lambda: decoding(tmp_path))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "INVALID" in out
    assert "the run was interrupted" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["state"] == "interrupted"
    assert [r.status for r in load(folder).requests][-2:] == ["stopped", "stopped"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_terminal_is_given_back(server: str, code_base: Path, tmp_path: Path, end: signal.Signals) -> None:
    """Whatever ends the run, the cursor is shown again and the last frame stays."""
    master, slave = pty.openpty()
    before = subprocess.run(["stty", "-g"], stdin=slave, capture_output=True, check=True).stdout
    process = subprocess.Popen(
        command(server, code_base, tmp_path, "--ui", "live"),
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"},
    )  # fmt: skip
    seen = bytearray()

    def read() -> None:
        while select.select([master], [], [], 0.05)[0]:
            try:
                seen.extend(os.read(master, 65536))
            except OSError:
                return

    def drawn() -> bool:
        read()
        return decoding(tmp_path) is not None and b"tok/s" in seen

    wait_for(drawn)
    assert b"\x1b[?25l" in seen
    process.send_signal(end)

    def restored() -> bool:
        read()
        return process.poll() is not None and seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")

    wait_for(restored)
    assert subprocess.run(["stty", "-g"], stdin=slave, capture_output=True, check=True).stdout == before
    os.close(slave)
    os.close(master)


def test_secrets_stay_out(server: str, code_base: Path, tmp_path: Path) -> None:
    """H4: neither the key nor other variables are in the report, on the screen or in the list of processes."""
    canary = "key-canary-7351"
    keyfile = tmp_path / "key"
    keyfile.write_text(canary)
    process = subprocess.Popen(
        command(server, code_base, tmp_path / "runs", "--api-key-file", str(keyfile), "--ui", "simple", "--profile", "cpu-demo"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"SPARSEKV_API_KEY": canary, "HF_TOKEN": canary},
    )  # fmt: skip
    folder = wait_for(lambda: decoding(tmp_path / "runs"))
    assert canary not in Path(f"/proc/{process.pid}/cmdline").read_text()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert canary not in out
    for file in folder.iterdir():
        assert canary not in file.read_text()
    assert "smollm2-135m" in (folder / "profile.resolved.yaml").read_text()


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path, "model-8x1024", COLUMNS) for _ in range(3)]
    assert len({f.path for f in folders}) == 3
    for folder in folders:
        folder.close()


def test_a_full_disk_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(SparsekvError, match="MiB free"):
        RunFolder.create(tmp_path, "x", COLUMNS)


def test_a_disk_that_fills_up_ends_the_run(server: str, code_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RunFolder, name: str, line: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "append", full)
    options = SwarmOptions(url=server, repo=code_base, agents=1, context=1024, plan=Plan.SCRIPTED)
    with pytest.raises(SparsekvError, match="can no longer be written: No space left"):
        run_swarm(options, Request(tmp_path, Ui.NONE))


def test_no_server(code_base: Path, tmp_path: Path) -> None:
    with pytest.raises(SparsekvError, match="no server answers") as caught:
        run_swarm(SwarmOptions(url="http://127.0.0.1:9", repo=code_base), Request(tmp_path, Ui.NONE))
    assert caught.value.exit_code == 3
    assert not list(tmp_path.iterdir())


def test_a_context_that_the_server_does_not_have(server: str, code_base: Path, tmp_path: Path) -> None:
    with pytest.raises(SparsekvError, match="the longest turn needs 1001408 tokens, but the server's context is 262144"):
        run_swarm(SwarmOptions(url=server, repo=code_base, context=1_000_000), Request(tmp_path, Ui.NONE))
    with pytest.raises(SparsekvError, match="does not serve 'gpt'; it has fake"):
        run_swarm(SwarmOptions(url=server, repo=code_base, model="gpt"), Request(tmp_path, Ui.NONE))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agents": 0}, "--agents 0"),
        ({"context": 100}, "--context 100"),
        ({"turns": 0, "decode_seconds": 0}, "measures nothing"),
        ({"intruder_tokens": 9, "decode_seconds": 0}, "--intruder-tokens needs --decode-seconds"),
        ({"recall_floor": 0.5}, "--recall-floor needs --check-recall"),
        ({"check_recall": True, "turns": 0}, "at least --turns 1"),
        ({"check_recall": True, "prompt": PromptForm.TOKENS}, "without a tokenizer"),
        ({"answer_tokens": 0}, "answers have at least 1 token"),
        ({"ramp_seconds": -1}, "times are not negative"),
    ],
)
def test_options_that_cannot_be_run(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SparsekvError) as caught:
        SwarmOptions(url="http://x", repo=Path(), **changes)
    assert says in str(caught.value)


def test_several_problems_are_named_at_once() -> None:
    with pytest.raises(SparsekvError) as caught:
        SwarmOptions(url="http://x", repo=Path(), agents=0, context=1, turns=-1)
    assert len(caught.value.details) == 3


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:1/v1/", "http://host:1"),
        ("https://host/api/v1", "https://host/api"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://user:secret@host", "http://host:port", "http://host/v1?key=secret"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(SparsekvError):
        base_url(url)


def test_keys(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(" from-file \n")
    assert api_key(tmp_path / "key", {}) == "from-file"
    assert api_key(tmp_path / "key", {"SPARSEKV_API_KEY": "from-environment"}) == "from-environment"
    assert api_key(None, {"SPARSEKV_API_KEY": " "}) is None
    with pytest.raises(SparsekvError, match="No such file"):
        api_key(tmp_path / "none", {})
