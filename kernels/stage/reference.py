"""Plain PyTorch definition of `stage`."""

from __future__ import annotations

import torch

from ..layout import KVLayout
from ..rows import dequantise_rows


def stage_reference(
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
    token = torch.arange(start, end, device=rows.device)
    block = block_table[request].long()[token // layout.block_size]
    offset = token % layout.block_size
    scales = None if row_scales is None else row_scales[block, :, offset]
    key, value = dequantise_rows(rows[block, :, offset], scales, layout)
    key_out[: end - start].copy_(key)
    value_out[: end - start].copy_(value)
