"""write: new K and V into host rows and the sketch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..fetch import invalidate
from ..layout import KVLayout
from ..sketch import Sketch, SketchBasis
from .reference import write_reference

if TYPE_CHECKING:
    from ..fetch import HotSet

__all__ = ["write", "write_reference"]


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    row_scales: torch.Tensor | None,
    layout: KVLayout,
    sketch: Sketch | None = None,
    basis: SketchBasis | None = None,
    hot: HotSet | None = None,
) -> None:
    """Stores the step's new tokens.

    Args:
        key: `[T, Hkv, D]` after QK-norm and RoPE. value: `[T, Hkv, D]`.
        slot_mapping: `[T]` int64, the slot of each token; negative slots are skipped.
        rows: `layout.rows_shape(num_blocks)` uint8, pinned host memory through its device view, or on the device.
        row_scales: `layout.row_scales_shape(num_blocks)` float32 on the device; None where the format has none.
        sketch: written where given, by `basis`. hot: its copies of these slots are dropped.
    """
    if (row_scales is not None) != layout.has_scales:
        raise ValueError(f"{layout.row_format} rows {'need' if layout.has_scales else 'have no'} scales")
    if (sketch is None) != (basis is None):
        raise ValueError("a sketch is written by a basis: give both or neither")
    if key.shape[1:] != (layout.num_kv_heads, layout.head_dim) or value.shape != key.shape:
        raise ValueError(f"key {list(key.shape)} and value {list(value.shape)} do not fit {layout}")
    if key.is_cuda:
        from . import kernel

        kernel.write(key, value, slot_mapping, rows, row_scales, layout, sketch, basis, hot)
        return
    write_reference(key, value, slot_mapping, rows, row_scales, layout, sketch, basis)
    if hot is not None:
        invalidate(slot_mapping, layout, hot)
