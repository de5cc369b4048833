"""A plan that cannot fit is refused with the term that breaks it and the nearest setting that fits."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from sparsekv.profiles.fit import host_memory_problem
from sparsekv.profiles.loader import LoadedProfile, ProfileError, load_profile

Load = Callable[..., LoadedProfile]
Problems = Callable[..., list[tuple[str, str, str]]]

HYBRID = ["speculation.method=mtp", "speculation.tokens=3", "recurrent.state_dtype=float16"]


@pytest.mark.parametrize(
    ("settings", "field", "broken_by", "remedy"),
    [
        (["kv.pool=96GiB"], "kv.pool", "rows", "kv.pool"),
        (["hardware.ram=32GiB"], "kv.pool", "rows", "kv.pool"),
        (["kv.hot=16GiB"], "kv.hot", "hot set", "kv.hot"),
        (["scheduler.max_num_seqs=64", *HYBRID], "scheduler.max_num_seqs", "recurrent states", "scheduler.max_num_seqs"),
        (["hardware.vram=17GiB", "kv.hot=16MiB", *HYBRID], "scheduler.max_num_seqs", "recurrent states", "scheduler.max_num_seqs"),
        (["hardware.ram=512GiB", "kv.pool=400GiB"], "kv.pool", "sketch", "kv.pool"),
        (["kv.placement=gpu", "kv.hot="], "kv.pool", "rows", "kv.pool"),
    ],
)
def test_the_nearest_setting_fits_and_the_next_one_does_not(
    problems: Problems, load: Load, valid: str, settings: list[str], field: str, broken_by: str, remedy: str
) -> None:
    [(_, found_field, message)] = problems(valid, *settings)
    assert found_field == field
    assert f"; {broken_by} (" in message
    suggestion = re.search(r"nearest that fits: (\S+): (\S+)$", message)
    assert suggestion is not None, message
    assert suggestion[1] == remedy
    load(valid, *settings, f"{suggestion[1]}={suggestion[2]}")
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", suggestion[2]).groups()  # type: ignore[union-attr]
    beyond = {"GiB": f"{float(number) * 2 if remedy == 'kv.hot' else float(number) * 1.02}GiB", "MiB": f"{float(number) * 1.02}MiB"}
    problems(valid, *settings, f"{remedy}={beyond.get(unit, int(number) + 1)}")


def test_the_message_has_the_whole_sum(problems: Problems, valid: str) -> None:
    [(place, _, message)] = problems(valid, "kv.pool=96GiB")
    assert place == "--set kv.pool"
    assert message == (
        "headroom 4.00 GiB + rows 96.00 GiB = 100.00 GiB, but hardware.ram is 96.00 GiB; "
        "rows (24,576 blocks x 128 tokens x 4 KV heads x 16 layers x 512 B of int8) breaks it; nearest that fits: kv.pool: 92GiB"
    )


def test_what_nothing_helps(problems: Problems, valid: str) -> None:
    [(_, field, message)] = problems(valid, "hardware.vram=8GiB")
    assert field == "memory.activations"
    assert message.endswith("no single setting makes it fit")


def test_one_request_of_the_greatest_length_must_fit(problems: Problems, load: Load, valid: str) -> None:
    [(_, field, message)] = problems(valid, "kv.pool=4GiB")
    assert (field, message) == (
        "kv.pool",
        "holds 130,944 tokens, one request may have 262,144; nearest that fits: kv.pool: 8208MiB, or model.max_model_len: 130944",
    )
    load(valid, "kv.pool=8208MiB")
    load(valid, "kv.pool=4GiB", "model.max_model_len=130944")


def test_fewer_state_slots_than_requests(problems: Problems, load: Load, valid: str) -> None:
    [(_, field, message)] = problems(valid, *HYBRID, "memory.device_pool=1GiB")
    assert field == "memory.device_pool"
    assert "the recurrent states of 4 requests (6 x 39.0 MiB each), scheduler.max_num_seqs is 8" in message
    assert message.endswith("nearest that fits: memory.device_pool: 1888MiB, or scheduler.max_num_seqs: 4")
    load(valid, *HYBRID, "memory.device_pool=1888MiB")
    load(valid, *HYBRID, "memory.device_pool=1GiB", "scheduler.max_num_seqs=4")


def test_memory_that_is_free_now() -> None:
    profile = load_profile("cpu-demo").profile
    assert profile.model.shape is not None
    assert host_memory_problem(profile, profile.model.shape, 8 * 2**30, "MemAvailable") is None
    message = host_memory_problem(profile, profile.model.shape, 2**30, "MemAvailable")
    assert message is not None
    assert message.endswith("of host memory, but 1.00 GiB is free (MemAvailable)")


def test_a_profile_for_a_smaller_machine_is_refused_by_its_file() -> None:
    with pytest.raises(ProfileError, match=r"hardware\.ram is 64\.00 GiB"):
        load_profile("dual3090", ["hardware.ram=64GiB"])
