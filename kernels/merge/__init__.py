"""Combine two attention results over disjoint tokens."""

from __future__ import annotations

import torch

from .reference import merge_reference

__all__ = ["merge", "merge_reference"]


def merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint token sets.

    Args:
        out_a, out_b: `[T, Hq, D]`, each normalised over its own set.
        lse_a, lse_b: `[T, Hq]` float32, natural log-sum-exp of the scaled scores; any strides. An empty set is
            −inf (or +inf, FlashAttention-2's mark); its output is ignored, whatever it holds.

    Returns:
        `out [T, Hq, D]` in the dtype of `out_a` and `lse [T, Hq]` float32; both sets empty gives zeros and −inf.
    """
    if out_a.is_cuda:
        from . import kernel

        return kernel.merge(out_a, lse_a, out_b, lse_b)
    return merge_reference(out_a, lse_a, out_b, lse_b)
