"""Plain PyTorch definition of `tally`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..policy import SelectionPolicy

if TYPE_CHECKING:
    from ..sketch import Selection


def tally_reference(selection: Selection, seq_lens: torch.Tensor, policy: SelectionPolicy, totals: torch.Tensor) -> None:
    sparse, dense = seq_lens > policy.dense_below, (seq_lens > 0) & (seq_lens <= policy.dense_below)
    heads = selection.counts.shape[1]
    totals += torch.stack(
        [
            selection.counts[sparse].sum(),
            seq_lens[sparse].sum() * heads,
            sparse.sum() * heads,
            selection.mass[sparse].sum(),
            sparse.sum(),
            dense.sum(),
        ]
    ).to(totals.dtype)
