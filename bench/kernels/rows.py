"""Inputs shared by the ops that read full rows: a pinned pool, selections, a hot set with a chosen hit rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from sparsekv.kernels.fetch import HotSet, fetch
from sparsekv.kernels.layout import KVLayout, RowFormat
from sparsekv.kernels.sketch import Selection

POOL_BYTES = 8 << 30
FILL = 0x3C
"""Every byte of the pool: an ordinary number in all row formats, as code, as bf16 and as scale."""


def layout_of(row_format: RowFormat) -> KVLayout:
    """The 27B reference shape: 24 query heads, 4 KV heads, head_dim 256."""
    return KVLayout(num_q_heads=24, num_kv_heads=4, head_dim=256, row_format=row_format, sketch_rank=128)


@cache
def pinned_bytes() -> torch.Tensor:
    """8 GiB of pinned host memory, allocated once and shared by all cases."""
    return torch.full((POOL_BYTES,), FILL, dtype=torch.uint8, pin_memory=True)


def pinned_pool(layout: KVLayout, requests: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool for `requests` contexts with shuffled blocks: rows `[NB, Hkv, B, row_bytes]` and block table `[R, max_blocks]`."""
    blocks = -(-context // layout.block_size)
    shape = layout.rows_shape(requests * blocks)
    rows = pinned_bytes()[: torch.Size(shape).numel()].view(shape)
    return rows, torch.randperm(requests * blocks, device="cuda").view(requests, blocks).int()


def random_selection(requests: int, heads: int, context: int, count: int, capacity: int) -> Selection:
    """`count` random tokens of each request and head, ascending."""
    indices = torch.full((requests, heads, capacity), -1, dtype=torch.int32, device="cuda")
    for chosen in indices.view(-1, capacity):
        chosen[:count] = torch.randperm(context, device="cuda")[:count].sort().values
    counts = torch.full((requests, heads), count, dtype=torch.int32, device="cuda")
    return Selection(indices, counts, torch.ones(requests, heads, device="cuda"))


def with_hit_rate(hot: HotSet, hit_rate: float) -> Callable[[], None]:
    """An action that makes the hot set forget a fixed share of its entries.

    Missed rows go to empty entries first, so a step that repeats its selection after this finds `hit_rate` of its rows,
    every time it is replayed.
    """
    if hit_rate == 1:
        return lambda: None
    forgotten = torch.rand(hot.entries.shape, device="cuda") >= hit_rate
    return lambda: hot.entries.masked_fill_(forgotten, -1)


def rows_brought(hot: HotSet, step: Callable[[], object], warmup: int = 3) -> int:
    """Rows that one step reads from the host once its hot set is warm."""
    for _ in range(warmup):
        step()
    before = int(hot.counters[1])
    step()
    return int(hot.counters[1]) - before


def fetch_step(
    selection: Selection, block_table: torch.Tensor, rows: torch.Tensor, layout: KVLayout, hit_rate: float
) -> tuple[HotSet, Callable[[], torch.Tensor]]:
    """A hot set of four times the selection, and a fetch that finds `hit_rate` of its rows in it."""
    total = selection.indices.numel()
    hot = HotSet.allocate(layout, 4 * int(selection.counts.sum()), total, "cuda")
    forget = with_hit_rate(hot, hit_rate)

    def step() -> torch.Tensor:
        forget()
        return fetch(selection, block_table, rows, layout, hot)

    return hot, step
