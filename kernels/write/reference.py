"""Reference of `write`: what the kernel must leave in the rows and the sketch."""

from __future__ import annotations

import torch

from ..layout import KVLayout
from ..rows import quantise_rows
from ..sketch import Sketch, SketchBasis, encode_keys


def write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    rows: torch.Tensor,
    row_scales: torch.Tensor | None,
    layout: KVLayout,
    sketch: Sketch | None = None,
    basis: SketchBasis | None = None,
) -> None:
    """Quantises `key` and `value` `[T, Hkv, D]` to their slots in `rows`, `row_scales` and `sketch`; negative slots are skipped."""
    tokens = min(key.shape[0], slot_mapping.shape[0])
    slots = slot_mapping[:tokens]
    live = slots >= 0
    slots, key, value = slots[live], key[:tokens][live], value[:tokens][live]
    block, offset = slots // layout.block_size, slots % layout.block_size
    new_rows, new_scales = quantise_rows(key, value, layout)
    rows[block, :, offset] = new_rows.to(rows.device)
    if row_scales is not None:
        row_scales[block, :, offset] = new_scales
    if sketch is not None:
        assert basis is not None
        codes, scales = encode_keys(key, basis, layout)
        sketch.codes[block, :, offset] = codes
        sketch.scales[block, :, offset] = scales
