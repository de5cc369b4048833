"""What a user may be told: one exception type for every folder, and the exit codes of the command line."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit status of every `sparsekv` command except `serve`, which ends with vLLM's own once vLLM runs."""

    DONE = 0
    FAILED = 1
    """A gate failed: recall under its floor, an error found by doctor, a regression over its threshold."""
    USAGE = 2
    """The command line, a profile or a file that it names is wrong."""
    ENVIRONMENT = 3
    """This machine cannot do it: no GPU, another vLLM, too little memory."""
    INTERNAL = 70
    """A bug of sparsekv itself (EX_SOFTWARE)."""
    INTERRUPTED = 130


class SparsekvError(Exception):
    """A mistake or a limit that the user can act on; the command line shows it without a traceback.

    Args:
        message: what is wrong and where, one sentence without a full stop.
        hint: the next thing to do, a command to paste where possible.
        details: one line for each of several problems.
        exit_code: what the command line exits with.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, details: tuple[str, ...] = (), exit_code: ExitCode = ExitCode.USAGE
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details
        self.exit_code = exit_code

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  {line}" for line in self.details)])
