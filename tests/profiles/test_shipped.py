"""Every profile that ships: complete, honest about its figures, and loaded the same when written out."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from sparsekv.profiles.figures import decode_limits
from sparsekv.profiles.loader import LoadedProfile, load_profile, shipped_names
from sparsekv.profiles.resolved import resolved_text, values
from sparsekv.profiles.statement import statement


@pytest.fixture(params=shipped_names())
def shipped(request: pytest.FixtureRequest) -> LoadedProfile:
    return load_profile(request.param)


def test_the_machines() -> None:
    dual3090 = ["dual3090", "dual3090-128gb", "dual3090-128gb-int4", "dual3090-int4"]
    others = ["cpu-demo", "dual4090", "dual5060ti16", "h200", "rtxpro6000", "single3090", "single5090"]
    assert set(shipped_names()) >= {*dual3090, *others}


def test_the_head_says_what_to_do(shipped: LoadedProfile) -> None:
    text = (resources.files("sparsekv.profiles") / f"{shipped.name}.yaml").read_text()
    head = text[: text.index("\ndescription:")]
    assert f"\n# {shipped.name}: " in head
    for label in ("Run first:", "Launch:     sparsekv serve --profile " + shipped.name, "Expect:"):
        assert f"# {label}" in head
    expected = shipped.profile.expected
    if expected is not None:
        assert ("Computed, not measured" in head) == (expected.source == "computed")
        assert ("Measured" in head) == (expected.source == "measured")


def test_the_change_it_suggests_works(shipped: LoadedProfile) -> None:
    text = (resources.files("sparsekv.profiles") / f"{shipped.name}.yaml").read_text()
    [change] = re.findall(rf"^# Change:     sparsekv serve --profile {shipped.name}((?: --set \S+)+)$", text, re.MULTILINE)
    assert load_profile(shipped.name, change.split()[1::2]).profile != shipped.profile


def test_it_is_complete(shipped: LoadedProfile) -> None:
    profile = shipped.profile
    assert profile.model.shape is not None
    assert profile.model.weights
    assert profile.hardware.ram
    assert profile.server.host == "127.0.0.1"
    assert statement(shipped)


def test_a_computed_band_is_what_the_arithmetic_gives(shipped: LoadedProfile) -> None:
    profile, shape, expected = shipped.profile, shipped.profile.model.shape, shipped.profile.expected
    if expected is None or expected.source != "computed":
        return
    assert shape is not None
    assert expected.decode_tokens_per_second == pytest.approx(decode_limits(profile, shape), rel=0.01)
    low, high = expected.decode_tokens_per_second or (0, 0)
    text = (resources.files("sparsekv.profiles") / f"{shipped.name}.yaml").read_text()
    assert f"# Expect:     {f'{low:g}-{high:g}' if low < high else f'up to {low:g}'} tok/s" in text


def test_written_out_it_is_the_same(shipped: LoadedProfile, tmp_path: Path) -> None:
    path = tmp_path / f"{shipped.name}.yaml"
    path.write_text(resolved_text(shipped, origins=True))
    again = load_profile(str(path))
    assert again.profile == shipped.profile
    assert "extends" not in path.read_text()
    assert {value.origin for value in values(shipped)} <= {"default", *map(str, shipped.origins.values())}
