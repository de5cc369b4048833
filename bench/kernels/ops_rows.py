"""Benchmarks of what moves and reads full rows: gather, fetch, attend, stage."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsekv.kernels.attend import attend
from sparsekv.kernels.fetch import HotSet, fetch
from sparsekv.kernels.layout import KVLayout, RowFormat
from sparsekv.kernels.stage import stage

from .registry import SPARSE_POLICY, Shape, Workload, op
from .rows import FILL, fetch_step, layout_of, pinned_bytes, pinned_pool, random_selection, rows_brought

CONTEXT = 262_144
SELECTED = SPARSE_POLICY.max_tokens + SPARSE_POLICY.sink_tokens + SPARSE_POLICY.window_tokens
LAYERS = 4
FORMATS: dict[int, RowFormat] = {264: "int4", 520: "int8", 1024: "bf16"}


def pinned_copy(num_bytes: int) -> Callable[[], torch.Tensor]:
    """A contiguous copy of as many bytes by the copy engine."""
    source, target = pinned_bytes()[:num_bytes], torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return lambda: target.copy_(source, non_blocking=True)


@op(
    "gather",
    tests=("tests/kernels/test_fetch.py",),
    cases=("16384x264", "16384x520", "16384x1024", "131072x264", "131072x520", "131072x1024"),
)
def gather(case: str) -> Workload:
    """A fetch that finds nothing: `{rows}x{row_bytes}`, random tokens of 8 contexts of 256K, 4 heads. Clearing the table is included."""
    total, row_bytes = map(int, case.split("x"))
    layout = layout_of(FORMATS[row_bytes])
    rows, block_table = pinned_pool(layout, 8, CONTEXT)
    selection = random_selection(8, 4, CONTEXT, total // 32, total // 32)
    hot = HotSet.allocate(layout, 2 * total, total, "cuda")

    def run() -> torch.Tensor:
        hot.entries.fill_(-1)
        return fetch(selection, block_table, rows, layout, hot)

    moved = total * row_bytes
    return Workload(run, device_bytes=moved, bus_bytes=moved, baselines={"pinned_copy": pinned_copy(moved)})


@op("fetch", tests=("tests/kernels/test_fetch.py",), cases=("8x262144_hit100", "8x262144_hit97", "8x262144_hit90", "8x262144_hit50"))
def fetch_hits(case: str) -> Workload:
    """Resolve and gather of one layer's int8 rows at a given hit rate; making the table forget the rest is included."""
    requests, context, percent = map(int, case.replace("_hit", "x").split("x"))
    layout = layout_of("int8")
    rows, block_table = pinned_pool(layout, requests, context)
    selection = random_selection(requests, 4, context, SELECTED, SPARSE_POLICY.capacity)
    hot, step = fetch_step(selection, block_table, rows, layout, percent / 100)
    brought = rows_brought(hot, step)
    moved = brought * layout.row_bytes
    lookup_bytes = int(selection.counts.sum()) * (4 + 4 + hot.entries.shape[1] * 8)
    return Workload(
        step,
        device_bytes=moved + lookup_bytes,
        bus_bytes=moved,
        baselines={"pinned_copy": pinned_copy(moved)} if moved else {},
        notes={"rows": int(selection.counts.sum()), "rows from the host": brought},
    )


@op(
    "attend",
    tests=("tests/kernels/test_attend.py",),
    cases=tuple(
        f"{shape}_{row_format}"
        for row_format in ("int8", "int4", "bf16")
        for shape in ("8x262144_q1", "8x262144_q8", "1x262144_q1", "8x4096_q1")
    ),
)
def attend_rows(case: str) -> Workload:
    """Attention over the rows of a full selection, scattered over a hot set; `8x4096` reads every token.

    A run attends in `LAYERS` layers in turn, whose rows together do not fit the second-level cache.
    """
    name, _, row_format = case.rpartition("_")
    shape = Shape.parse(name)
    layout: KVLayout = shape.layout(row_format)
    count = SELECTED if shape.context > SPARSE_POLICY.dense_below else shape.context
    selection = random_selection(shape.requests, 4, shape.context, count, SPARSE_POLICY.capacity)
    used = int(selection.counts.sum())
    flat_rows = torch.full((LAYERS * used, layout.row_bytes), FILL, dtype=torch.uint8, device="cuda")
    row_indices = [torch.full_like(selection.indices, -1) for _ in range(LAYERS)]
    for row_index, chosen in zip(row_indices, torch.randperm(LAYERS * used, device="cuda").int().chunk(LAYERS), strict=True):
        row_index[selection.indices >= 0] = chosen
    tokens = shape.requests * shape.query_len
    query = torch.randn(tokens, 24, 256, dtype=torch.bfloat16, device="cuda")
    starts = torch.arange(0, tokens + 1, shape.query_len, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((shape.requests,), shape.context, dtype=torch.int32, device="cuda")

    def run() -> None:
        for row_index in row_indices:
            attend(query, starts, seq_lens, flat_rows, row_index, selection, layout, 256**-0.5)

    return Workload(
        run,
        device_bytes=LAYERS * (used * (layout.row_bytes + 8) + 2 * query.nbytes),
        notes={"rows": used, "layers in a run": LAYERS},
    )


@op("stage", tests=("tests/kernels/test_stage.py",), cases=("16384_int8", "16384_int4", "16384_bf16"))
def stage_history(case: str) -> Workload:
    """`{tokens}_{format}`: one segment of a prefill history, four heads, back to bf16 keys and values."""
    tokens, _, row_format = case.partition("_")
    layout, length = layout_of(row_format), int(tokens)
    rows, block_table = pinned_pool(layout, 1, CONTEXT)
    key, value = (torch.empty(length, 4, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    moved = length * 4 * layout.row_bytes
    return Workload(
        lambda: stage(rows, block_table, 0, 1000, 1000 + length, layout, key, value),
        device_bytes=2 * moved + 2 * key.nbytes,
        bus_bytes=moved,
        baselines={"pinned_copy": pinned_copy(moved)},
    )
