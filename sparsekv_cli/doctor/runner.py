"""Running the checks, each within its time, whatever it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sparsekv.profiles.errors import SparsekvError

from .check import Check, Finding, Level, error, unknown
from .machine import Machine


@dataclass(frozen=True)
class Result:
    """A check and what it found; `seconds` is how long it took."""

    check: Check
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def worst(self) -> Level:
        order = list(Level)
        return max((finding.level for finding in self.findings), key=order.index)


def run_checks(checks: Iterable[Check], machine: Machine, progress: Callable[[Check], None] = lambda check: None) -> list[Result]:
    """Runs the checks one after the other: some of them measure, and would disturb each other."""
    results = []
    for check in checks:
        progress(check)
        results.append(_run(check, machine))
    return results


def _run(check: Check, machine: Machine) -> Result:
    found: list[Finding] = []

    def work() -> None:
        try:
            found.extend(check.run(machine))
        except SparsekvError as problem:
            found.append(error(problem.message, *problem.details, remedy=problem.hint or ""))
        except Exception as bug:
            found.append(unknown(f"the check failed: {type(bug).__name__}: {bug}", cause="an error in sparsekv; please report it"))

    started = time.monotonic()
    # A thread, not a process: checks share what they learn. One that hangs is left behind and dies with the program.
    thread = threading.Thread(target=work, name=check.id, daemon=True)
    thread.start()
    thread.join(check.limit_s)
    seconds = time.monotonic() - started
    findings = tuple(found)
    if thread.is_alive():
        findings += (unknown(f"no answer within {check.limit_s:g} s"),)
    elif not findings:
        findings = (unknown("the check said nothing", cause="an error in sparsekv; please report it"),)
    return Result(check, findings, seconds)
