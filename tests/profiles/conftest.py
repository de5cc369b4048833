"""A small valid profile to break in one place at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsekv.profiles.loader import LoadedProfile, ProfileError, load_profile

VALID = """\
description: a machine for tests
hardware:
  gpu: GeForce RTX 3090
  gpus: 2
  vram: 23.6GiB
  compute_capability: '8.6'
  ram: 96GiB
model:
  path: models/tiny
  name: tiny
  max_model_len: 262144
  weights: 14.3GiB
  shape:
    attention_layers: 16
    draft_layers: 1
    query_heads: 24
    kv_heads: 4
    head_dim: 256
    recurrent_layers: 48
    recurrent_state: 147MiB
parallel:
  tensor: 2
kv:
  dtype: int8
  pool: 69GiB
  hot: 2GiB
sketch:
  basis: smollm2-135m-instruct
"""

Write = Callable[..., Path]
Problems = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def valid() -> str:
    return VALID


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a profile's file; by default the valid one."""

    def write_profile(text: str = VALID, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_profile


@pytest.fixture
def load(write: Write) -> Callable[..., LoadedProfile]:
    def load_text(text: str = VALID, *overrides: str) -> LoadedProfile:
        return load_profile(str(write(text)), overrides)

    return load_text


@pytest.fixture
def problems(write: Write) -> Problems:
    """What is wrong with a text: (`line:column`, field, message) of each problem; for an override the place is the option."""

    def find(text: str = VALID, *overrides: str) -> list[tuple[str, str, str]]:
        path = write(text)
        with pytest.raises(ProfileError) as caught:
            load_profile(str(path), overrides)
        return [(str(p.origin).removeprefix(f"{path}:"), p.field, p.message) for p in caught.value.problems]

    return find
