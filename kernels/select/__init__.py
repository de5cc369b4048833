"""select: from queries and the key sketch to the tokens worth reading."""

from __future__ import annotations

import torch

from ..layout import KVLayout
from ..policy import SelectionPolicy
from ..sketch import Selection, Sketch, SketchBasis
from .reference import select_reference

__all__ = ["select", "select_reference"]


def select(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    sketch: Sketch,
    basis: SketchBasis,
    layout: KVLayout,
    policy: SelectionPolicy,
    workspace: None = None,
    *,
    scale: float | None = None,
    representatives: int = 2,
    max_query_len: int | None = None,
) -> Selection:
    """Scores all tokens of each request by their sketch and chooses those that `policy` asks for.

    Args:
        query: `[T, Hq, D]` after QK-norm and RoPE; query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32, 0 for graph padding; block_table: `[R, max_blocks]` int32.
        scale: softmax scale. Default: `head_dim ** -0.5`.
        representatives: at most this many query tokens of a request are scored, spread evenly, the last one always.
        max_query_len: bound of the query tokens of one request; 1 halves the work of plain decoding. Default: T.

    Requests of at most `policy.dense_below` tokens select all of them. The result depends on the request alone.
    """
    if scale is None:
        scale = layout.head_dim**-0.5
    representatives = max(1, min(representatives, query.shape[0] if max_query_len is None else max_query_len))
    if query.is_cuda:
        from . import kernel

        return kernel.select(query, query_start_loc, seq_lens, block_table, sketch, basis, layout, policy, scale, representatives)
    return select_reference(query, query_start_loc, seq_lens, block_table, sketch, basis, layout, policy, scale, representatives)
