"""Triton version of `merge`: one pass, bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 16


@triton.jit(do_not_specialize=["num_rows", "lse_a_stride_t", "lse_a_stride_h", "lse_b_stride_t", "lse_b_stride_h"])
def merge_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    lse_a_stride_t,
    lse_a_stride_h,
    lse_b_stride_t,
    lse_b_stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    token, head = row // HEADS, row % HEADS
    valid = row < num_rows
    a = tl.load(lse_a_ptr + token * lse_a_stride_t + head * lse_a_stride_h, mask=valid, other=float("-inf")).to(tl.float32)
    b = tl.load(lse_b_ptr + token * lse_b_stride_t + head * lse_b_stride_h, mask=valid, other=float("-inf")).to(tl.float32)
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    share_a, share_b = weight_a * inverse, weight_b * inverse

    cell = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    # An empty side is not read: its output may hold anything.
    part_a = tl.load(out_a_ptr + cell, mask=(valid & (share_a > 0))[:, None], other=0.0).to(tl.float32)
    part_b = tl.load(out_b_ptr + cell, mask=(valid & (share_b > 0))[:, None], other=0.0).to(tl.float32)
    out = part_a * share_a[:, None] + part_b * share_b[:, None]
    tl.store(out_ptr + cell, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])
    lse = tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + row, lse, mask=valid)


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = out_a.shape
    out_a, out_b = out_a.contiguous(), out_b.contiguous()
    out = torch.empty_like(out_a)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out_a.device)
    if tokens:
        merge_kernel[(triton.cdiv(tokens * heads, TILE),)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            tokens * heads,
            *lse_a.stride(),
            *lse_b.stride(),
            HEADS=heads,
            DIM=dim,
            TILE=TILE,
        )
    return out, lse
