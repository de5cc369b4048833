"""Triton version of `stage`: whole blocks cross the bus in place, row after row, and are dequantised on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..fetch.kernel import pool_rows
from ..hadamard import device_signs, hadamard
from ..layout import KVLayout


@triton.jit(do_not_specialize=["start", "num_tokens"])
def stage_kernel(
    codes_ptr,
    row_scales_ptr,
    block_table_ptr,
    signs_ptr,
    key_out_ptr,
    value_out_ptr,
    start,
    num_tokens,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    LOG2_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    index, head = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    used = index < num_tokens
    row = pool_rows(start + index, block_table_ptr, head, used, HEADS, BLOCK)
    WIDTH: tl.constexpr = DIM // 2 if FORMAT == "int4" else DIM  # stored elements of a half row
    at = codes_ptr + row[:, None] * (2 * WIDTH) + tl.arange(0, WIDTH)[None, :]
    # Both halves are asked for before either is used: the bus has a long way.
    key = tl.load(at, mask=used[:, None], other=0)
    value = tl.load(at + WIDTH, mask=used[:, None], other=0)
    dim = tl.arange(0, DIM)
    cell = (index.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    for half in tl.static_range(2):
        codes = value if half else key
        if FORMAT == "bf16":
            x = codes
        else:
            scale = tl.load(row_scales_ptr + 2 * row + half, mask=used, other=0.0)
            if FORMAT == "int8":
                x = codes.to(tl.float32) * scale[:, None]
            else:
                bits = scale.to(tl.int32, bitcast=True)
                x = tl.reshape(tl.join(codes & 0xF, codes >> 4), (TILE, DIM)).to(tl.float32)
                x = hadamard(x - (bits & 0xF).to(tl.float32)[:, None], TILE, DIM, LOG2_DIM)  # small integers: exact
                x *= (bits & -16).to(tl.float32, bitcast=True)[:, None] * (tl.load(signs_ptr + dim) / DIM)[None, :]
        out_ptr = value_out_ptr if half else key_out_ptr
        tl.store(out_ptr + cell, x.to(out_ptr.dtype.element_ty), mask=used[:, None])


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
    if start >= end:
        return
    codes = rows.view({"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[layout.row_format])
    dim, rotated = layout.head_dim, layout.row_format == "int4"
    tile = 4 if rotated else 16  # one warp transforms without barriers
    stage_kernel[(triton.cdiv(end - start, tile), layout.num_kv_heads)](
        codes,
        codes if row_scales is None else row_scales,
        block_table[request],
        device_signs(dim, key_out.device) if rotated else codes,
        key_out,
        value_out,
        start,
        end - start,
        FORMAT=layout.row_format,
        HEADS=layout.num_kv_heads,
        BLOCK=layout.block_size,
        DIM=dim,
        LOG2_DIM=dim.bit_length() - 1,
        TILE=tile,
        num_warps=1 if rotated else 4,
    )
