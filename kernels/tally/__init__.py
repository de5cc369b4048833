"""Count what one layer's selections read, inside a captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..policy import SelectionPolicy
from .reference import tally_reference

if TYPE_CHECKING:
    from ..sketch import Selection

__all__ = ["FIELDS", "tally", "tally_reference"]

FIELDS = ("selected_tokens", "context_tokens", "selections", "selected_mass", "sparse_requests", "dense_requests")
"""Meaning of `totals`, in order. Requests of at most `policy.dense_below` tokens read everything and count as dense only."""


def tally(selection: Selection, seq_lens: torch.Tensor, policy: SelectionPolicy, totals: torch.Tensor) -> None:
    """Adds one layer's step to running totals.

    Args:
        selection: `counts [R, Hkv]` int32 and `mass [R, Hkv]` float32.
        seq_lens: `[R]` int32; 0 is graph padding.
        totals: `[len(FIELDS)]` float64, added to in place. The two `*_requests` count request-layers.
    """
    if totals.is_cuda:
        from . import kernel

        kernel.tally(selection.counts, selection.mass, seq_lens, policy.dense_below, totals)
    else:
        tally_reference(selection, seq_lens, policy, totals)
