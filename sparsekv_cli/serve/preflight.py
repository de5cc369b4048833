"""What must be in order before a server starts: those of doctor's checks that decide it, and nothing that measures."""

from __future__ import annotations

from collections.abc import Callable

from sparsekv.profiles.errors import ExitCode, SparsekvError

from ..doctor.check import Check, Finding, Level
from ..doctor.checks import (
    gpu_driver,
    gpu_memory,
    gpu_mig,
    gpu_model,
    memory_available,
    model_basis,
    model_code,
    model_files,
    model_parsers,
    model_shape,
    model_tokenizer,
    pcie_p2p,
    server_exposure,
    server_port,
    software_environment,
    software_options,
    software_plugin,
    software_versions,
)
from ..doctor.machine import Machine
from ..doctor.runner import Result, run_checks

# What the user wrote or named, before what this machine is; quick ones first.
_CONFIGURATION = (model_files, model_shape, model_tokenizer, model_code, model_basis, server_exposure)
_ENVIRONMENT = (
    software_versions,
    software_plugin,
    software_environment,
    gpu_driver,
    gpu_model,
    gpu_memory,
    gpu_mig,
    pcie_p2p,
    memory_available,
    server_port,
)
_LAUNCH = (model_parsers, software_options)
"""Of the launch against the installed vLLM; asked only when that is one that sparsekv works with."""


def preflight(machine: Machine, warn: Callable[[str], None], detail: Callable[[str], None]) -> None:
    """Runs the checks; `warn` and `detail` get what does not stand in the way.

    Raises:
        SparsekvError: with everything that does. The exit code is `ENVIRONMENT` where it is this machine that cannot do it.
    """
    for modules, code in ((_CONFIGURATION, ExitCode.USAGE), (_ENVIRONMENT, ExitCode.ENVIRONMENT), (_LAUNCH, ExitCode.USAGE)):
        results = run_checks([module.CHECK for module in modules], machine, lambda check: detail(f"checking {check.measures}"))
        _report(results, warn, detail)
        if problems := [(result.check, finding) for result in results for finding in result.findings if finding.level is Level.ERROR]:
            raise _refusal(problems, code)


def _report(results: list[Result], warn: Callable[[str], None], detail: Callable[[str], None]) -> None:
    for result in results:
        for finding in result.findings:
            if finding.level in (Level.WARN, Level.UNKNOWN):
                warn(f"{finding.summary} ({result.check.id})" + (f"; {finding.remedy}" if finding.remedy else ""))
            elif finding.level in (Level.OK, Level.INFO):
                detail(f"{result.check.id}: {finding.summary}")


def _refusal(problems: list[tuple[Check, Finding]], code: ExitCode) -> SparsekvError:
    hint = next((finding.remedy for _, finding in problems if finding.remedy), None)
    if len(problems) == 1:
        [(_, finding)] = problems
        cause = (f"likely cause: {finding.cause}",) if finding.cause else ()
        return SparsekvError(finding.summary, details=(*finding.evidence, *cause), hint=hint, exit_code=code)
    details = []
    for check, finding in problems:
        details.append(f"{check.id}: {finding.summary}")
        details += [f"  {line}" for line in finding.evidence]
    return SparsekvError(f"the server cannot start: {len(problems)} problems", details=tuple(details), hint=hint, exit_code=code)
