"""Triton version of the hot set: a lookup that lists the misses, then one launch that claims entries and reads the rows.

Two launches, because no row found by a step may be evicted by it: all lookups end before the first claim.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..layout import KVLayout
from .hot_set import WAYS, HotSet

if TYPE_CHECKING:
    from ..sketch import Selection

LOOKUP_TILE = 64
GATHER_ROWS = 64
GATHER_WORDS = 64
GATHER_WARPS = 8
GATHER_PROGRAMS_PER_SM = 4
INDEX_TILE = 1024


@triton.jit
def pool_rows(token, block_table_ptr, head, used, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Row index in the pool (int64) of token indices of one request and head."""
    block = tl.load(block_table_ptr + token // BLOCK, mask=used, other=0).to(tl.int64)
    return (block * HEADS + head) * BLOCK + token % BLOCK


@triton.jit
def set_of(tag, SETS_LOG2: tl.constexpr):
    return (tag * 2654435769 & 0xFFFFFFFF) >> (32 - SETS_LOG2)


@triton.jit(do_not_specialize=["block_table_stride", "tag_base"])
def lookup_kernel(
    indices_ptr,
    counts_ptr,
    block_table_ptr,
    block_table_stride,
    entries_ptr,
    clock_ptr,
    missed_ptr,
    missed_count_ptr,
    counters_ptr,
    row_index_ptr,
    tag_base,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    SETS_LOG2: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    now = (tl.load(clock_ptr) + 1) & 0x7FFFFFFF
    if (tile == 0) & (pair == 0):
        tl.store(clock_ptr + 1, now)
        tl.store(missed_count_ptr + ((now + 1) & 1), 0)
    column = tile * TILE + tl.arange(0, TILE)
    position = pair * CAPACITY + column
    count = tl.load(counts_ptr + pair)
    if tile * TILE >= count:
        tl.store(row_index_ptr + position, -1, mask=column < CAPACITY)
        return

    used = column < count
    token = tl.load(indices_ptr + position, mask=used, other=0)
    row = pool_rows(token, block_table_ptr + pair // HEADS * block_table_stride, pair % HEADS, used, HEADS, BLOCK)
    tag = row + tag_base
    first = set_of(tag, SETS_LOG2) * WAYS
    way = tl.arange(0, WAYS)
    entry = tl.load(entries_ptr + first[:, None] + way[None, :], mask=used[:, None], other=-1)
    match = tl.where((entry & 0xFFFFFFFF) == tag[:, None], WAYS - way[None, :], 0)
    match = tl.max(match, axis=1)
    found = used & (match > 0)
    slot = first + WAYS - match
    tl.store(entries_ptr + slot, now << 32 | tag, mask=found)
    tl.store(row_index_ptr + position, tl.where(found, slot, -1).to(tl.int32), mask=column < CAPACITY)

    missing = (used & (match == 0)).to(tl.int32)
    hits = tl.sum(found.to(tl.int32))
    misses = tl.sum(missing)
    if hits > 0:
        tl.atomic_add(counters_ptr, hits.to(tl.int64), sem="relaxed")
    if misses > 0:
        start = tl.atomic_add(missed_count_ptr + (now & 1), misses, sem="relaxed")
        rank = tl.cumsum(missing) - missing
        tl.store(missed_ptr + start + rank, position << 32 | row, mask=missing > 0)


@triton.jit
def claim(tag, pending, now, entries_ptr, SETS_LOG2: tl.constexpr, WAYS: tl.constexpr):
    """An entry for each pending tag: the oldest of its set, won by compare-and-swap.

    Returns `(slot, won)`: slot −1 where every entry of the set is in use by this step; `won` where this lane must bring
    the row, which it need not if another lane claimed an entry for the same tag in this step.
    """
    first = set_of(tag, SETS_LOG2) * WAYS
    way = tl.arange(0, WAYS)
    mine = now << 32 | tag
    slot = tag * 0 - 1
    won = tag < 0
    while tl.max(pending.to(tl.int32)) > 0:
        # Other processors are claiming too: read past the first-level cache.
        entry = tl.load(entries_ptr + first[:, None] + way[None, :], mask=pending[:, None], other=-1, cache_modifier=".cg")
        # An entry found before this launch carries this step's stamp, so a tag that matches with it was claimed by it.
        shared = tl.max(tl.where(entry == mine[:, None], WAYS - way[None, :], 0), axis=1)
        age = tl.where(entry == -1, 1 << 31, (now - (entry >> 32)) & 0x7FFFFFFF)
        oldest = tl.max(age * WAYS + (WAYS - 1 - way[None, :]), axis=1)
        victim = WAYS - 1 - oldest % WAYS
        expected = tl.sum(tl.where(way[None, :] == victim[:, None], entry, 0), axis=1)
        joins = pending & (shared > 0)
        tries = pending & (shared == 0) & (oldest >= WAYS)
        # No entry is ever −2: lanes that do not try compare with it and change nothing.
        seen = tl.atomic_cas(entries_ptr + first + victim, tl.where(tries, expected, -2), mine, sem="relaxed")
        wins = tries & (seen == expected)
        slot = tl.where(joins, first + WAYS - shared, tl.where(wins, first + victim, slot))
        won = won | wins
        pending = tries & (seen != expected)
    return slot, won


@triton.jit
def copy_rows(source_ptr, source, target_ptr, target, active, ROW_BYTES: tl.constexpr, WORDS_AT_ONCE: tl.constexpr):
    """Copies rows of 8-byte words, up to `WORDS_AT_ONCE` of each row in flight."""
    WORDS: tl.constexpr = ROW_BYTES // 8
    for first in tl.static_range(0, WORDS, WORDS_AT_ONCE):
        word = first + tl.arange(0, WORDS_AT_ONCE)[None, :]
        used = active[:, None] & (word < WORDS)
        data = tl.load(source_ptr + source.to(tl.int64)[:, None] * WORDS + word, mask=used, other=0)
        tl.store(target_ptr + target.to(tl.int64)[:, None] * WORDS + word, data, mask=used)


@triton.jit(do_not_specialize=["tag_base"])
def bring_kernel(
    pool_ptr,
    hot_ptr,
    entries_ptr,
    clock_ptr,
    missed_ptr,
    missed_count_ptr,
    counters_ptr,
    row_index_ptr,
    tag_base,
    SETS_LOG2: tl.constexpr,
    WAYS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS_AT_ONCE: tl.constexpr,
):
    now = tl.load(clock_ptr + 1)
    if tl.program_id(0) == 0:
        tl.store(clock_ptr, now)
    misses = tl.load(missed_count_ptr + (now & 1))
    brought = (misses * 0).to(tl.int64)
    bypassed = brought
    for start in range(tl.program_id(0) * ROWS, misses, tl.num_programs(0) * ROWS):
        lane = start + tl.arange(0, ROWS)
        pending = lane < misses
        miss = tl.load(missed_ptr + lane, mask=pending, other=0)
        position, row = miss >> 32, miss & 0xFFFFFFFF
        slot, won = claim(row + tag_base, pending, now, entries_ptr, SETS_LOG2, WAYS)
        bypass = pending & (slot < 0)
        slot = tl.where(bypass, (WAYS << SETS_LOG2) + position, slot)
        tl.store(row_index_ptr + position, slot.to(tl.int32), mask=pending)
        active = won | bypass
        copy_rows(pool_ptr, row, hot_ptr, slot, active, ROW_BYTES, WORDS_AT_ONCE)
        brought += tl.sum(active.to(tl.int64))
        bypassed += tl.sum(bypass.to(tl.int64))
        joined = tl.sum((pending & (active == 0)).to(tl.int64))
        if joined > 0:
            tl.atomic_add(counters_ptr, joined, sem="relaxed")
    if brought > 0:
        tl.atomic_add(counters_ptr + 1, brought, sem="relaxed")
    if bypassed > 0:
        tl.atomic_add(counters_ptr + 2, bypassed, sem="relaxed")


@triton.jit
def invalidate_rows(entries_ptr, tag, active, SETS_LOG2: tl.constexpr, WAYS: tl.constexpr):
    """Empties every entry that holds one of the tags."""
    way = tl.arange(0, WAYS)
    slot = (set_of(tag, SETS_LOG2) * WAYS)[:, None] + way[None, :]
    entry = tl.load(entries_ptr + slot, mask=active[:, None], other=-1)
    tl.store(entries_ptr + slot, -1, mask=active[:, None] & ((entry & 0xFFFFFFFF) == tag[:, None]))


@triton.jit(do_not_specialize=["num_tokens", "tag_base"])
def invalidate_kernel(
    slot_mapping_ptr,
    entries_ptr,
    num_tokens,
    tag_base,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SETS_LOG2: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    active = slot >= 0
    row = (slot // BLOCK * HEADS + tl.program_id(1)) * BLOCK + slot % BLOCK
    invalidate_rows(entries_ptr, row + tag_base, active, SETS_LOG2, WAYS)


@triton.jit(do_not_specialize=["block_table_stride"])
def pool_row_index_kernel(
    indices_ptr,
    counts_ptr,
    block_table_ptr,
    block_table_stride,
    row_index_ptr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used = column < tl.load(counts_ptr + pair)
    token = tl.load(indices_ptr + pair * CAPACITY + column, mask=used, other=0)
    row = pool_rows(token, block_table_ptr + pair // HEADS * block_table_stride, pair % HEADS, used, HEADS, BLOCK)
    tl.store(row_index_ptr + pair * CAPACITY + column, tl.where(used, row, -1).to(tl.int32), mask=column < CAPACITY)


@functools.cache
def _gather_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: enough to test the loop over programs
    return GATHER_PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def fetch(selection: Selection, block_table: torch.Tensor, rows: torch.Tensor, layout: KVLayout, hot: HotSet) -> torch.Tensor:
    requests, heads, capacity = selection.indices.shape
    row_index = torch.empty_like(selection.indices)
    geometry = {"SETS_LOG2": hot.entries.shape[0].bit_length() - 1, "WAYS": WAYS}
    lookup_kernel[(triton.cdiv(capacity, LOOKUP_TILE), requests * heads)](
        selection.indices,
        selection.counts,
        block_table,
        block_table.stride(0),
        hot.entries,
        hot.clock,
        hot.missed,
        hot.missed_count,
        hot.counters,
        row_index,
        hot.tag_base,
        HEADS=heads,
        BLOCK=layout.block_size,
        CAPACITY=capacity,
        TILE=LOOKUP_TILE,
        **geometry,
    )
    bring_kernel[(min(triton.cdiv(selection.indices.numel(), GATHER_ROWS), _gather_programs(hot.rows.device)),)](
        rows.view(torch.int64),
        hot.rows.view(torch.int64),
        hot.entries,
        hot.clock,
        hot.missed,
        hot.missed_count,
        hot.counters,
        row_index,
        hot.tag_base,
        ROW_BYTES=layout.row_bytes,
        ROWS=GATHER_ROWS,
        WORDS_AT_ONCE=min(GATHER_WORDS, triton.next_power_of_2(layout.row_bytes // 8)),
        num_warps=GATHER_WARPS,
        **geometry,
    )
    return row_index


def invalidate(slot_mapping: torch.Tensor, layout: KVLayout, hot: HotSet) -> None:
    tile = 32
    tokens = slot_mapping.numel()
    if tokens:
        invalidate_kernel[(triton.cdiv(tokens, tile), layout.num_kv_heads)](
            slot_mapping,
            hot.entries,
            tokens,
            hot.tag_base,
            HEADS=layout.num_kv_heads,
            BLOCK=layout.block_size,
            SETS_LOG2=hot.entries.shape[0].bit_length() - 1,
            WAYS=WAYS,
            TILE=tile,
            num_warps=1,
        )


def pool_row_index(selection: Selection, block_table: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    requests, heads, capacity = selection.indices.shape
    row_index = torch.empty_like(selection.indices)
    pool_row_index_kernel[(triton.cdiv(capacity, INDEX_TILE), requests * heads)](
        selection.indices,
        selection.counts,
        block_table,
        block_table.stride(0),
        row_index,
        HEADS=heads,
        BLOCK=layout.block_size,
        CAPACITY=capacity,
        TILE=INDEX_TILE,
    )
    return row_index
