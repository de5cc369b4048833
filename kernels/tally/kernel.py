"""Triton version of `tally`: one program, so that the sums have one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def tally_kernel(
    counts_ptr,
    mass_ptr,
    seq_lens_ptr,
    totals_ptr,
    num_requests,
    dense_below,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.arange(0, HEADS_PADDED)
    selected = tl.zeros([TILE], tl.int64)
    context = tl.zeros([TILE], tl.int64)
    mass = tl.zeros([TILE], tl.float32)
    sparse_requests = tl.zeros([TILE], tl.int64)
    dense_requests = tl.zeros([TILE], tl.int64)
    for start in range(0, num_requests, TILE):
        request = start + tl.arange(0, TILE)
        length = tl.load(seq_lens_ptr + request, mask=request < num_requests, other=0)
        sparse = length > dense_below
        cell = request[:, None] * HEADS + head[None, :]
        mask = sparse[:, None] & (head < HEADS)[None, :]
        selected += tl.sum(tl.load(counts_ptr + cell, mask=mask, other=0), axis=1)
        mass += tl.sum(tl.load(mass_ptr + cell, mask=mask, other=0.0), axis=1)
        context += tl.where(sparse, length, 0)
        sparse_requests += sparse.to(tl.int64)
        dense_requests += ((length > 0) & (length <= dense_below)).to(tl.int64)
    field = tl.arange(0, 8)
    total_sparse = tl.sum(sparse_requests)
    added = tl.where(field == 0, tl.sum(selected).to(tl.float64), 0.0)
    added = tl.where(field == 1, (tl.sum(context) * HEADS).to(tl.float64), added)
    added = tl.where(field == 2, (total_sparse * HEADS).to(tl.float64), added)
    added = tl.where(field == 3, tl.sum(mass).to(tl.float64), added)
    added = tl.where(field == 4, total_sparse.to(tl.float64), added)
    added = tl.where(field == 5, tl.sum(dense_requests).to(tl.float64), added)
    tl.store(totals_ptr + field, tl.load(totals_ptr + field, mask=field < 6) + added, mask=field < 6)


def tally(counts: torch.Tensor, mass: torch.Tensor, seq_lens: torch.Tensor, dense_below: int, totals: torch.Tensor) -> None:
    requests, heads = counts.shape
    assert counts.is_contiguous() and mass.is_contiguous() and totals.dtype == torch.float64
    tally_kernel[(1,)](
        counts, mass, seq_lens, totals, requests, dense_below, HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads), TILE=64, num_warps=4
    )
