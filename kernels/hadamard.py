"""The rotation of int4 rows (`rows.rotate`) in Triton."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from .rows import rotation_signs


@triton.jit
def hadamard(x, ROWS: tl.constexpr, DIM: tl.constexpr, LOG2_DIM: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of each row of `x [ROWS, DIM]`, `DIM == 2 ** LOG2_DIM`.

    Every round transforms the lowest index bit and rotates the bits by one, so all rounds are alike and after the last
    the order is restored.
    """
    for _ in tl.static_range(LOG2_DIM):
        first, second = tl.split(tl.reshape(x, (ROWS, DIM // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, DIM))
    return x


@cache
def device_signs(dim: int, device: torch.device) -> torch.Tensor:
    """The ±1 signs of the rotation `[dim]` float32 on a device. The first call copies: make it before a graph is captured."""
    return rotation_signs(dim).to(device)
