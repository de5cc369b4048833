"""Quantities with their unit written out. `64GiB` and `96GB` say what they are; `64G`, `64` and `64gb` are refused."""

from __future__ import annotations

import re

SIZE_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE_PATTERN = r"^\d+(\.\d+)?\s?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"
POWER_PATTERN = r"^\d+(\.\d+)?\s?W$"
RATE_PATTERN = r"^\d+(\.\d+)?\s?GB/s$"

_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s?([A-Za-z/]*)")
_AMBIGUOUS = {"k": "kB or KiB", "m": "MB or MiB", "g": "GB or GiB", "t": "TB or TiB"}


def parse_size(value: object) -> int:
    """`64GiB` -> bytes. Raises ValueError."""
    number, unit = _split(value, "64GiB")
    if unit not in SIZE_UNITS:
        likely = _AMBIGUOUS.get(unit[:1].lower())
        raise ValueError(f"unit `{unit}` is ambiguous; write {likely}" if likely else f"expected a size such as 64GiB, got `{value}`")
    return round(number * SIZE_UNITS[unit])


def parse_watts(value: object) -> float:
    """`250W` -> watts. Raises ValueError."""
    number, unit = _split(value, "250W")
    if unit != "W":
        raise ValueError(f"expected watts such as 250W, got `{value}`")
    return number


def parse_rate(value: object) -> float:
    """`12.5GB/s` -> bytes per second. Raises ValueError."""
    number, unit = _split(value, "12.5GB/s")
    if unit != "GB/s":
        raise ValueError(f"expected a rate such as 12.5GB/s, got `{value}`")
    return number * 1e9


def format_size(value: int) -> str:
    """In the largest unit of which `value` is a whole number of quarters; a size that was not written by hand, in bytes."""
    for unit in ("TiB", "GiB", "MiB", "TB", "GB", "MB", "KiB", "kB"):
        quarters, rest = divmod(value * 4, SIZE_UNITS[unit])
        if quarters >= 4 and not rest:
            return f"{quarters // 4}{('', '.25', '.5', '.75')[quarters % 4]}{unit}"
    return f"{value}B"


def gib(value: float) -> str:
    """For people: two decimals in GiB, whatever the locale."""
    return f"{value / 2**30:.2f} GiB"


def format_watts(value: float) -> str:
    return f"{value:g}W"


def format_rate(value: float) -> str:
    return f"{value / 1e9:g}GB/s"


def _split(value: object, example: str) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected a quantity such as {example}")
    match = _NUMBER_AND_UNIT.fullmatch(str(value))
    if not match:
        raise ValueError(f"expected a quantity such as {example}, got `{value}`")
    if not match[2]:
        raise ValueError(f"the unit is missing; write for example {example}")
    return float(match[1]), match[2]
