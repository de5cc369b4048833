"""Every kernel compiles for the cards it is meant for, within the shared memory of consumer cards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ops.py")


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile(arch: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    bad = [line for line in done.stdout.splitlines() if "FAILED" in line or "TOO MUCH" in line]
    assert done.returncode == 0, "\n".join(bad) or done.stderr
