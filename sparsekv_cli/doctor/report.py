"""The report: one object for `--json`, which is also what to attach to a bug report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sparsekv.profiles.errors import ExitCode

from .check import Level
from .machine import Machine
from .redact import Redactor
from .runner import Result


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FindingReport(_Model):
    level: Level
    summary: str
    evidence: list[str]
    cause: str = Field(description="likely cause; empty if there is nothing to explain")
    remedy: str = Field(description="what to do, a command to paste where there is one")


class CheckReport(_Model):
    id: str
    area: str
    measures: str
    seconds: float
    worst: Level
    findings: list[FindingReport]


class CardReport(_Model):
    """A card as the driver states it and as it was measured; rates in bytes per second, null where not known."""

    index: int | None
    uuid: str
    name: str
    bus_id: str
    driver: str | None
    compute_capability: str | None
    memory_bytes: int | None
    power_limit_watts: float | None
    link_generation: int | None = Field(description="under load")
    link_width: int | None = Field(description="under load")
    copy_rate: float | None
    gather_rates: dict[int, float] = Field(description="by row size in bytes")


class Report(_Model):
    """What `sparsekv doctor --json` prints."""

    schema_version: Literal[1] = 1
    sparsekv: str
    profile: str | None
    url: str | None
    verdict: Literal["ready", "not ready"]
    exit_code: int
    counts: dict[Level, int]
    cards: list[CardReport]
    checks: list[CheckReport]


def build_report(results: Iterable[Result], machine: Machine, version: str, redactor: Redactor | None) -> Report:
    """Puts results and facts together, redacted unless `redactor` is None."""
    results = list(results)
    counts = Counter(finding.level for result in results for finding in result.findings)
    failed = counts[Level.ERROR] > 0
    document: dict[str, Any] = {
        "sparsekv": version,
        "profile": machine.loaded.name if machine.loaded else None,
        "url": machine.url or None,
        "verdict": "not ready" if failed else "ready",
        "exit_code": int(ExitCode.FAILED if failed else ExitCode.DONE),
        "counts": {level: counts[level] for level in Level},
        "cards": _cards(machine) if not machine.url else [],
        "checks": [
            {
                "id": result.check.id,
                "area": result.check.area,
                "measures": result.check.measures,
                "seconds": round(result.seconds, 3),
                "worst": result.worst,
                "findings": [
                    {
                        "level": finding.level,
                        "summary": finding.summary,
                        "evidence": [line for line in finding.evidence if line],
                        "cause": finding.cause,
                        "remedy": finding.remedy,
                    }
                    for finding in result.findings
                ],
            }
            for result in results
        ],
    }
    return Report.model_validate(redactor.tree(document) if redactor else document)


def _cards(machine: Machine) -> list[dict[str, Any]]:
    cards = []
    for gpu in machine.gpu_list.gpus if machine.needs_gpu else ():
        probed = machine.__dict__["probe"].cards.get(gpu.uuid) if "probe" in machine.__dict__ else None
        cards.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "bus_id": gpu.bus_id,
                "driver": gpu.driver,
                "compute_capability": gpu.capability,
                "memory_bytes": gpu.memory_total,
                "power_limit_watts": gpu.power_limit,
                "link_generation": probed.link_gen if probed else None,
                "link_width": probed.link_width if probed else None,
                "copy_rate": probed.copy_rate if probed else None,
                "gather_rates": (probed.gather_rates or {}) if probed else {},
            }
        )
    return cards
