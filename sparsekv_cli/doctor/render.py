"""The report as text: one line per area, and every finding that somebody should know of in full."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from .check import Level
from .report import CheckReport, Report

SIGNS = {
    Level.SKIP: "- skip",
    Level.OK: "✓ ok",
    Level.INFO: "✓ ok",
    Level.UNKNOWN: "? unknown",
    Level.WARN: "! warning",
    Level.ERROR: "✗ error",
}
_WIDTH = max(map(len, SIGNS.values()))


def render(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """Lines of text. Areas first; then findings from warning up, or all of them where `verbose`; the verdict last."""
    for area, checks in groupby(report.checks, key=lambda check: check.area):
        group = list(checks)
        worst = max((check.worst for check in group), key=list(Level).index)
        yield f"{SIGNS[worst]:<{_WIDTH}}  {area}: {_headline(group, worst)}"
        for check in group:
            for finding in check.findings:
                if not verbose and finding.level not in (Level.WARN, Level.ERROR, Level.UNKNOWN):
                    continue
                yield f"  {SIGNS[finding.level]:<{_WIDTH}}  {check.id}: {finding.summary}"
                if verbose or finding.level in (Level.WARN, Level.ERROR):
                    yield from (f"      {line}" for line in finding.evidence)
                    if finding.cause:
                        yield f"      likely cause: {finding.cause}"
                if finding.remedy:
                    yield f"      → {finding.remedy}"
    yield ""
    yield _verdict(report)


def _headline(checks: list[CheckReport], worst: Level) -> str:
    """What is well, in a few words; the rest is listed below it."""
    if worst is Level.SKIP:
        return checks[0].findings[0].summary
    good = [finding.summary for check in checks for finding in check.findings if finding.level is Level.OK]
    return "; ".join(good[:2]) if good else "see below"


def _verdict(report: Report) -> str:
    counts = [
        f"{report.counts[level]} {word}{'s' if report.counts[level] != 1 and word != 'unknown' else ''}"
        for level, word in ((Level.ERROR, "error"), (Level.WARN, "warning"), (Level.UNKNOWN, "unknown"))
        if report.counts[level]
    ]
    subject = "the server is well" if report.url else "ready to serve"
    if report.verdict == "not ready":
        return f"not {'well' if report.url else 'ready'}: {', '.join(counts)}"
    return f"{subject}: {', '.join(counts)}" if counts else subject
