"""Plain PyTorch definition of the hot set: exact LRU within each set, exact sharing of rows missed twice in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layout import KVLayout
from .hot_set import EMPTY, WAYS, HotSet

if TYPE_CHECKING:
    from ..sketch import Selection

CLOCK_MASK = 2**31 - 1
HASH_MULTIPLIER = 2654435769  # 2^32 / golden ratio: neighbouring rows fall into distant sets


def set_of(tag: torch.Tensor, sets: int) -> torch.Tensor:
    """Set number of int64 tags."""
    return (tag * HASH_MULTIPLIER & 0xFFFFFFFF) >> (33 - sets.bit_length())


def pool_row_index_reference(selection: Selection, block_table: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    indices, block_size = selection.indices, layout.block_size
    used = torch.arange(indices.shape[-1], device=indices.device) < selection.counts.unsqueeze(-1)
    token = indices.long().masked_fill(~used, 0)
    block = block_table.long().gather(1, (token // block_size).flatten(1)).view_as(token)
    head = torch.arange(layout.num_kv_heads, device=indices.device).view(1, -1, 1)
    row = (block * layout.num_kv_heads + head) * block_size + token % block_size
    return row.masked_fill(~used, -1).to(torch.int32)


def fetch_reference(selection: Selection, block_table: torch.Tensor, rows: torch.Tensor, layout: KVLayout, hot: HotSet) -> torch.Tensor:
    pool_row = pool_row_index_reference(selection, block_table, layout)
    position = (pool_row.flatten() >= 0).nonzero().squeeze(1)
    source = pool_row.flatten()[position].long()
    now = (hot.clock[0] + 1) & CLOCK_MASK
    hot.clock.fill_(now)
    slot = torch.full_like(source, -1)

    tag = source + hot.tag_base
    sets = set_of(tag, hot.entries.shape[0])
    same = (hot.entries[sets] & 0xFFFFFFFF) == tag.unsqueeze(1)  # the tag field of an empty entry is no row's tag
    found = same.any(1)
    slot[found] = sets[found] * WAYS + same[found].to(torch.uint8).argmax(1)
    hot.entries.view(-1)[slot[found]] = now << 32 | tag[found]

    missed, inverse = torch.unique(tag[~found], return_inverse=True)
    missed_slot = _claim(missed, now, hot)
    slot[~found] = missed_slot[inverse]
    bypassed = slot < 0
    slot[bypassed] = hot.capacity + position[bypassed]

    brought = torch.cat([missed_slot[missed_slot >= 0], slot[bypassed]])
    origin = torch.cat([(missed - hot.tag_base)[missed_slot >= 0], source[bypassed]])
    hot.rows[brought] = rows.view(-1, rows.shape[-1])[origin]
    hot.counters.add_(torch.tensor([len(slot) - len(brought), len(brought), int(bypassed.sum())]))

    row_index = torch.full_like(pool_row, -1)
    row_index.view(-1)[position] = slot.to(torch.int32)
    return row_index


def _claim(tag: torch.Tensor, now: torch.Tensor, hot: HotSet) -> torch.Tensor:
    """Entries for distinct tags that were not found: the j-th miss of a set takes its j-th oldest entry, −1 if none is left."""
    sets, order = set_of(tag, hot.entries.shape[0]).sort(stable=True)
    touched, first, per_set = torch.unique_consecutive(sets, return_inverse=True, return_counts=True)
    rank = torch.arange(len(sets), device=tag.device) - (per_set.cumsum(0) - per_set)[first]
    entries = hot.entries[touched]
    age = ((now - (entries >> 32)) & CLOCK_MASK).masked_fill(entries == EMPTY, 2**31)
    age, way = age.sort(dim=1, descending=True, stable=True)
    free = (rank < WAYS) & (age[first, rank.clamp(max=WAYS - 1)] > 0)
    slot = torch.where(free, sets * WAYS + way[first, rank.clamp(max=WAYS - 1)], -1)
    hot.entries.view(-1)[slot[free]] = now << 32 | tag[order][free]
    return torch.empty_like(slot).scatter_(0, order, slot)


def invalidate_reference(slot_mapping: torch.Tensor, layout: KVLayout, hot: HotSet) -> None:
    slot = slot_mapping[slot_mapping >= 0]
    block, offset = slot // layout.block_size, slot % layout.block_size
    head = torch.arange(layout.num_kv_heads, device=slot.device)
    tag = (((block * layout.num_kv_heads).unsqueeze(1) + head) * layout.block_size + offset.unsqueeze(1)).flatten() + hot.tag_base
    sets = set_of(tag, hot.entries.shape[0])
    stale = (hot.entries[sets] & 0xFFFFFFFF) == tag.unsqueeze(1)
    way = torch.arange(WAYS, device=slot.device)
    hot.entries.view(-1)[(sets.unsqueeze(1) * WAYS + way)[stale]] = EMPTY
