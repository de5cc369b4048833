"""Bring a range of tokens back to plain keys and values, for the attention of a prefill chunk."""

from __future__ import annotations

import torch

from ..layout import KVLayout
from .reference import stage_reference

__all__ = ["stage", "stage_reference"]


def stage(
    rows: torch.Tensor,
    row_scales: torch.Tensor | None,
    block_table: torch.Tensor,
    request: int,
    start: int,
    end: int,
    layout: KVLayout,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
) -> None:
    """Dequantises the rows of tokens `[start, end)` of one request.

    Args:
        rows: `[NB, Hkv, B, row_bytes]` uint8, host memory seen from the device, or any tensor on the CPU.
        row_scales: `[NB, Hkv, B, 2]` float32 on the compute device; None where the format has none.
        block_table: `[R, max_blocks]` int32; `request` is its row.
        key_out, value_out: `[n, Hkv, D]`, n >= end - start, written in place from row 0.
    """
    if key_out.is_cuda:
        from . import kernel

        kernel.stage(rows, row_scales, block_table, request, start, end, layout, key_out, value_out)
    else:
        stage_reference(rows, row_scales, block_table, request, start, end, layout, key_out, value_out)
