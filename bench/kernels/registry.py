"""What is benchmarked: each op with the cases it runs, the bytes it cannot avoid moving, and the tests that must be green.

An `ops_*.py` module in this folder holds the workloads of one family:

    @op("gather", tests=("tests/kernels/test_fetch.py",), cases=("16384x520", ...))
    def gather(case: str) -> Workload:
        ...inputs on the GPU...
        return Workload(run=lambda: ..., bus_bytes=..., baselines={"name": lambda: ...})

`run` and the baselines are captured into one CUDA graph each: no allocation of inputs, no host synchronisation inside.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsekv.kernels.layout import KVLayout, RowFormat
from sparsekv.kernels.policy import SelectionPolicy


@dataclass(frozen=True)
class Workload:
    """One op on one input.

    `device_bytes` and `bus_bytes` are what the op must move at the least in device memory and over the bus; their times at the
    card's measured rates give the floor. `baselines` do the same job in other ways; one that cannot run may be left out with its
    reason in `notes`.
    """

    run: Callable[[], Any]
    device_bytes: int = 0
    bus_bytes: int = 0
    baselines: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    name: str
    tests: tuple[str, ...]
    cases: tuple[str, ...]
    build: Callable[[str], Workload]


OPS: dict[str, Op] = {}


def op(name: str, *, tests: tuple[str, ...], cases: tuple[str, ...]) -> Callable[[Callable[[str], Workload]], Callable[[str], Workload]]:
    """Registers the decorated workload builder."""

    def register(build: Callable[[str], Workload]) -> Callable[[str], Workload]:
        if name in OPS:
            raise ValueError(f"op {name} is registered twice")
        OPS[name] = Op(name, tests, cases, build)
        return build

    return register


def load_ops() -> dict[str, Op]:
    """Imports every `ops_*.py` of this folder and returns the registry by name."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name.startswith("ops_"):
            importlib.import_module(f"{package}.{module.name}")
    return OPS


@dataclass(frozen=True)
class Shape:
    """A decode step of one attention layer, named `{requests}x{context}_q{query_len}`; the model is the 27B reference shape."""

    requests: int
    context: int
    query_len: int

    @classmethod
    def parse(cls, case: str) -> Shape:
        match = re.fullmatch(r"(\d+)x(\d+)_q(\d+)", case)
        if not match:
            raise ValueError(f"case {case!r} is not of the form 8x262144_q1")
        return cls(*map(int, match.groups()))

    def layout(self, row_format: RowFormat = "int8") -> KVLayout:
        return KVLayout(num_q_heads=24, num_kv_heads=4, head_dim=256, row_format=row_format, sketch_rank=128)

    @property
    def max_blocks(self) -> int:
        """Width of the block table."""
        return -(-self.context // 128)


SPARSE_POLICY = SelectionPolicy()
"""The budget of the published numbers: at most 2,048 tokens, plus sinks, window and runs."""

DECODE_CASES = (
    "8x262144_q1",
    "8x262144_q8",
    "1x115712_q1",
    "8x32768_q1",
    "8x8192_q1",
    "1x1048576_q1",
)
