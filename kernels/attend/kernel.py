"""Triton version of `attend`: split-KV attention over gathered rows, then a merge of the splits.

The queries of a request that share a KV head (`q_len * group_size`) are the rows of one matrix product. Rows are read once and
stay as they are stored: their scales multiply scores and probabilities, never elements, and codes are exact in either 16-bit
float. Queries of int4 rows are rotated, which no longer fits the model's bf16: they are normalised and rounded to fp16.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..fetch.kernel import pool_rows
from ..hadamard import device_signs, hadamard
from ..layout import KVLayout

if TYPE_CHECKING:
    from ..sketch import Selection

INTERPRETED = triton.knobs.runtime.interpret
DOT = tl.float32 if INTERPRETED else tl.bfloat16  # the interpreter's bf16 product is wrong
LOG2E = tl.constexpr(1.4426950408889634)
SPAN_ALIGN = tl.constexpr(16)
MERGE_SPLITS = 8


@triton.jit
def split_span(count, SPLITS: tl.constexpr):
    """Rows of each split: the same everywhere, so that the merge knows which splits have any."""
    return tl.cdiv(tl.cdiv(count, SPLITS), SPAN_ALIGN) * SPAN_ALIGN


@triton.jit
def load_half(codes_ptr, row, used, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    """The stored keys or values `[BLOCK_N, WIDTH]` of some rows; absent rows read as zeros."""
    return tl.load(codes_ptr + (row * (2 * WIDTH) + OFFSET)[:, None] + tl.arange(0, WIDTH)[None, :], mask=used[:, None], other=0)


@triton.jit
def split_scale(scale):
    """Zero point and scale of an int4 scale word."""
    bits = scale.to(tl.int32, bitcast=True)
    return (bits & 0xF).to(tl.int8), (bits & -16).to(tl.float32, bitcast=True)


@triton.jit
def centred(nibble, zero_point, DTYPE: tl.constexpr):
    """Codes minus zero points: integers from -15 to 15, exact in every float format."""
    return (nibble.to(tl.int8) - zero_point[:, None]).to(DTYPE)


@triton.jit(do_not_specialize=["block_table_stride"])
def attend_kernel(
    query_ptr,
    query_scale_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    block_table_stride,
    codes_ptr,
    row_scales_ptr,
    row_index_ptr,
    indices_ptr,
    counts_ptr,
    part_out_ptr,
    part_lse_ptr,
    scale,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCORE_DOT: tl.constexpr,
    VALUE_DOT: tl.constexpr,
):
    split, pair = tl.program_id(0), tl.program_id(1)
    request, head = pair // HEADS, pair % HEADS
    count = tl.load(counts_ptr + pair)
    span = split_span(count, SPLITS)
    low = split * span
    high = tl.minimum(count, low + span)
    first = tl.load(query_start_loc_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - first
    if (low >= high) | (q_len <= 0):
        return
    base = pair.to(tl.int64) * CAPACITY
    oldest = tl.load(seq_lens_ptr + request) - q_len  # position of the first query
    block_table_ptr += request.to(tl.int64) * block_table_stride
    WIDTH: tl.constexpr = DIM // 2 if FORMAT == "int4" else DIM  # stored elements of a half row

    for start_m in range(0, q_len * GROUP, BLOCK_M):
        m = start_m + tl.arange(0, BLOCK_M)
        real = m < q_len * GROUP
        position = oldest + m // GROUP
        out_row = (first + m // GROUP).to(tl.int64) * (HEADS * GROUP) + head * GROUP + m % GROUP
        dim = tl.arange(0, WIDTH)
        if FORMAT == "int4":
            # A byte holds an even and the next odd dimension: two products share each load.
            query = tl.load(query_ptr + out_row[:, None] * DIM + 2 * dim[None, :], mask=real[:, None], other=0.0).to(SCORE_DOT)
            query_odd = tl.load(query_ptr + out_row[:, None] * DIM + 2 * dim[None, :] + 1, mask=real[:, None], other=0.0).to(SCORE_DOT)
            query_scale = tl.load(query_scale_ptr + out_row, mask=real, other=0.0) * (scale * LOG2E)
            acc_odd = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        else:
            query = tl.load(query_ptr + out_row[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0).to(SCORE_DOT)
        acc = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)

        for start_n in range(low, high, BLOCK_N):
            column = start_n + tl.arange(0, BLOCK_N)
            used = column < high
            row = tl.load(row_index_ptr + base + column, mask=used, other=0).to(tl.int64)
            token = tl.load(indices_ptr + base + column, mask=used, other=0)
            key = load_half(codes_ptr, row, used, 0, WIDTH)
            value = load_half(codes_ptr, row, used, WIDTH, WIDTH)
            if FORMAT != "bf16":
                scale_at = row_scales_ptr + 2 * pool_rows(token, block_table_ptr, head, used, HEADS, BLOCK)
                key_scale = tl.load(scale_at, mask=used, other=0.0)
                value_scale = tl.load(scale_at + 1, mask=used, other=0.0)
            if FORMAT == "int4":
                key_zero, key_scale = split_scale(key_scale)
                value_zero, value_scale = split_scale(value_scale)
                scores = tl.dot(query, tl.trans(centred(key & 0xF, key_zero, SCORE_DOT)), input_precision="ieee")
                scores = tl.dot(query_odd, tl.trans(centred(key >> 4, key_zero, SCORE_DOT)), acc=scores, input_precision="ieee")
                scores *= query_scale[:, None] * key_scale[None, :]
            else:
                scores = tl.dot(query, tl.trans(key.to(SCORE_DOT)), input_precision="ieee")
                if FORMAT == "int8":
                    scores *= (key_scale * (scale * LOG2E))[None, :]
                else:
                    scores *= scale * LOG2E
            scores = tl.where(used[None, :] & (token[None, :] <= position[:, None]), scores, float("-inf"))

            new_top = tl.maximum(top, tl.max(scores, axis=1))
            base_line = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing visible yet
            weight = tl.exp2(scores - base_line[:, None])
            decay = tl.exp2(top - base_line)
            total = total * decay + tl.sum(weight, axis=1)
            top = new_top
            if FORMAT != "bf16":
                weight *= value_scale[None, :]
            weight = weight.to(VALUE_DOT)
            acc *= decay[:, None]
            if FORMAT == "int4":
                acc = tl.dot(weight, centred(value & 0xF, value_zero, VALUE_DOT), acc=acc, input_precision="ieee")
                acc_odd *= decay[:, None]
                acc_odd = tl.dot(weight, centred(value >> 4, value_zero, VALUE_DOT), acc=acc_odd, input_precision="ieee")
            else:
                acc = tl.dot(weight, value.to(VALUE_DOT), acc=acc, input_precision="ieee")

        inverse = 1.0 / tl.where(total > 0, total, 1.0)
        part = out_row * SPLITS + split
        tl.store(part_lse_ptr + part, tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf")), mask=real)
        if FORMAT == "int4":
            tl.store(part_out_ptr + part[:, None] * DIM + 2 * dim[None, :], acc * inverse[:, None], mask=real[:, None])
            tl.store(part_out_ptr + part[:, None] * DIM + 2 * dim[None, :] + 1, acc_odd * inverse[:, None], mask=real[:, None])
        else:
            tl.store(part_out_ptr + part[:, None] * DIM + dim[None, :], acc * inverse[:, None], mask=real[:, None])


@triton.jit(do_not_specialize=["num_requests"])
def merge_splits_kernel(
    part_out_ptr,
    part_lse_ptr,
    query_start_loc_ptr,
    counts_ptr,
    signs_ptr,
    out_ptr,
    lse_ptr,
    num_requests,
    ROTATED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    LOG2_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
):
    token, q_head = tl.program_id(0), tl.program_id(1)
    request = tl.arange(0, MAX_REQUESTS)
    ends = tl.load(query_start_loc_ptr + 1 + request, mask=request < num_requests, other=2147483647)
    owner = tl.sum((ends <= token).to(tl.int32))  # the requests that end before this token
    row = token.to(tl.int64) * (HEADS * GROUP) + q_head
    count = 0
    if owner < num_requests:
        count = tl.load(counts_ptr + owner * HEADS + q_head // GROUP)
    splits = tl.cdiv(count, tl.maximum(split_span(count, SPLITS), 1))

    dim = tl.arange(0, DIM)
    acc = tl.zeros((DIM,), dtype=tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, splits, TILE):
        split = start + tl.arange(0, TILE)
        lse = tl.load(part_lse_ptr + row * SPLITS + split, mask=split < splits, other=float("-inf"))
        part = tl.load(
            part_out_ptr + (row * SPLITS + split)[:, None] * DIM + dim[None, :],
            mask=(split < splits)[:, None] & (lse > float("-inf"))[:, None],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse))
        base_line = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - base_line)
        decay = tl.exp2(top - base_line)
        acc = acc * decay + tl.sum(weight[:, None] * part, axis=0)
        total = total * decay + tl.sum(weight)
        top = new_top
    filled = total > 0
    safe = tl.where(filled, total, 1.0)
    acc = acc / safe
    if ROTATED:
        acc = tl.reshape(hadamard(tl.reshape(acc, (1, DIM)), 1, DIM, LOG2_DIM), (DIM,)) * (tl.load(signs_ptr + dim) / DIM)
    tl.store(out_ptr + row * DIM + dim, acc.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row, tl.where(filled, (top + tl.log2(safe)) / LOG2E, float("-inf")))


@triton.jit
def rotate_query_kernel(query_ptr, signs_ptr, out_ptr, scale_ptr, DIM: tl.constexpr, LOG2_DIM: tl.constexpr):
    """Rotates a query into the space of int4 rows and scales its largest element to 1."""
    dim = tl.arange(0, DIM)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(query_ptr + row * DIM + dim).to(tl.float32) * tl.load(signs_ptr + dim)
    x = tl.reshape(hadamard(tl.reshape(x, (1, DIM)), 1, DIM, LOG2_DIM), (DIM,))
    largest = tl.maximum(tl.max(tl.abs(x)), 1e-30)
    tl.store(out_ptr + row * DIM + dim, (x / largest).to(out_ptr.dtype.element_ty))
    tl.store(scale_ptr + row, largest / DIM)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def choose_splits(pairs: int, capacity: int, device: torch.device) -> int:
    """Enough splits for four programs per multiprocessor, but at least 64 rows of capacity each; a power of two."""
    wanted = max(1, 4 * _multiprocessors(device) // pairs)
    return 1 << (min(wanted, max(1, capacity // 64), 64).bit_length() - 1)


def launch_shape(row_format: str, block_m: int) -> dict[str, int]:
    """Rows per tile and how many warps and stages work on it; 99 KB of shared memory is the limit of consumer cards."""
    return {"BLOCK_N": 32 if row_format == "bf16" else 64, "num_warps": 8 if block_m == 64 else 4, "num_stages": 2}


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
    tokens, q_heads, dim = query.shape
    requests, heads, capacity = row_index.shape
    query = query.contiguous()
    rotated = layout.row_format == "int4"
    log2_dim = dim.bit_length() - 1
    signs = device_signs(dim, query.device) if rotated else query
    out = torch.empty_like(query)
    lse = torch.empty(tokens, q_heads, dtype=torch.float32, device=query.device)
    query_scale = lse  # read for int4 rows alone
    if rotated:
        model_query, query = query, torch.empty_like(query, dtype=torch.float16)
        query_scale = torch.empty_like(lse)
        rotate_query_kernel[(tokens * q_heads,)](model_query, signs, query, query_scale, DIM=dim, LOG2_DIM=log2_dim, num_warps=1)
    splits = choose_splits(requests * heads, capacity, query.device)
    part_out = torch.empty(tokens, q_heads, splits, dim, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(tokens, q_heads, splits, dtype=torch.float32, device=query.device)
    # Decode batches are uniform, so this fits all queries of a request; where it does not, the kernel loops.
    rows_m = -(-tokens // requests) * layout.group_size
    block_m = min(64, max(16, triton.next_power_of_2(rows_m)))
    codes = flat_rows.view({"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[layout.row_format])
    attend_kernel[(splits, requests * heads)](
        query,
        query_scale,
        query_start_loc,
        seq_lens,
        block_table,
        block_table.stride(0),
        codes,
        codes if row_scales is None else row_scales,
        row_index,
        selection.indices,
        selection.counts,
        part_out,
        part_lse,
        scale,
        FORMAT=layout.row_format,
        HEADS=heads,
        GROUP=layout.group_size,
        DIM=dim,
        CAPACITY=capacity,
        BLOCK=layout.block_size,
        SPLITS=splits,
        BLOCK_M=block_m,
        SCORE_DOT=tl.float16 if query.dtype == torch.float16 and row_scales is not None else DOT,
        VALUE_DOT=DOT,
        **launch_shape(layout.row_format, block_m),
    )
    merge_splits_kernel[(tokens, q_heads)](
        part_out,
        part_lse,
        query_start_loc,
        selection.counts,
        signs,
        out,
        lse,
        requests,
        ROTATED=rotated,
        HEADS=heads,
        GROUP=layout.group_size,
        DIM=dim,
        LOG2_DIM=log2_dim,
        SPLITS=splits,
        TILE=min(MERGE_SPLITS, splits),
        MAX_REQUESTS=triton.next_power_of_2(requests),
        num_warps=1,
    )
    return out, lse
