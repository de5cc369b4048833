"""Benchmark of the whole sparse attention of one layer against the dense kernels of vLLM."""

from __future__ import annotations

import torch

from sparsekv.kernels.attend import attend
from sparsekv.kernels.fetch import HotSet, fetch
from sparsekv.kernels.select import select
from sparsekv.kernels.sketch import Sketch, SketchBasis
from sparsekv.kernels.write import write

from .dense import dense_baselines
from .registry import DECODE_CASES, SPARSE_POLICY, Shape, Workload, op
from .rows import pinned_pool, rows_brought, with_hit_rate

HIT_RATE = 0.9


@op(
    "sparse_attention",
    tests=(
        "tests/kernels/test_write.py",
        "tests/kernels/test_select.py",
        "tests/kernels/test_fetch.py",
        "tests/kernels/test_attend.py",
    ),
    cases=(*DECODE_CASES, "8x65536_q1", "8x16384_q1", "8x4096_q1"),
)
def sparse_attention(case: str) -> Workload:
    """Write, select, fetch at 90 % hits and attend; int8 rows in pinned memory, sketch and a four-fold hot set on the GPU."""
    shape = Shape.parse(case)
    layout = shape.layout("int8")
    rows, block_table = pinned_pool(layout, shape.requests, shape.context)
    blocks = rows.shape[0]
    codes = torch.empty(layout.codes_shape(blocks), dtype=torch.uint8, device="cuda").random_()
    sketch = Sketch(codes, torch.rand(layout.scales_shape(blocks), device="cuda").half())
    maps = (torch.randn(4, 256, 128, device="cuda") / 16 for _ in range(2))
    basis = SketchBasis(torch.zeros(4, 256, device="cuda"), *maps)

    tokens = shape.requests * shape.query_len
    query, key, value = (torch.randn(tokens, heads, 256, dtype=torch.bfloat16, device="cuda") for heads in (24, 4, 4))
    starts = torch.arange(0, tokens + 1, shape.query_len, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((shape.requests,), shape.context, dtype=torch.int32, device="cuda")
    newest = torch.arange(shape.context - shape.query_len, shape.context, device="cuda")
    slots = (block_table.long()[:, newest // 128] * 128 + newest % 128).flatten()
    flow = {"max_query_len": shape.query_len}

    first = select(query, starts, seq_lens, block_table, sketch, basis, layout, SPARSE_POLICY, **flow)
    selected = int(first.counts.sum())
    hot = HotSet.allocate(layout, 4 * selected, first.indices.numel(), "cuda")
    forget = with_hit_rate(hot, HIT_RATE)

    def run() -> torch.Tensor:
        forget()
        write(key, value, slots, rows, layout, sketch, basis, hot)
        selection = select(query, starts, seq_lens, block_table, sketch, basis, layout, SPARSE_POLICY, **flow)
        row_index = fetch(selection, block_table, rows, layout, hot)
        return attend(query, starts, seq_lens, hot.rows, row_index, selection, layout, 256**-0.5)[0]

    brought = rows_brought(hot, run)
    scanned = shape.requests * shape.context * 4 * (layout.code_bytes + 2) if shape.context > SPARSE_POLICY.dense_below else 0
    baselines, notes = dense_baselines(shape)
    return Workload(
        run,
        device_bytes=scanned + (selected + brought) * layout.row_bytes,
        bus_bytes=brought * layout.row_bytes,
        baselines=baselines,
        notes={"rows": selected, "rows from the host": brought, **notes},
    )
