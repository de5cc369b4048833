"""The memory one attention layer owns on one rank: its rows, its sketch and, on a GPU, its share of the hot set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsekv.kernels.fetch import HotSet
from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.sketch import Sketch, SketchBasis

RowAllocator = Callable[[int], torch.Tensor]
"""Gives `n` bytes for rows as a uint8 tensor `[n]`, zeroed, as the compute device sees them."""


@dataclass(frozen=True)
class LayerPool:
    """Fixed addresses for the life of the process: a captured CUDA graph reads and writes them."""

    layout: KVLayout
    rows: torch.Tensor
    """`[NB, Hkv, B, row_bytes]` uint8."""
    row_scales: torch.Tensor | None
    """`[NB, Hkv, B, 2]` float32 on the compute device; None for bf16 rows."""
    sketch: Sketch
    basis: SketchBasis
    hot: HotSet | None = None

    @property
    def flat_rows(self) -> torch.Tensor:
        """`[NB * Hkv * B, row_bytes]`: what a row index counts."""
        return self.rows.view(-1, self.layout.row_bytes)


def allocate_layer(layout: KVLayout, num_blocks: int, basis: SketchBasis, allocate_rows: RowAllocator, device: torch.device) -> LayerPool:
    """Allocates the pool of one layer; sketch and scales lie on `device`, the rows where `allocate_rows` puts them."""
    shape = layout.rows_shape(num_blocks)
    return LayerPool(
        layout=layout,
        rows=allocate_rows(num_blocks * layout.num_kv_heads * layout.block_size * layout.row_bytes).view(shape),
        row_scales=torch.zeros(layout.row_scales_shape(num_blocks), dtype=torch.float32, device=device) if layout.has_scales else None,
        sketch=Sketch(
            codes=torch.zeros(layout.codes_shape(num_blocks), dtype=torch.uint8, device=device),
            scales=torch.zeros(layout.scales_shape(num_blocks), dtype=torch.float16, device=device),
        ),
        basis=basis.to(device),
    )


def allocate_cpu_rows(num_bytes: int) -> torch.Tensor:
    """Private anonymous memory: the kernel hands out pages as rows are written and takes them back however the process dies."""
    return torch.zeros(num_bytes, dtype=torch.uint8)
