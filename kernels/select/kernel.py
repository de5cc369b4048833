"""Triton version of `select`: one scan of the codes, then passes over small integers. Equal to the reference to the last token.

Launches, all with grids fixed by shapes: project (queries to int8 sketch space), scan (scores of every tile, the only pass that
reads codes), total (softmax normalisers), weigh (mean weight of each token, its key, the histogram), threshold (the budget),
ties and mark (who is in, chunk by chunk), emit (ascending indices). Requests that need no scan leave each launch at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..layout import KVLayout
from ..policy import SelectionPolicy
from ..sketch import Selection, Sketch, SketchBasis
from .reference import LOG2E, MASS_ONE, NUM_KEYS, QUERY_TOP, STEPS, WEIGHT_BITS

INTERPRETED = triton.knobs.runtime.interpret
CHUNK = 2048
"""Tokens one program of the later passes handles."""
FINE = 32
"""Keys of one coarse bin."""
TILES_AT_ONCE = 8
"""128-token tiles one program of the scan handles, one after another."""
MIN_DEPTH = tl.constexpr(32)
"""The inner length of an int8 matrix product is at least this; shorter codes are padded with zeros in registers."""
EXACT = {"enable_fp_fusion": False}
"""A fused multiply-add rounds once where the reference rounds twice."""


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, of |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def exp2_eighth(steps):
    """`2^(-steps/8)` rounded to 17 significant bits (`reference.exp2_table`)."""
    bits = tl.exp2(steps.to(tl.float32) * -0.125).to(tl.int32, bitcast=True)
    return ((bits + 0x40) & -0x80).to(tl.float32, bitcast=True)


@triton.jit
def high_nibbles(x, INTERPRETED: tl.constexpr):
    """The high nibble of each byte in place: 16 times its value as int8."""
    if INTERPRETED:
        return (x & -16).to(tl.int8)
    return tl.inline_asm_elementwise("and.b32 $0, $1, 0xF0F0F0F0;", "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def low_nibbles(x, INTERPRETED: tl.constexpr):
    """The low nibble of each byte moved up: 16 times its value as int8."""
    if INTERPRETED:
        return (x << 4).to(tl.int8)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xF0F0F0F0; }", "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def project_kernel(
    query_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    maps_ptr,
    map_scales_ptr,
    codes_ptr,
    scales_ptr,
    last_visible_ptr,
    histogram_ptr,
    coarse_ptr,
    sums_ptr,
    query_stride,
    num_tokens,
    unit,
    dense_below,
    QUERY_TOP: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    REPRESENTATIVES: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    FINE: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    pair = request * HEADS + head
    length = tl.load(seq_lens_ptr + request)
    first = tl.load(query_start_loc_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - first
    if (length <= dense_below) | (q_len <= 0):
        return
    tl.store(histogram_ptr + pair * NUM_KEYS + tl.arange(0, NUM_KEYS), tl.zeros([NUM_KEYS], tl.int32))
    tl.store(coarse_ptr + pair * (NUM_KEYS // FINE) + tl.arange(0, NUM_KEYS // FINE), tl.zeros([NUM_KEYS // FINE], tl.int32))
    tl.store(sums_ptr + pair * 2 + tl.arange(0, 2), tl.zeros([2], tl.int64))

    row = tl.arange(0, ROWS)
    i, g = row // GROUP, row % GROUP
    used = tl.minimum(q_len, REPRESENTATIVES)
    offset = (q_len - 1) - (i * (q_len - 1)) // tl.maximum(used - 1, 1)
    real = i < used
    tl.store(last_visible_ptr + request * ROWS + row, tl.where(real, length - q_len + offset, -1))
    token = tl.minimum(tl.maximum(first + offset, 0), num_tokens - 1).to(tl.int64)
    dim = tl.arange(0, DIM)
    q = tl.load(query_ptr + token[:, None] * query_stride + (head * GROUP + g)[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
    q = q.to(tl.float32)
    q_max = tl.maximum(tl.max(tl.abs(q), axis=1), 1e-30)
    rounded = round_even(q * tl.div_rn(tl.full([ROWS], QUERY_TOP, tl.float32), q_max)[:, None]).to(tl.int32)
    high = (rounded + 64) >> 7
    low = rounded - (high << 7)
    rank = tl.arange(0, RANK)
    maps = tl.load(maps_ptr + (head * DIM + dim)[:, None] * RANK + rank[None, :])
    projected = tl.dot(high.to(tl.int8), maps, out_dtype=tl.int32) * 128 + tl.dot(low.to(tl.int8), maps, out_dtype=tl.int32)
    z = projected.to(tl.float32) * tl.load(map_scales_ptr + head * RANK + rank)[None, :]
    z_max = tl.maximum(tl.max(tl.abs(z), axis=1), 1e-30)
    codes = round_even(z * tl.div_rn(tl.full([ROWS], 127.0, tl.float32), z_max)[:, None]).to(tl.int8)
    # Even dimensions first, then odd ones: the order in which nibbles unpack.
    place = rank // 2 + (rank % 2) * (RANK // 2)
    tl.store(codes_ptr + (pair * ROWS + row)[:, None] * RANK + place[None, :], codes)
    tl.store(scales_ptr + pair * ROWS + row, (z_max * q_max) * unit)


@triton.jit
def load_bytes(ptr, byte, COUNT: tl.constexpr, DEPTH: tl.constexpr):
    """The first `COUNT` of `DEPTH` bytes, then zeros."""
    if COUNT == DEPTH:
        return tl.load(ptr + byte)
    return tl.load(ptr + byte, mask=byte < COUNT, other=0)


@triton.jit
def scan_tile(
    tile,
    block_table_ptr,
    key_codes_ptr,
    key_scales_ptr,
    query_even,
    query_odd,
    query_scale,
    last_visible,
    below_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    head,
    base,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Scores one tile of tokens for all query rows: its maximum, its sum, and how far below the maximum each token is."""
    CODE_BYTES: tl.constexpr = RANK * BITS // 8
    DEPTH: tl.constexpr = CODE_BYTES if CODE_BYTES > MIN_DEPTH else MIN_DEPTH
    row, offset, byte = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    block = tl.load(block_table_ptr + tile).to(tl.int64)
    key_row = (block * HEADS + head) * BLOCK + offset
    packed = load_bytes(key_codes_ptr + key_row[:, None] * CODE_BYTES, byte[None, :], CODE_BYTES, DEPTH)
    key_scale = tl.load(key_scales_ptr + key_row).to(tl.float32)
    if BITS == 4:
        dots = tl.dot(low_nibbles(packed, INTERPRETED), query_even, out_dtype=tl.int32)
        dots = tl.dot(high_nibbles(packed, INTERPRETED), query_odd, acc=dots, out_dtype=tl.int32) >> 4
    else:
        dots = tl.dot(packed, query_even, out_dtype=tl.int32)
    steps = (dots.to(tl.float32) * key_scale[:, None]) * query_scale[None, :]
    score = round_even(tl.minimum(tl.maximum(steps, -1048576.0), 1048576.0)).to(tl.int32)
    if MASKED:
        visible = (tile * BLOCK + offset)[:, None] <= last_visible[None, :]
        tile_max = tl.max(tl.where(visible, score, -2097152), axis=0)
        below = tl.where(visible, tl.minimum(tile_max[None, :] - score, 255), 255)
        weight = tl.where(visible, round_even(exp2_eighth(below) * 16384.0), 0.0).to(tl.int32)
    else:
        tile_max = tl.max(score, axis=0)
        below = tl.minimum(tile_max[None, :] - score, 255)
        weight = round_even(exp2_eighth(below) * 16384.0).to(tl.int32)
    cell = (base + tile) * KEPT + row
    kept = row < KEPT
    tl.store(below_ptr + cell[:, None] * BLOCK + offset[None, :], tl.trans(below.to(tl.uint8)), mask=kept[:, None])
    tl.store(tile_max_ptr + cell, tile_max, mask=kept)
    tl.store(tile_sum_ptr + cell, tl.sum(weight, axis=0), mask=kept)


