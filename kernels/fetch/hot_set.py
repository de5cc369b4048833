"""The rows a device keeps from the steps before: a set-associative cache of the host pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..layout import KVLayout

WAYS = 16
"""Entries per set. 16 entries are one 128-byte line, and at a fifth of the capacity in use by one step the chance that
a set overflows is about one in a million (Poisson)."""

EMPTY = -1


@dataclass(frozen=True)
class HotSet:
    """Device copies of recently selected rows, shared by the heads, requests and (through `for_layer`) layers.

    An entry packs `stamp << 32 | tag` so that one compare-and-swap claims it. The tag is `tag_base + row index`; the
    stamp is the value of the step clock at the last use. Ages are differences of stamps modulo 2^31, so the clock may wrap.
    Entry `e = set * WAYS + way` owns row `e` of `rows`. Behind them lie the staging rows: one for every position of a
    selection, so that a step whose rows do not fit still runs.

    Attributes:
        rows: `[entries + staging, row_bytes]` uint8.
        entries: `[sets, WAYS]` int64, −1 if empty.
        clock: `[2]` int64, one step counter, kept twice: the kernel that advances one of them reads the other.
        missed: `[staging]` int64, the rows the lookup did not find, `position in the selection << 32 | pool row`.
        missed_count: `[2]` int32, the length of that list, in even and odd steps; each step clears the other.
        counters: `[3]` int64: rows found, rows read from the host, and how many of those went to staging.
    """

    rows: torch.Tensor
    entries: torch.Tensor
    clock: torch.Tensor
    missed: torch.Tensor
    missed_count: torch.Tensor
    counters: torch.Tensor
    tag_base: int = 0

    @classmethod
    def allocate(cls, layout: KVLayout, capacity: int, staging: int, device: torch.device | str) -> HotSet:
        """A hot set of at least one and at most `capacity` rows (a power of two sets of `WAYS`), plus `staging` rows.

        Args:
            staging: `R * Hkv * K` of the largest selection.
        """
        if capacity < WAYS:
            raise ValueError(f"a hot set holds at least {WAYS} rows, got capacity {capacity}")
        sets = 1 << ((capacity // WAYS).bit_length() - 1)
        return cls(
            rows=torch.empty(sets * WAYS + staging, layout.row_bytes, dtype=torch.uint8, device=device),
            entries=torch.full((sets, WAYS), EMPTY, dtype=torch.int64, device=device),
            clock=torch.zeros(2, dtype=torch.int64, device=device),
            missed=torch.empty(staging, dtype=torch.int64, device=device),
            missed_count=torch.zeros(2, dtype=torch.int32, device=device),
            counters=torch.zeros(3, dtype=torch.int64, device=device),
        )

    @property
    def capacity(self) -> int:
        return self.entries.numel()

    @property
    def staging(self) -> int:
        return self.rows.shape[0] - self.capacity

    def for_layer(self, layer: int, pool_rows: int) -> HotSet:
        """The same memory seen by one of several layers, whose row indices are all below `pool_rows`.

        One set for all layers gives each head the rows it needs; heads differ widely in how much of a step they reuse.
        """
        if (layer + 1) * pool_rows > 2**31:
            raise ValueError(f"layer {layer} of {pool_rows} rows each does not fit 31-bit tags; use one hot set per layer")
        return replace(self, tag_base=layer * pool_rows)

    def clear(self) -> None:
        """Forgets every row. Needed when the pool is renumbered, never for correctness of ordinary writes."""
        self.entries.fill_(EMPTY)
        self.counters.zero_()

    def check(self, selection_shape: torch.Size, layout: KVLayout) -> None:
        if self.rows.shape[1] != layout.row_bytes:
            raise ValueError(f"hot rows are {self.rows.shape[1]} bytes, the layout's are {layout.row_bytes}")
        if selection_shape.numel() > self.staging:
            raise ValueError(
                f"a selection of shape {tuple(selection_shape)} needs {selection_shape.numel()} staging rows, the hot set has "
                f"{self.staging}: allocate it for the largest batch"
            )
