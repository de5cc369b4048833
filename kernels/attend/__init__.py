"""Exact attention over the selected rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layout import KVLayout
from .reference import attend_reference

if TYPE_CHECKING:
    from ..sketch import Selection

__all__ = ["attend", "attend_reference"]


def attend(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    flat_rows: torch.Tensor,
    row_scales: torch.Tensor | None,
    row_index: torch.Tensor,
    selection: Selection,
    layout: KVLayout,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a step's queries over the rows selected for their request and KV head.

    A query at position p sees the selected tokens t <= p, so the draft tokens of one step may share a selection.

    Args:
        query: `[T, Hq, D]`, the last tokens of each request, packed; `query_start_loc [R + 1]`, `seq_lens [R]` int32.
        block_table: `[R, max_blocks]` int32.
        flat_rows: `[N, row_bytes]` uint8, `hot.rows` or `rows.view(-1, row_bytes)`.
        row_scales: `[NB, Hkv, B, 2]` float32 of the pool, found by token; None where the format has none.
        row_index: `[R, Hkv, K]` int32, where each selected row lies in `flat_rows`.
        selection: `indices` (token of each row, for causality) and `counts`; rows beyond the counts are never read.
        scale: of the scores, usually `head_dim ** -0.5`.

    Returns:
        `out [T, Hq, D]` in the query's dtype and `lse [T, Hq]` float32, the natural log-sum-exp of the scaled scores.
        A query that sees nothing, and one beyond `query_start_loc[R]`, gives zeros and −inf.
    """
    if query.is_cuda:
        from . import kernel

        return kernel.attend(query, query_start_loc, seq_lens, block_table, flat_rows, row_scales, row_index, selection, layout, scale)
    return attend_reference(query, query_start_loc, seq_lens, block_table, flat_rows, row_scales, row_index, selection, layout, scale)