@triton.jit
def scan_kernel(
    seq_lens_ptr,
    query_start_loc_ptr,
    block_table_ptr,
    block_table_stride,
    key_codes_ptr,
    key_scales_ptr,
    query_codes_ptr,
    query_scales_ptr,
    last_visible_ptr,
    below_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    dense_below,
    max_tiles,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    group, pair = tl.program_id(0), tl.program_id(1)
    request, head = pair // HEADS, pair % HEADS
    length = tl.load(seq_lens_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - tl.load(query_start_loc_ptr + request)
    if (length <= dense_below) | (group * TILES_AT_ONCE * BLOCK >= length) | (q_len <= 0):
        return
    row = tl.arange(0, ROWS)
    query_scale = tl.load(query_scales_ptr + pair * ROWS + row)
    last_visible = tl.load(last_visible_ptr + request * ROWS + row)
    query_base = query_codes_ptr + (pair * ROWS + row)[None, :] * RANK
    CODE_BYTES: tl.constexpr = RANK * BITS // 8
    DEPTH: tl.constexpr = CODE_BYTES if CODE_BYTES > MIN_DEPTH else MIN_DEPTH
    byte = tl.arange(0, DEPTH)
    stored = (byte < CODE_BYTES)[:, None]
    if BITS == 4:
        query_even = tl.load(query_base + byte[:, None], mask=stored, other=0)
        query_odd = tl.load(query_base + (RANK // 2 + byte)[:, None], mask=stored, other=0)
    else:
        # 8-bit codes are not packed: the dimensions back in their own order.
        query_even = tl.load(query_base + (byte // 2 + (byte % 2) * (RANK // 2))[:, None], mask=stored, other=0)
        query_odd = query_even
    block_table_ptr += request.to(tl.int64) * block_table_stride
    base = pair.to(tl.int64) * max_tiles
    first = group * TILES_AT_ONCE
    last = tl.minimum(first + TILES_AT_ONCE, tl.cdiv(length, BLOCK))
    whole = tl.minimum(last, (length - q_len + 1) // BLOCK)  # tiles that every query sees whole
    for tile in range(first, whole):
        scan_tile(
            tile, block_table_ptr, key_codes_ptr, key_scales_ptr, query_even, query_odd, query_scale, last_visible, below_ptr,
            tile_max_ptr, tile_sum_ptr, head, base, False, HEADS, RANK, BITS, ROWS, KEPT, BLOCK, INTERPRETED,
        )  # fmt: skip
    for tile in range(tl.maximum(first, whole), last):
        scan_tile(
            tile, block_table_ptr, key_codes_ptr, key_scales_ptr, query_even, query_odd, query_scale, last_visible, below_ptr,
            tile_max_ptr, tile_sum_ptr, head, base, True, HEADS, RANK, BITS, ROWS, KEPT, BLOCK, INTERPRETED,
        )  # fmt: skip


@triton.jit
def total_kernel(
    seq_lens_ptr,
    last_visible_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    top_ptr,
    share_ptr,
    dense_below,
    max_tiles,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TWO_TO_72: tl.constexpr,
):
    pair = tl.program_id(0)
    request = pair // HEADS
    length = tl.load(seq_lens_ptr + request)
    if length <= dense_below:
        return
    tiles = tl.cdiv(length, BLOCK)
    row = tl.arange(0, ROWS)
    kept = row < KEPT
    base = pair.to(tl.int64) * max_tiles * KEPT
    top = tl.full([ROWS], -2097152, tl.int32)
    for start in range(0, tiles, TILE):
        tile = start + tl.arange(0, TILE)
        mask = (tile < tiles)[:, None] & kept[None, :]
        top = tl.maximum(top, tl.max(tl.load(tile_max_ptr + base + tile[:, None] * KEPT + row[None, :], mask=mask, other=-2097152), axis=0))
    total = tl.zeros([ROWS], tl.int64)
    for start in range(0, tiles, TILE):
        tile = start + tl.arange(0, TILE)
        mask = (tile < tiles)[:, None] & kept[None, :]
        tile_max = tl.load(tile_max_ptr + base + tile[:, None] * KEPT + row[None, :], mask=mask, other=-2097152)
        tile_sum = tl.load(tile_sum_ptr + base + tile[:, None] * KEPT + row[None, :], mask=mask, other=0)
        factor = (exp2_eighth(tl.minimum(top[None, :] - tile_max, 512)) * 268435456.0).to(tl.int64)
        total += tl.sum(tile_sum.to(tl.int64) * factor, axis=0)
    last_visible = tl.load(last_visible_ptr + request * ROWS + row)
    rows = tl.sum((last_visible >= 0).to(tl.int32))
    numerator = tl.div_rn(tl.full([ROWS], TWO_TO_72, tl.float32), (rows + row * 0).to(tl.float32))
    share = tl.div_rn(numerator, tl.maximum(total.to(tl.float32), 1.0))
    tl.store(top_ptr + pair * ROWS + row, top)
    tl.store(share_ptr + pair * ROWS + row, tl.where(last_visible >= 0, share, 0.0))


@triton.jit
def weight_of(key):
    """The smallest integer weight that has this key, as int64."""
    value = ((key - 1 + 8128) << 17).to(tl.float32, bitcast=True)
    return tl.where(key > 0, tl.minimum(value, 2147483648.0), 0.0).to(tl.int64)


@triton.jit
def weigh_kernel(
    seq_lens_ptr,
    query_start_loc_ptr,
    below_ptr,
    tile_max_ptr,
    top_ptr,
    share_ptr,
    keys_ptr,
    coarse_ptr,
    sums_ptr,
    dense_below,
    max_tiles,
    sinks,
    window,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    FINE: tl.constexpr,
):
    chunk, pair = tl.program_id(0), tl.program_id(1)
    request = pair // HEADS
    length = tl.load(seq_lens_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - tl.load(query_start_loc_ptr + request)
    if (length <= dense_below) | (chunk * TILES * BLOCK >= length) | (q_len <= 0):
        return
    tile = chunk * TILES + tl.arange(0, TILES)
    offset = tl.arange(0, BLOCK)
    token = tile[:, None] * BLOCK + offset[None, :]
    scanned = tile * BLOCK < length  # whole tiles, so that loads and stores stay wide
    base = (pair.to(tl.int64) * max_tiles + tile) * KEPT
    weight = tl.zeros([TILES, BLOCK], tl.int32)
    for n in tl.static_range(KEPT):
        top = tl.load(top_ptr + pair * ROWS + n)
        share = tl.load(share_ptr + pair * ROWS + n)
        tile_max = tl.load(tile_max_ptr + base + n, mask=scanned, other=-2097152)
        factor = exp2_eighth(tl.minimum(top - tile_max, 512)) * share
        below = tl.load(below_ptr + (base + n)[:, None] * BLOCK + offset[None, :], mask=scanned[:, None], other=255).to(tl.int32)
        weight += (exp2_eighth(below) * factor[:, None]).to(tl.int32)
    key = tl.where(weight > 0, (weight.to(tl.float32).to(tl.int32, bitcast=True) >> 17) - 8127, 0)
    forced = (token < sinks) | (token >= length - tl.maximum(window, q_len))
    free = (forced == 0) & (token < length)
    tl.store(
        keys_ptr + pair.to(tl.int64) * max_tiles * BLOCK + token,
        tl.where(free, key, NUM_KEYS - 1).to(tl.int16),
        mask=scanned[:, None],
    )
    # Two sums: what the free tokens weigh by their keys, and what the forced ones weigh.
    free_weight = tl.sum(tl.sum(tl.where(free, weight_of(key), 0), axis=1), axis=0)
    forced_weight = tl.sum(tl.sum(tl.where(forced & (token < length), weight, 0).to(tl.int64), axis=1), axis=0)
    tl.atomic_add(sums_ptr + pair * 2, free_weight, sem="relaxed")
    if forced_weight > 0:
        tl.atomic_add(sums_ptr + pair * 2 + 1, forced_weight, sem="relaxed")
    COARSE: tl.constexpr = NUM_KEYS // FINE
    coarse = tl.where(free, key // FINE, COARSE - 1)  # the last bin takes what is not counted: no weight has such a key
    count = tl.histogram(tl.reshape(coarse, [TILES * BLOCK]), COARSE)
    bin = tl.arange(0, COARSE)
    tl.atomic_add(coarse_ptr + pair * COARSE + bin, count, mask=(count > 0) & (bin < COARSE - 1), sem="relaxed")


@triton.jit
def coarse_cut(coarse_ptr, pair, max_tokens, COARSE: tl.constexpr):
    """The highest coarse bin at or above which `max_tokens` tokens lie, else 0; and the number of all tokens."""
    bin = tl.arange(0, COARSE)
    count = tl.load(coarse_ptr + pair * COARSE + bin, mask=bin < COARSE - 1, other=0)
    above = tl.cumsum(count, axis=0, reverse=True)
    return tl.maximum(tl.sum((above >= max_tokens).to(tl.int32)) - 1, 0), tl.sum(count)


@triton.jit
def count_kernel(
    seq_lens_ptr,
    keys_ptr,
    coarse_ptr,
    histogram_ptr,
    dense_below,
    max_tokens,
    row_tokens,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    FINE: tl.constexpr,
):
    """The exact histogram of the keys that can be chosen; the many weak ones never enter it."""
    chunk, pair = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens_ptr + pair // HEADS)
    if (length <= dense_below) | (chunk * TILES * BLOCK >= length):
        return
    cut, _ = coarse_cut(coarse_ptr, pair, max_tokens, NUM_KEYS // FINE)
    tile = chunk * TILES + tl.arange(0, TILES)
    token = tile[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    key = tl.load(keys_ptr + pair.to(tl.int64) * row_tokens + token, mask=(tile * BLOCK < length)[:, None], other=0).to(tl.int32)
    strong = (key >= cut * FINE) & (key < NUM_KEYS - 1) & (token < length)
    tl.atomic_add(histogram_ptr + pair * NUM_KEYS + key, 1, mask=strong, sem="relaxed")


@triton.jit
def pivot_of(budget, count, above, key):
    """The key at which the `budget` strongest end, and how many tokens of that key they include."""
    pivot = tl.maximum(tl.sum((count >= budget).to(tl.int32)) - 1, 0)
    return pivot, budget - tl.sum(tl.where(key == pivot, above, 0))


@triton.jit
def threshold_kernel(
    seq_lens_ptr,
    query_start_loc_ptr,
    coarse_ptr,
    histogram_ptr,
    sums_ptr,
    threshold_ptr,
    mass_ptr,
    dense_below,
    min_tokens,
    max_tokens,
    mass_parts,
    run_hits,
    HEADS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    FINE: tl.constexpr,
    MASS_ONE: tl.constexpr,
):
    pair = tl.program_id(0)
    request = pair // HEADS
    length = tl.load(seq_lens_ptr + request)
    q_len = tl.load(query_start_loc_ptr + request + 1) - tl.load(query_start_loc_ptr + request)
    if (length <= dense_below) | (q_len <= 0):
        tl.store(mass_ptr + pair, tl.where((length > 0) & (q_len > 0), 1.0, 0.0))
        return
    cut, all_tokens = coarse_cut(coarse_ptr, pair, max_tokens, NUM_KEYS // FINE)
    key = tl.arange(0, NUM_KEYS)
    histogram = tl.load(histogram_ptr + pair * NUM_KEYS + key)
    forced_mass = tl.load(sums_ptr + pair * 2 + 1)
    total = tl.load(sums_ptr + pair * 2) + forced_mass
    bin_weight = weight_of(key)
    count = tl.cumsum(histogram, axis=0, reverse=True)
    above = count - histogram
    mass = histogram.to(tl.int64) * bin_weight
    reached = tl.cumsum(mass, axis=0, reverse=True) + forced_mass

    target = total * mass_parts
    enough = (reached * MASS_ONE >= target) & (key >= cut * FINE)
    last = cut * FINE + tl.sum(enough.to(tl.int32)) - 1
    at_last = key == last
    before = tl.sum(tl.where(at_last, reached - mass, 0))
    unit = tl.maximum(tl.sum(tl.where(at_last, bin_weight, 0)) * MASS_ONE, 1)
    missing = tl.maximum(target - before * MASS_ONE, 0)
    budget = tl.sum(tl.where(at_last, above, 0)) + (missing + unit - 1) // unit
    # Below the cut lie only tokens behind the first `max_tokens`: a mass not reached above it needs them all.
    budget = tl.where((last < cut * FINE) & (cut > 0), max_tokens, budget)
    budget = tl.minimum(tl.maximum(budget, min_tokens), max_tokens)
    budget = tl.minimum(budget, all_tokens).to(tl.int32)

    pivot, need = pivot_of(budget, count, above, key)
    run_pivot, run_need = pivot_of(tl.minimum(budget, run_hits), count, above, key)
    at_pivot = key == pivot
    inside = tl.sum(tl.where(at_pivot, reached - mass, 0)) + need.to(tl.int64) * tl.sum(tl.where(at_pivot, bin_weight, 0))
    tl.store(mass_ptr + pair, tl.div_rn(inside.to(tl.float32), tl.maximum(total.to(tl.float32), 1.0)))
    tl.store(threshold_ptr + pair * 4, pivot)
    tl.store(threshold_ptr + pair * 4 + 1, need)
    tl.store(threshold_ptr + pair * 4 + 2, run_pivot)
    tl.store(threshold_ptr + pair * 4 + 3, run_need)


@triton.jit
def ties_kernel(seq_lens_ptr, keys_ptr, threshold_ptr, ties_ptr, dense_below, max_tokens, chunks, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    chunk, pair = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens_ptr + pair // HEADS)
    if (length <= dense_below) | (chunk * CHUNK >= length):
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    key = tl.load(keys_ptr + pair.to(tl.int64) * max_tokens + token, mask=token < length, other=-1).to(tl.int32)
    pivot, run_pivot = tl.load(threshold_ptr + pair * 4), tl.load(threshold_ptr + pair * 4 + 2)
    cell = (pair.to(tl.int64) * chunks + chunk) * 2
    tl.store(ties_ptr + cell, tl.sum((key == pivot).to(tl.int32)))
    tl.store(ties_ptr + cell + 1, tl.sum((key == run_pivot).to(tl.int32)))


@triton.jit
def last_tie(keys_ptr, ties_ptr, pivot, need, length, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Index of the `need`-th token whose key is `pivot`, or −1 for none."""
    each = tl.arange(0, CHUNKS)
    ties = tl.load(ties_ptr + each * 2, mask=(each < chunks) & (each * CHUNK < length), other=0)
    before = tl.cumsum(ties, axis=0) - ties
    chunk = tl.maximum(tl.sum(((before < need) & (each * CHUNK < length)).to(tl.int32)) - 1, 0)
    rank = need - tl.sum(tl.where(each == chunk, before, 0))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    tie = (tl.load(keys_ptr + token, mask=token < length, other=-1).to(tl.int32) == pivot).to(tl.int32)
    found = (tie > 0) & (tl.cumsum(tie, axis=0) == rank)
    return tl.sum(tl.where(found & (need > 0), token + 1, 0)) - 1


@triton.jit
def limit_kernel(
    seq_lens_ptr,
    keys_ptr,
    threshold_ptr,
    ties_ptr,
    dense_below,
    row_tokens,
    chunks,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Turns "so many tokens of the pivot key" into "those up to this index"."""
    pair = tl.program_id(0)
    length = tl.load(seq_lens_ptr + pair // HEADS)
    if length <= dense_below:
        return
    keys_ptr += pair.to(tl.int64) * row_tokens
    ties_ptr += pair.to(tl.int64) * chunks * 2
    for which in tl.static_range(2):
        cell = threshold_ptr + pair * 4 + 2 * which
        limit = last_tie(keys_ptr, ties_ptr + which, tl.load(cell), tl.load(cell + 1), length, chunks, CHUNK, CHUNKS)
        tl.store(cell + 1, limit)


@triton.jit
def mark_kernel(
    seq_lens_ptr,
    keys_ptr,
    threshold_ptr,
    marks_ptr,
    chunk_counts_ptr,
    dense_below,
    row_tokens,
    chunks,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    RADIUS: tl.constexpr,
    FORCED: tl.constexpr,
):
    chunk, pair = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens_ptr + pair // HEADS)
    if (length <= dense_below) | (chunk * CHUNK >= length):
        return
    pivot, limit = tl.load(threshold_ptr + pair * 4), tl.load(threshold_ptr + pair * 4 + 1)
    run_pivot, run_limit = tl.load(threshold_ptr + pair * 4 + 2), tl.load(threshold_ptr + pair * 4 + 3)
    base = pair.to(tl.int64) * row_tokens
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    key = tl.load(keys_ptr + base + token, mask=token < length, other=-1).to(tl.int32)
    selected = (key > pivot) | ((key == pivot) & (token <= limit))  # forced tokens have the largest key
    for distance in tl.static_range(-RADIUS, RADIUS + 1):
        near = token + distance
        key = tl.load(keys_ptr + base + near, mask=(near >= 0) & (near < length), other=-1).to(tl.int32)
        selected |= ((key > run_pivot) & (key != FORCED)) | ((key == run_pivot) & (near <= run_limit))
    selected = (selected & (token < length)).to(tl.int32)
    tl.store(marks_ptr + base + token, selected.to(tl.int8), mask=token < row_tokens)
    tl.store(chunk_counts_ptr + pair.to(tl.int64) * chunks + chunk, tl.sum(selected))


@triton.jit
def emit_kernel(
    seq_lens_ptr,
    query_start_loc_ptr,
    marks_ptr,
    chunk_counts_ptr,
    indices_ptr,
    counts_ptr,
    dense_below,
    max_tokens,
    chunks,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CAPACITY_PADDED: tl.constexpr,
):
    chunk, pair = tl.program_id(0), tl.program_id(1)
    request = pair // HEADS
    length = tl.load(seq_lens_ptr + request)
    if tl.load(query_start_loc_ptr + request + 1) <= tl.load(query_start_loc_ptr + request):
        length = length * 0
    indices_ptr += pair.to(tl.int64) * CAPACITY
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    if length <= dense_below:
        tl.store(indices_ptr + token, tl.where(token < length, token, -1), mask=token < CAPACITY)
        if chunk == 0:
            tl.store(counts_ptr + pair, tl.maximum(length, 0))
        return
    last = (length - 1) // CHUNK
    if chunk > last:
        return
    each = tl.arange(0, CHUNKS)
    count = tl.load(chunk_counts_ptr + pair.to(tl.int64) * chunks + each, mask=each <= last, other=0)
    place = tl.sum(tl.where(each < chunk, count, 0))
    mark = tl.load(marks_ptr + pair.to(tl.int64) * max_tokens + token, mask=token < length, other=0).to(tl.int32)
    tl.store(indices_ptr + place + tl.cumsum(mark, axis=0) - mark, token, mask=mark > 0)
    if chunk == last:
        total = tl.sum(count)
        tl.store(counts_ptr + pair, total)
        tail = tl.arange(0, CAPACITY_PADDED)
        tl.store(indices_ptr + tail, -1, mask=(tail >= total) & (tail < CAPACITY))


@dataclass(frozen=True)
class Workspace:
    """Scratch of one selection, as large as its batch can become; every launch reads only what an earlier one wrote."""

    query_codes: torch.Tensor
    query_scales: torch.Tensor
    last_visible: torch.Tensor
    below: torch.Tensor
    tile_max: torch.Tensor
    tile_sum: torch.Tensor
    top: torch.Tensor
    share: torch.Tensor
    keys: torch.Tensor
    histogram: torch.Tensor
    coarse: torch.Tensor
    sums: torch.Tensor
    threshold: torch.Tensor
    ties: torch.Tensor
    marks: torch.Tensor
    chunk_counts: torch.Tensor


@functools.lru_cache(maxsize=4)
def workspace(requests: int, max_tiles: int, heads: int, rows: int, kept: int, rank: int, block: int, device: torch.device) -> Workspace:
    """Shared by all layers of a process; allocated once per batch shape."""
    tokens = max_tiles * block
    chunks = -(-tokens // CHUNK)
    pairs = requests * heads

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Workspace(
        query_codes=empty(pairs, rows, rank, dtype=torch.int8),
        query_scales=empty(pairs, rows, dtype=torch.float32),
        last_visible=empty(requests, rows),
        below=empty(pairs, max_tiles, kept, block, dtype=torch.uint8),
        tile_max=empty(pairs, max_tiles, kept),
        tile_sum=empty(pairs, max_tiles, kept),
        top=empty(pairs, rows),
        share=empty(pairs, rows, dtype=torch.float32),
        keys=empty(pairs, tokens, dtype=torch.int16),
        histogram=empty(pairs, NUM_KEYS),
        coarse=empty(pairs, NUM_KEYS // FINE),
        sums=empty(pairs, 2, dtype=torch.int64),
        threshold=empty(pairs, 4),
        ties=empty(pairs, chunks, 2),
        marks=empty(pairs, tokens, dtype=torch.int8),
        chunk_counts=empty(pairs, chunks),
    )


def select(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    sketch: Sketch,
    basis: SketchBasis,
    layout: KVLayout,
    policy: SelectionPolicy,
    scale: float,
    representatives: int,
) -> Selection:
    requests, max_tiles, heads, device = seq_lens.shape[0], block_table.shape[1], layout.num_kv_heads, query.device
    indices = torch.empty(requests, heads, policy.capacity, dtype=torch.int32, device=device)
    counts = torch.empty(requests, heads, dtype=torch.int32, device=device)
    mass = torch.empty(requests, heads, dtype=torch.float32, device=device)
    if not requests:
        return Selection(indices, counts, mass)
    block, rank = layout.block_size, layout.sketch_rank
    kept = representatives * layout.group_size
    rows = max(8, triton.next_power_of_2(kept))
    tokens, chunks = max_tiles * block, -(-max_tiles * block // CHUNK)
    w = workspace(requests, max_tiles, heads, rows, kept, rank, block, device)
    pairs = requests * heads
    shape = {"HEADS": heads, "ROWS": rows, "KEPT": kept, "BLOCK": block}
    maps, map_scales = basis.query_codes, basis.query_scales
    assert query.stride()[1:] == (layout.head_dim, 1)
    assert sketch.codes.is_contiguous()

    project_kernel[(requests, heads)](
        query, query_start_loc, seq_lens, maps, map_scales, w.query_codes, w.query_scales, w.last_visible, w.histogram, w.coarse, w.sums,
        query.stride(0), query.shape[0], STEPS * LOG2E * scale / (127 * QUERY_TOP), policy.dense_below,
        QUERY_TOP=QUERY_TOP, HEADS=heads, GROUP=layout.group_size, DIM=layout.head_dim, RANK=rank, REPRESENTATIVES=representatives,
        ROWS=rows, NUM_KEYS=NUM_KEYS, FINE=FINE, **EXACT,
    )  # fmt: skip
    scan_kernel[(triton.cdiv(max_tiles, TILES_AT_ONCE), pairs)](
        seq_lens, query_start_loc, block_table, block_table.stride(0), sketch.codes.view(torch.int8), sketch.scales, w.query_codes,
        w.query_scales, w.last_visible, w.below, w.tile_max, w.tile_sum, policy.dense_below, max_tiles,
        RANK=rank, BITS=layout.sketch_bits, TILES_AT_ONCE=TILES_AT_ONCE, INTERPRETED=INTERPRETED, num_warps=4, num_stages=3,
        **shape, **EXACT,
    )  # fmt: skip
    total_kernel[(pairs,)](
        seq_lens, w.last_visible, w.tile_max, w.tile_sum, w.top, w.share, policy.dense_below, max_tiles,
        TILE=min(256, triton.next_power_of_2(max_tiles)), TWO_TO_72=float(2 ** (42 + WEIGHT_BITS)), num_warps=8, **shape, **EXACT,
    )  # fmt: skip
    keys = {"HEADS": heads, "NUM_KEYS": NUM_KEYS, "FINE": FINE}
    grid = (chunks, pairs)
    weigh_kernel[grid](
        seq_lens, query_start_loc, w.below, w.tile_max, w.top, w.share, w.keys, w.coarse, w.sums,
        policy.dense_below, max_tiles, policy.sink_tokens, policy.window_tokens,
        TILES=CHUNK // block, ROWS=rows, KEPT=kept, BLOCK=block, num_warps=8, **keys, **EXACT,
    )  # fmt: skip
    count_kernel[grid](
        seq_lens, w.keys, w.coarse, w.histogram, policy.dense_below, policy.max_tokens, tokens,
        BLOCK=block, TILES=CHUNK // block, **keys,
    )  # fmt: skip
    threshold_kernel[(pairs,)](
        seq_lens, query_start_loc, w.coarse, w.histogram, w.sums, w.threshold, mass, policy.dense_below, policy.min_tokens,
        policy.max_tokens, round(policy.mass * MASS_ONE), policy.run_hits, MASS_ONE=MASS_ONE, num_warps=8, **keys, **EXACT,
    )  # fmt: skip
    chunked = {"HEADS": heads, "CHUNK": CHUNK}
    padded = triton.next_power_of_2(chunks)
    ties_kernel[grid](seq_lens, w.keys, w.threshold, w.ties, policy.dense_below, tokens, chunks, **chunked)
    limit_kernel[(pairs,)](seq_lens, w.keys, w.threshold, w.ties, policy.dense_below, tokens, chunks, CHUNKS=padded, num_warps=8, **chunked)
    mark_kernel[grid](
        seq_lens, w.keys, w.threshold, w.marks, w.chunk_counts, policy.dense_below, tokens, chunks,
        RADIUS=policy.run_radius if policy.run_hits else 0, FORCED=NUM_KEYS - 1, num_warps=8, **chunked,
    )  # fmt: skip
    emit_kernel[(max(chunks, triton.cdiv(policy.capacity, CHUNK)), pairs)](
        seq_lens, query_start_loc, w.marks, w.chunk_counts, indices, counts, policy.dense_below, tokens, chunks,
        CHUNKS=padded, CAPACITY=policy.capacity, CAPACITY_PADDED=triton.next_power_of_2(policy.capacity), num_warps=8, **chunked,
    )  # fmt: skip
    return Selection(indices, counts, mass)
