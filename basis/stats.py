"""Streaming second moments of queries and keys: all that a fit needs, and all that is kept of the calibration text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Observer(Protocol):
    """Receives what one attention layer saw of the next tokens of a sequence.

    `query` is `[T, Hq, D]`, `key` `[T, Hkv, D]`, both after QK-norm and RoPE, as the cache would hold them.
    """

    def __call__(self, layer: str, query: torch.Tensor, key: torch.Tensor) -> None: ...


@dataclass
class LayerStats:
    """Float64 sums over the tokens of one layer; two of them add up, so ranks and sittings can be joined."""

    count: int
    key_sum: torch.Tensor
    """`[Hkv, D]`"""
    key_outer: torch.Tensor
    """`[Hkv, D, D]`, sum of k kᵀ"""
    query_outer: torch.Tensor
    """`[Hkv, D, D]`, sum of q qᵀ over the query heads that share the KV head"""

    @classmethod
    def empty(cls, num_kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> LayerStats:
        outer = torch.zeros(num_kv_heads, head_dim, head_dim, dtype=torch.float64, device=device)
        return cls(0, outer[..., 0].clone(), outer, outer.clone())

    def add(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Adds `query [T, Hq, D]` and `key [T, Hkv, D]`."""
        tokens, kv_heads, dim = key.shape
        # Products in float32 are exact enough for 256 tokens at a time; the sums over all of them are not.
        for start in range(0, tokens, 256):
            keys = key[start : start + 256].float().transpose(0, 1)
            queries = query[start : start + 256].float().reshape(keys.shape[1], kv_heads, -1, dim)
            queries = queries.permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)
            self.key_sum += keys.sum(dim=1)
            self.key_outer += keys.mT @ keys
            self.query_outer += queries.mT @ queries
        self.count += tokens

    def key_mean(self) -> torch.Tensor:
        return self.key_sum / self.count

    def key_covariance(self) -> torch.Tensor:
        mean = self.key_mean()
        return self.key_outer / self.count - mean.unsqueeze(-1) * mean.unsqueeze(-2)

    def query_moment(self) -> torch.Tensor:
        """E[q qᵀ] summed over the group: not centred, since the mean query's error costs as much as any."""
        return self.query_outer / self.count


class StatsObserver:
    """Accumulates `LayerStats` per layer."""

    def __init__(self, layers: Mapping[str, LayerStats] | None = None) -> None:
        self.layers: dict[str, LayerStats] = dict(layers or {})

    def __call__(self, layer: str, query: torch.Tensor, key: torch.Tensor) -> None:
        if layer not in self.layers:
            self.layers[layer] = LayerStats.empty(key.shape[1], key.shape[2], key.device)
        self.layers[layer].add(query, key)


def pack(layers: Mapping[str, LayerStats]) -> dict[str, torch.Tensor]:
    """Tensors for a safetensors file."""
    tensors: dict[str, torch.Tensor] = {}
    for key, stats in layers.items():
        tensors[f"{key}.count"] = torch.tensor([stats.count], dtype=torch.int64)
        for name in ("key_sum", "key_outer", "query_outer"):
            tensors[f"{key}.{name}"] = getattr(stats, name).cpu().contiguous()
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor]) -> dict[str, LayerStats]:
    """Inverse of `pack`."""
    keys = [name.removesuffix(".count") for name in tensors if name.endswith(".count")]
    return {
        key: LayerStats(
            int(tensors[f"{key}.count"]), *(tensors[f"{key}.{name}"].clone() for name in ("key_sum", "key_outer", "query_outer"))
        )
        for key in keys
    }
