"""Triton version of `write`: rows, sketch and hot-set invalidation of a tile of tokens in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..fetch.hot_set import WAYS
from ..fetch.kernel import invalidate_rows
from ..hadamard import device_signs, hadamard
from ..layout import KVLayout
from ..sketch import FP16_MAX, Sketch, SketchBasis

if TYPE_CHECKING:
    from ..fetch import HotSet

TILE = 16
"""Tokens one program writes; at least 16, as the projection is a matrix product."""
EXACT = {"enable_fp_fusion": False}
"""A fused multiply-add rounds once where vLLM's formats round twice."""


@triton.jit
def round_half_away(x):
    return tl.where(x >= 0, x + 0.5, x - 0.5).to(tl.int32)


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, of |x| < 2^22."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def write_half(
    x,
    codes_ptr,
    scale_ptr,
    signs_ptr,
    row,
    live,
    ROUNDED: tl.constexpr,
    FORMAT: tl.constexpr,
    DIM: tl.constexpr,
    LOG2_DIM: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Quantises the keys or the values `x [TILE, DIM]` float32 of some rows and stores codes and scales."""
    dim = tl.arange(0, DIM)
    if FORMAT == "bf16":
        tl.store(codes_ptr + row[:, None] * ROW_STRIDE + dim[None, :], x.to(tl.bfloat16), mask=live[:, None])
    elif FORMAT == "int8":
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0 + tl.zeros([TILE], tl.float32)), 1e-6)
        inverse = tl.div_rn(1.0 + tl.zeros([TILE], tl.float32), scale)
        codes = tl.minimum(tl.maximum(round_half_away(x * inverse[:, None]), -128), 127)
        tl.store(codes_ptr + row[:, None] * ROW_STRIDE + dim[None, :], codes.to(tl.int8), mask=live[:, None])
        tl.store(scale_ptr + 2 * row, scale.to(tl.int32, bitcast=True), mask=live)
    else:
        x = hadamard(x * tl.load(signs_ptr + dim)[None, :], TILE, DIM, LOG2_DIM).to(ROUNDED).to(tl.float32)
        low, high = tl.min(x, axis=1), tl.max(x, axis=1)
        scale = tl.maximum(tl.div_rn(high - low, 15.0 + tl.zeros([TILE], tl.float32)), 1e-6)
        zero_point = tl.minimum(tl.maximum(round_half_away(tl.div_rn(-low, scale)), 0), 15)
        inverse = tl.div_rn(1.0 + tl.zeros([TILE], tl.float32), scale)
        codes = round_half_away(x * inverse[:, None] + zero_point.to(tl.float32)[:, None])
        codes = tl.minimum(tl.maximum(codes, 0), 15).to(tl.uint8)
        even, odd = tl.split(tl.reshape(codes, (TILE, DIM // 2, 2)))
        byte = tl.arange(0, DIM // 2)
        tl.store(codes_ptr + row[:, None] * ROW_STRIDE + byte[None, :], even | (odd << 4), mask=live[:, None])
        tl.store(scale_ptr + 2 * row, (scale.to(tl.int32, bitcast=True) & -16) | zero_point, mask=live)


@triton.jit(do_not_specialize=["num_tokens", "tag_base"])
def write_kernel(
    key_ptr,
    value_ptr,
    slot_mapping_ptr,
    codes_ptr,
    scale_bits_ptr,
    signs_ptr,
    key_map_ptr,
    projected_mean_ptr,
    sketch_codes_ptr,
    sketch_scales_ptr,
    entries_ptr,
    key_stride,
    value_stride,
    num_tokens,
    tag_base,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LOG2_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    HAS_SKETCH: tl.constexpr,
    HAS_HOT: tl.constexpr,
    SETS_LOG2: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
    DIM_STEP: tl.constexpr,
):
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    live = slot >= 0
    row = (slot // BLOCK * HEADS + head) * BLOCK + slot % BLOCK
    dim = tl.arange(0, DIM)
    key_at = key_ptr + token[:, None] * key_stride + head * DIM
    key = tl.load(key_at + dim[None, :], mask=live[:, None], other=0.0)
    value = tl.load(value_ptr + token[:, None] * value_stride + head * DIM + dim[None, :], mask=live[:, None], other=0.0)
    ROUNDED: tl.constexpr = key_ptr.dtype.element_ty
    write_half(
        key.to(tl.float32), codes_ptr, scale_bits_ptr, signs_ptr, row, live,
        ROUNDED, FORMAT, DIM, LOG2_DIM, ROW_STRIDE, TILE,
    )  # fmt: skip
    write_half(
        value.to(tl.float32), codes_ptr + VALUE_OFFSET, scale_bits_ptr + 1, signs_ptr, row, live,
        ROUNDED, FORMAT, DIM, LOG2_DIM, ROW_STRIDE, TILE,
    )  # fmt: skip

    if HAS_SKETCH:
        rank = tl.arange(0, RANK)
        projected = tl.zeros([TILE, RANK], tl.float32)
        for start in range(0, DIM, DIM_STEP):
            part = start + tl.arange(0, DIM_STEP)
            x = tl.load(key_at + part[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            maps = tl.load(key_map_ptr + (head * DIM + part)[:, None] * RANK + rank[None, :])
            projected = tl.dot(x, maps, acc=projected, input_precision="ieee")
        projected -= tl.load(projected_mean_ptr + head * RANK + rank)[None, :]
        TOP: tl.constexpr = 7 if BITS == 4 else 127
        scale = tl.minimum(tl.div_rn(tl.max(tl.abs(projected), axis=1), TOP + tl.zeros([TILE], tl.float32)), MAX_SCALE).to(tl.float16)
        step = scale.to(tl.float32)
        safe = tl.where(step > 0, step, 1.0)
        codes = round_even(tl.div_rn(projected, safe[:, None] + tl.zeros([TILE, RANK], tl.float32)))
        codes = tl.where(step[:, None] > 0, tl.minimum(tl.maximum(codes, -TOP), TOP), 0)
        if BITS == 4:
            even, odd = tl.split(tl.reshape(codes, (TILE, RANK // 2, 2)))
            byte = tl.arange(0, RANK // 2)
            packed = ((even & 0xF) | ((odd & 0xF) << 4)).to(tl.uint8)
            tl.store(sketch_codes_ptr + row[:, None] * (RANK // 2) + byte[None, :], packed, mask=live[:, None])
        else:
            tl.store(sketch_codes_ptr + row[:, None] * RANK + rank[None, :], (codes & 0xFF).to(tl.uint8), mask=live[:, None])
        tl.store(sketch_scales_ptr + row, scale, mask=live)
    if HAS_HOT:
        invalidate_rows(entries_ptr, row + tag_base, live, SETS_LOG2, WAYS)


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
    tokens, heads, dim = min(key.shape[0], slot_mapping.shape[0]), layout.num_kv_heads, layout.head_dim
    if not tokens:
        return
    assert key.stride()[1:] == (dim, 1)
    assert value.stride()[1:] == (dim, 1)
    codes = rows.view({"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[layout.row_format])
    write_kernel[(triton.cdiv(tokens, TILE), heads)](
        key,
        value,
        slot_mapping,
        codes,
        codes if row_scales is None else row_scales.view(torch.int32),
        device_signs(dim, key.device) if layout.row_format == "int4" else codes,
        basis.key_map if basis else codes,
        basis.projected_mean if basis else codes,
        sketch.codes if sketch else codes,
        sketch.scales if sketch else codes,
        hot.entries if hot else codes,
        key.stride(0),
        value.stride(0),
        tokens,
        hot.tag_base if hot else 0,
        FORMAT=layout.row_format,
        HEADS=heads,
        DIM=dim,
        LOG2_DIM=dim.bit_length() - 1,
        BLOCK=layout.block_size,
        ROW_STRIDE=codes.shape[-1],
        VALUE_OFFSET=codes.shape[-1] // 2,
        RANK=layout.sketch_rank,
        BITS=layout.sketch_bits,
        MAX_SCALE=FP16_MAX,
        HAS_SKETCH=sketch is not None,
        HAS_HOT=hot is not None,
        SETS_LOG2=hot.entries.shape[0].bit_length() - 1 if hot else 0,
        WAYS=WAYS,
        TILE=TILE,
        DIM_STEP=min(dim, 64),
        **EXACT,
    )
