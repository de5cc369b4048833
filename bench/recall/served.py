"""A server that a recall run starts for one arm and stops again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparsekv.profiles.errors import ExitCode, SparsekvError

BOOT_SECONDS = 900.0
STOP_SECONDS = 30.0


@contextlib.contextmanager
def served(profile: str, settings: Sequence[str], log: Path) -> Iterator[str]:
    """`sparsekv serve` on a free local port; yields its address once it is healthy. Its output goes to `log`.

    Raises:
        SparsekvError: it ended before it was ready, or took longer than `BOOT_SECONDS`.
    """
    port = _free_port()
    command = [sys.executable, "-c", "from sparsekv_cli.app import main; main()", "serve", "--profile", profile]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for setting in settings:
        command += ["--set", setting]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: vLLM's worker processes are stopped with it, whatever becomes of their parent.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        yield url
    finally:
        _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise _no_server(f"ended with status {process.returncode} before it was ready", log)
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url + "/health", timeout=5):
            return
        time.sleep(0.5)
    raise _no_server(f"was not ready after {BOOT_SECONDS:.0f} s", log)


def _no_server(what: str, log: Path) -> SparsekvError:
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-3:]
    return SparsekvError(
        f"`sparsekv serve` {what}", details=tuple(last), hint=f"its output is in {log}", exit_code=ExitCode.ENVIRONMENT
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
