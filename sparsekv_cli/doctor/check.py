"""What a check is and what it may find."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .machine import Machine


class Level(enum.StrEnum):
    """How a finding counts, from least to most. Only `error` makes the machine unfit, and only `ok` says that something is well."""

    SKIP = "skip"
    """Does not apply here."""
    OK = "ok"
    INFO = "info"
    UNKNOWN = "unknown"
    """Could not be found out, which is not the same as being well."""
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing that a check found: what is the case, what shows it, what is the likely cause, and what to do.

    `remedy` is a command to paste where there is one.
    """

    level: Level
    summary: str
    evidence: tuple[str, ...] = ()
    cause: str = ""
    remedy: str = ""


Findings = Iterable[Finding]


@dataclass(frozen=True)
class Check:
    """A file of `checks/` holds one of these.

    `run` yields what it finds, at least one finding. Whatever it raises, and silence past `limit_s`, becomes `unknown`.
    """

    id: str
    area: str
    measures: str
    run: Callable[[Machine], Findings]
    limit_s: float = 10.0


def ok(summary: str, *evidence: str) -> Finding:
    return Finding(Level.OK, summary, evidence)


def info(summary: str, *evidence: str, remedy: str = "") -> Finding:
    return Finding(Level.INFO, summary, evidence, remedy=remedy)


def skip(summary: str) -> Finding:
    return Finding(Level.SKIP, summary)


def unknown(summary: str, *evidence: str, cause: str = "", remedy: str = "") -> Finding:
    return Finding(Level.UNKNOWN, summary, evidence, cause, remedy)


def warn(summary: str, *evidence: str, cause: str = "", remedy: str = "") -> Finding:
    return Finding(Level.WARN, summary, evidence, cause, remedy)


def error(summary: str, *evidence: str, cause: str = "", remedy: str = "") -> Finding:
    return Finding(Level.ERROR, summary, evidence, cause, remedy)
