"""Plain PyTorch definition of `merge`."""

from __future__ import annotations

import torch


def merge_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    work = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    a = lse_a.to(work).masked_fill(lse_a == torch.inf, -torch.inf)
    b = lse_b.to(work).masked_fill(lse_b == torch.inf, -torch.inf)
    top = torch.maximum(a, b)
    base = top.masked_fill(top == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(a - base), torch.exp(b - base)
    total = weight_a + weight_b
    share_a, share_b = (torch.where(total > 0, weight / total, 0.0).unsqueeze(-1) for weight in (weight_a, weight_b))
    out = torch.where(share_a > 0, share_a * out_a.to(work), 0.0) + torch.where(share_b > 0, share_b * out_b.to(work), 0.0)
    return out.to(out_a.dtype), (base + torch.log(total)).to(torch.float32)
