"""Plain PyTorch definition of `attend`; float64 queries are computed in float64, all others in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..layout import KVLayout
from ..rows import decode_rows, rotate, unrotate

if TYPE_CHECKING:
    from ..sketch import Selection


def attend_reference(
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
    out = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device)
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, group, dim = layout.num_kv_heads, layout.group_size, layout.head_dim
    # int4 rows are read in the rotated space they are stored in; rotating a query and its output is cheaper than every row.
    rotated = layout.row_format == "int4"
    working_query = rotate(query.to(work)) / dim if rotated else query.to(work)
    bounds = query_start_loc.tolist()
    for request, (start, end, length) in enumerate(zip(bounds[:-1], bounds[1:], seq_lens.tolist(), strict=True)):
        counts = selection.counts[request]
        most = int(counts.max())
        if start == end or most == 0:
            continue
        used = torch.arange(most, device=query.device) < counts.unsqueeze(1)
        index = row_index[request, :, :most].long().masked_fill(~used, 0)
        scales = None
        if row_scales is not None:
            token = selection.indices[request, :, :most].long().masked_fill(~used, 0)
            block = block_table[request].long()[token // layout.block_size]
            scales = row_scales[block, torch.arange(heads, device=query.device).unsqueeze(1), token % layout.block_size]
        key, value = (part.to(work) for part in decode_rows(flat_rows[index], scales, layout))
        position = torch.arange(length - (end - start), length, device=query.device)
        visible = used.unsqueeze(1) & (selection.indices[request, :, None, :most] <= position.unsqueeze(1))  # [Hkv, q, n]
        visible = visible.repeat_interleave(group, dim=1)
        grouped = working_query[start:end].view(-1, heads, group, dim).transpose(0, 1).reshape(heads, -1, dim)
        scores = (grouped * scale @ key.transpose(1, 2)).masked_fill(~visible, -torch.inf)
        total = torch.logsumexp(scores, dim=2)
        weight = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(2))
        # Positions that a head does not use are read as row 0, whose bytes may be anything: keep NaN out of the product.
        mixed = weight @ value.masked_fill(~used.unsqueeze(2), 0.0)
        mixed = mixed.view(heads, -1, group, dim).transpose(0, 1).reshape(end - start, -1, dim)
        out[start:end] = (unrotate(mixed) if rotated else mixed).to(query.dtype)
        lse[start:end] = total.view(heads, -1, group).transpose(0, 1).reshape(end - start, -1).float()
    return out, lse
