"""Quantities say their unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.profiles import units


@pytest.mark.parametrize(
    ("text", "value"),
    [("64GiB", 64 * 2**30), ("96GB", 96 * 10**9), ("1.5 MiB", 3 * 2**19), ("0B", 0), ("12kB", 12_000), ("2TiB", 2**41)],
)
def test_sizes(text: str, value: int) -> None:
    assert units.parse_size(text) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("64G", "unit `G` is ambiguous; write GB or GiB"),
        ("64gb", "unit `gb` is ambiguous; write GB or GiB"),
        ("1m", "unit `m` is ambiguous; write MB or MiB"),
        ("64", "the unit is missing; write for example 64GiB"),
        (64, "the unit is missing; write for example 64GiB"),
        ("1,5GiB", "expected a quantity such as 64GiB, got `1,5GiB`"),
        ("-1GiB", "expected a quantity such as 64GiB, got `-1GiB`"),
        ("infGiB", "expected a quantity such as 64GiB, got `infGiB`"),
        ("1e3MiB", "expected a quantity such as 64GiB, got `1e3MiB`"),
        ("250W", "expected a size such as 64GiB, got `250W`"),
        (True, "expected a quantity such as 64GiB"),
        ([1], "expected a quantity such as 64GiB"),
    ],
)
def test_refused_sizes(value: object, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(") + "$"):
        units.parse_size(value)


def test_watts_and_rates() -> None:
    assert units.parse_watts("230W") == units.parse_watts("230 W") == 230.0
    assert units.parse_rate("12.5GB/s") == 12.5e9
    for text in ("230", "350,00 W", "0.2kW", "[N/A]", ""):
        with pytest.raises(ValueError, match=r"expected|missing"):
            units.parse_watts(text)
    with pytest.raises(ValueError, match="expected a rate"):
        units.parse_rate("12Gb/s")


@given(st.integers(0, 2**50))
def test_a_written_size_reads_back(value: int) -> None:
    assert units.parse_size(units.format_size(value)) == value
