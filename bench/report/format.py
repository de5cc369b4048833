"""Numbers as people read them."""

from __future__ import annotations

from typing import Any

_BYTES = ("B", "kB", "MB", "GB", "TB")


def number(value: float | None, unit: str = "", digits: int = 1) -> str:
    """With its unit; an absent value is a dash."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.{digits}f} %"
    if unit == "s":
        return seconds(value)
    if unit in ("B", "B/s", "B/tok"):
        return bytes_(value) + unit[1:]
    text = f"{value:,.{digits}f}"
    return f"{text} {unit}" if unit else text


def seconds(value: float) -> str:
    """ms under a second, s to two minutes, then minutes."""
    if value < 0.1:
        return f"{value * 1e3:.2f} ms"
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.2f} s"
    return f"{value / 60:.1f} min"


def bytes_(value: float) -> str:
    for unit in _BYTES:
        if abs(value) < 1000 or unit == _BYTES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def tokens(value: float) -> str:
    return f"{value / 1000:.1f}K" if value >= 1000 else f"{value:.0f}"


def statistic(value: Any, name: str = "p50") -> float | None:
    """One number of a metric: itself, or a statistic of a distribution."""
    return value.get(name) if isinstance(value, dict) else value
