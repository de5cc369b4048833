"""Find the selected rows: in the hot set if they are there, else bring them in from host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layout import KVLayout
from .hot_set import HotSet
from .reference import fetch_reference, invalidate_reference, pool_row_index_reference

if TYPE_CHECKING:
    from ..sketch import Selection

__all__ = ["HotSet", "fetch", "fetch_reference", "invalidate", "pool_row_index"]


def fetch(selection: Selection, block_table: torch.Tensor, rows: torch.Tensor, layout: KVLayout, hot: HotSet) -> torch.Tensor:
    """Makes every selected row readable in `hot.rows`.

    A row already in the hot set costs a table lookup. A missed row is read from `rows` (the only rows that cross the
    bus) and replaces the least recently used entry of its set that this call does not need; if there is none, it goes
    to a staging row of its own. Safe under CUDA-graph capture: the grid depends on shapes only.

    Args:
        selection: `indices [R, Hkv, K]` int32, of which the first `counts [R, Hkv]` are token indices.
        block_table: `[R, max_blocks]` int32.
        rows: `[NB, Hkv, B, row_bytes]` uint8, host memory seen from the device, or any tensor on the CPU.

    Returns:
        `row_index [R, Hkv, K]` int32 into `hot.rows`, −1 beyond the counts. Valid until the next fetch.

    Raises:
        ValueError: if `R * Hkv * K` exceeds the staging rows of `hot`, or its rows do not fit `layout`.
    """
    hot.check(selection.indices.shape, layout)
    if selection.indices.is_cuda:
        from . import kernel

        return kernel.fetch(selection, block_table, rows, layout, hot)
    return fetch_reference(selection, block_table, rows, layout, hot)


def invalidate(slot_mapping: torch.Tensor, layout: KVLayout, hot: HotSet) -> None:
    """Drops every hot copy of rows about to be rewritten, for all KV heads. Negative slots are padding.

    Args:
        slot_mapping: `[T]` int64.
    """
    if slot_mapping.is_cuda:
        from . import kernel

        kernel.invalidate(slot_mapping, layout, hot)
    else:
        invalidate_reference(slot_mapping, layout, hot)


def pool_row_index(selection: Selection, block_table: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Where the selected rows lie in the pool itself, for pools the device reads directly.

    Returns:
        `row_index [R, Hkv, K]` int32 into `rows.view(-1, row_bytes)`, −1 beyond the counts.
    """
    if selection.indices.is_cuda:
        from . import kernel

        return kernel.pool_row_index(selection, block_table, layout)
    return pool_row_index_reference(selection, block_table, layout)
