"""The slice of the resolved profile that the engine reads, alike in every process of one server."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from sparsekv.kernels.layout import RowFormat
from sparsekv.kernels.policy import SelectionPolicy
from sparsekv.profiles.errors import SparsekvError

from .checkpoints.index import RetentionPolicy
from .prefill_plan import SchedulerSettings

PROFILE_ENV = "SPARSEKV_PROFILE"
"""Path of a resolved profile (YAML or JSON). The plug-in is inert where it is not set."""

BLOCK_SIZE = 128
"""Tokens of one block of the host pool, and the granularity of prefix hits."""


@dataclass(frozen=True)
class EngineConfig:
    """What every process must agree on; read from one file, so that they do."""

    row_format: RowFormat
    pool_tokens: int
    """Tokens the host pool holds over all requests and cached prefixes."""
    basis: Path
    policy: SelectionPolicy
    placement: Literal["host", "gpu"]
    """Where the rows lie; on a CPU there is one memory and it makes no difference."""
    hot_bytes: int
    """GPU memory of the hot set, for rows in host memory; shared by all layers of a rank."""
    scheduler: SchedulerSettings
    checkpoint_bytes: int = 0
    """Host memory of recurrent-state checkpoints over all ranks; 0 keeps none."""
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)

    @property
    def num_blocks(self) -> int:
        """Blocks of the host pool, block 0 included: vLLM keeps it as the null block and graph padding points at it."""
        return -(-self.pool_tokens // BLOCK_SIZE) + 1

    @property
    def dense_limit(self) -> int:
        """A request of at most so many tokens is read whole: the policy says so, or its smallest budget covers it."""
        p = self.policy
        return max(p.dense_below, p.sink_tokens + p.window_tokens + p.min_tokens)


def active_config() -> EngineConfig:
    """The configuration named by the environment.

    Raises:
        SparsekvError: the variable is not set, or its file is no resolved profile.
    """
    path = os.environ.get(PROFILE_ENV)
    if not path:
        raise SparsekvError(f"{PROFILE_ENV} is not set", hint="start the server with `sparsekv serve`")
    return read_config(Path(path))


@functools.cache
def read_config(path: Path) -> EngineConfig:
    """Reads the engine's part of a resolved profile.

    Raises:
        SparsekvError: no such file, or a key the engine needs is missing or of the wrong type.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise SparsekvError(f"cannot read the resolved profile {path}: {error.strerror}", hint="start the server with `sparsekv serve`") from None
    try:
        profile = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        kv, sketch, selection, scheduler = profile["kv"], profile["sketch"], profile["selection"], profile.get("scheduler", {})
        recurrent = profile.get("recurrent", {})
        return EngineConfig(
            row_format=_one_of(kv, "dtype", ("bf16", "int8", "int4")),
            pool_tokens=int(kv["pool_tokens"]),
            basis=Path(sketch["basis"]),
            placement=_one_of(kv, "placement", ("host", "gpu")),
            hot_bytes=int(kv["hot_bytes"]),
            policy=SelectionPolicy(**{f.name: selection[f.name] for f in fields(SelectionPolicy) if f.name in selection}),
            scheduler=SchedulerSettings(**{f.name: scheduler[f.name] for f in fields(SchedulerSettings) if f.name in scheduler}),
            checkpoint_bytes=int(recurrent.get("checkpoints", 0)),
            retention=RetentionPolicy(recurrent.get("retention_interval", 0) // BLOCK_SIZE, recurrent.get("retention_turns", 2)),
        )
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise SparsekvError(
            f"{path} is not a resolved profile: {type(error).__name__}: {error}", hint="start the server with `sparsekv serve`"
        ) from None


def _one_of(section: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
    if section[key] not in allowed:
        raise ValueError(f"`{key}` is {section[key]!r}, not one of {', '.join(allowed)}")
    return section[key]
