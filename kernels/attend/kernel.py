"""Triton version of `attend`: split-KV attention over gathered rows, then a merge of the splits.

The queries of a request that share a KV head (`q_len * group_size`) are the rows of one matrix product. Rows are read once and
stay as they are stored: their scales multiply scores and probabilities, never elements.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..hadamard import device_signs, hadamard
from ..layout import KVLayout

if TYPE_CHECKING:
    from ..sketch import Selection

INTERPRETED = triton.knobs.runtime.interpret
LOG2E = tl.constexpr(1.4426950408889634)
SPAN_ALIGN = tl.constexpr(16)
MERGE_SPLITS = 8


@triton.jit
def split_span(count, SPLITS: tl.constexpr):
    """Rows of each split: the same everywhere, so that the merge knows which splits have any."""
    return tl.cdiv(tl.cdiv(count, SPLITS), SPAN_ALIGN) * SPAN_ALIGN


@triton.jit
def load_half(codes_ptr, row, used, OFFSET: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """The stored keys or values `[BLOCK_N, WIDTH]` of some rows; absent rows read as zeros."""
    return tl.load(codes_ptr + (row * STRIDE + OFFSET)[:, None] + tl.arange(0, WIDTH)[None, :], mask=used[:, None], other=0)


@triton.jit
def attend_kernel(
    query_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    codes_ptr,
    scale_bits_ptr,
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
    ROW_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
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
    WIDTH: tl.constexpr = DIM // 2 if FORMAT == "int4" else DIM  # stored elements of a half row
    SCALE_OFFSET: tl.constexpr = VALUE_OFFSET // 4 if FORMAT != "bf16" else 0  # of V, in float32 units

    for start_m in range(0, q_len * GROUP, BLOCK_M):
        m = start_m + tl.arange(0, BLOCK_M)
        real = m < q_len * GROUP
        position = oldest + m // GROUP
        out_row = (first + m // GROUP).to(tl.int64) * (HEADS * GROUP) + head * GROUP + m % GROUP
        dim = tl.arange(0, WIDTH)
        if FORMAT == "int4":
            # A byte holds an even and the next odd dimension: two products share each load.
            query = tl.load(query_ptr + out_row[:, None] * DIM + 2 * dim[None, :], mask=real[:, None], other=0.0).to(DOT)
            query_odd = tl.load(query_ptr + out_row[:, None] * DIM + 2 * dim[None, :] + 1, mask=real[:, None], other=0.0).to(DOT)
            query_sum = tl.sum(query.to(tl.float32), axis=1) + tl.sum(query_odd.to(tl.float32), axis=1)
            acc_odd = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        else:
            query = tl.load(query_ptr + out_row[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0).to(DOT)
        acc = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)

        for start_n in range(low, high, BLOCK_N):
            column = start_n + tl.arange(0, BLOCK_N)
            used = column < high
            row = tl.load(row_index_ptr + base + column, mask=used, other=0).to(tl.int64)
            token = tl.load(indices_ptr + base + column, mask=used, other=0)
            key = load_half(codes_ptr, row, used, 0, ROW_STRIDE, WIDTH)
            value = load_half(codes_ptr, row, used, VALUE_OFFSET if FORMAT != "bf16" else DIM, ROW_STRIDE, WIDTH)
            if FORMAT == "int4":
                key_bits = tl.load(scale_bits_ptr + row * (ROW_STRIDE // 4) + SCALE_OFFSET - 1, mask=used, other=0)
                value_bits = tl.load(scale_bits_ptr + row * (ROW_STRIDE // 4) + 2 * SCALE_OFFSET - 1, mask=used, other=0)
                zero_point = (key_bits & 0xF).to(tl.float32)
                scores = tl.dot(query, tl.trans((key & 0xF).to(DOT)), input_precision="ieee")
                scores = tl.dot(query_odd, tl.trans((key >> 4).to(DOT)), acc=scores, input_precision="ieee")
                scores -= query_sum[:, None] * zero_point[None, :]
                scores *= ((key_bits & -16).to(tl.float32, bitcast=True) * (scale * LOG2E))[None, :]
            else:
                scores = tl.dot(query, tl.trans(key.to(DOT)), input_precision="ieee")
                if FORMAT == "int8":
                    key_bits = tl.load(scale_bits_ptr + row * (ROW_STRIDE // 4) + SCALE_OFFSET - 1, mask=used, other=0)
                    value_bits = tl.load(scale_bits_ptr + row * (ROW_STRIDE // 4) + 2 * SCALE_OFFSET - 1, mask=used, other=0)
                    scores *= (key_bits.to(tl.float32, bitcast=True) * (scale * LOG2E))[None, :]
                else:
                    scores *= scale * LOG2E
            scores = tl.where(used[None, :] & (token[None, :] <= position[:, None]), scores, float("-inf"))

            new_top = tl.maximum(top, tl.max(scores, axis=1))
            base_line = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing visible yet
            weight = tl.exp2(scores - base_line[:, None])
            decay = tl.exp2(top - base_line)
            total = total * decay + tl.sum(weight, axis=1)
            top = new_top
            if FORMAT == "int4":
                weight = (weight * (value_bits & -16).to(tl.float32, bitcast=True)[None, :]).to(DOT)
                shift = tl.sum(weight.to(tl.float32) * (value_bits & 0xF).to(tl.float32)[None, :], axis=1)
                acc = tl.dot(weight, (value & 0xF).to(DOT), acc=acc * decay[:, None], input_precision="ieee") - shift[:, None]
                acc_odd = tl.dot(weight, (value >> 4).to(DOT), acc=acc_odd * decay[:, None], input_precision="ieee") - shift[:, None]
            else:
                if FORMAT == "int8":
                    weight *= value_bits.to(tl.float32, bitcast=True)[None, :]
                acc = tl.dot(weight.to(DOT), value.to(DOT), acc=acc * decay[:, None], input_precision="ieee")

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
def rotate_query_kernel(query_ptr, signs_ptr, out_ptr, DIM: tl.constexpr, LOG2_DIM: tl.constexpr):
    dim = tl.arange(0, DIM)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(query_ptr + row * DIM + dim).to(tl.float32) * tl.load(signs_ptr + dim)
    x = tl.reshape(hadamard(tl.reshape(x, (1, DIM)), 1, DIM, LOG2_DIM), (DIM,))
    tl.store(out_ptr + row * DIM + dim, x / DIM)


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
    flat_rows: torch.Tensor,
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
    if rotated:
        rotated_query = torch.empty_like(query, dtype=torch.float32)
        rotate_query_kernel[(tokens * q_heads,)](query, signs, rotated_query, DIM=dim, LOG2_DIM=log2_dim, num_warps=1)
        query = rotated_query

    splits = choose_splits(requests * heads, capacity, query.device)
    part_out = torch.empty(tokens, q_heads, splits, dim, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(tokens, q_heads, splits, dtype=torch.float32, device=query.device)
    # Decode batches are uniform, so this fits all queries of a request; where it does not, the kernel loops.
    rows_m = -(-tokens // requests) * layout.group_size
    block_m = min(64, max(16, triton.next_power_of_2(rows_m)))
    codes = flat_rows.view({"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[layout.row_format])
    attend_kernel[(splits, requests * heads)](
        query,
        query_start_loc,
        seq_lens,
        codes,
        flat_rows.view(torch.int32),
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
        ROW_STRIDE=codes.shape[1],
        VALUE_OFFSET=layout.value_offset,
        SPLITS=splits,
        BLOCK_M=block_m,
        DOT=tl.float32 if INTERPRETED else tl.bfloat16,  # the interpreter's bf16 product is wrong
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
