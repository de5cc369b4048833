"""How much of the true attention mass a sketch's selection captures, on text it was not fitted on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.sketch import SketchBasis, decode_codes, encode_keys

K = TypeVar("K")

SINKS, WINDOW = 4, 32
"""Always selected, inside the budget."""


@dataclass(frozen=True)
class Attention:
    """Sampled queries of one layer and all keys of their sequence."""

    query: torch.Tensor
    """`[Hkv, G, n, D]` float32"""
    key: torch.Tensor
    """`[Hkv, T, D]` float32"""
    positions: torch.Tensor
    """`[n]`; query i sees the keys `t <= positions[i]`"""

    def at(self, positions: Sequence[int]) -> Attention:
        """The queries at some of the sampled positions."""
        rows = torch.isin(self.positions, torch.tensor(list(positions), device=self.positions.device)).nonzero().flatten()
        return Attention(self.query[:, :, rows], self.key, self.positions[rows])

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Attention weights from scores `[Hkv, G, n, T]` before scaling."""
        unseen = torch.arange(self.key.shape[1], device=self.key.device) > self.positions[:, None]
        return (scores * self.query.shape[-1] ** -0.5).masked_fill(unseen, -torch.inf).softmax(dim=-1)

    def true_weights(self) -> torch.Tensor:
        return self.softmax(self.query @ self.key.unsqueeze(1).mT)

    def sketch_weights(self, sketch: SketchBasis, bits: Literal[4, 8]) -> torch.Tensor:
        """The weights that a sketch of `bits`-bit codes sees, with the kernels' own codes and query maps."""
        sketch = sketch.to(self.key.device)
        kv_heads, groups, _, dim = self.query.shape
        layout = KVLayout(kv_heads * groups, kv_heads, dim, "bf16", sketch.key_map.shape[-1], bits)
        codes, scales = encode_keys(self.key.transpose(0, 1), sketch, layout)
        keys = (decode_codes(codes, layout).float() * scales.float().unsqueeze(-1)).transpose(0, 1)
        queries = (self.query @ sketch.query_codes.float().unsqueeze(1)) * sketch.query_scales[:, None, None]
        return self.softmax(queries @ keys.unsqueeze(1).mT)


def select(estimate: torch.Tensor, positions: torch.Tensor, budget: int) -> torch.Tensor:
    """Indices `[Hkv, n, k]` of the selected tokens, most important first: sinks and window, then the largest estimates.

    `estimate [Hkv, n, T]` is a token's weight for the whole group of query heads.
    """
    index = torch.arange(estimate.shape[-1], device=estimate.device)
    last = positions[:, None]
    kept = ((index < SINKS) | (index > last - WINDOW)) & (index <= last)
    ranked = estimate.masked_fill(index > last, -1.0).masked_fill(kept, torch.inf)
    return ranked.topk(min(budget, estimate.shape[-1]), dim=-1).indices


def captured_mass(true_weights: torch.Tensor, estimate: torch.Tensor, positions: torch.Tensor, budgets: Sequence[int]) -> torch.Tensor:
    """Mass of `true_weights [Hkv, G, n, T]` on what `estimate [Hkv, n, T]` selects: `[len(budgets), Hkv, G, n]`."""
    order = select(estimate, positions, max(budgets))
    groups = true_weights.shape[1]
    reached = true_weights.gather(-1, order.unsqueeze(1).expand(-1, groups, -1, -1)).cumsum(dim=-1)
    return torch.stack([reached[..., min(budget, reached.shape[-1]) - 1] for budget in budgets])


Scorer = Callable[[Attention], torch.Tensor]
"""From the attention of one layer to an estimate `[Hkv, n, T]`."""


def oracle(attention: Attention) -> torch.Tensor:
    return attention.true_weights().mean(dim=1)


def recency(attention: Attention) -> torch.Tensor:
    """Control: later is better."""
    heads, tokens = attention.key.shape[:2]
    return torch.arange(tokens, device=attention.key.device).float().expand(heads, len(attention.positions), tokens)


def sketched(sketch: SketchBasis, bits: Literal[4, 8]) -> Scorer:
    """Selection by sketch, query heads joined by the mean of their softmax weights, as the engine does."""
    return lambda attention: attention.sketch_weights(sketch, bits).mean(dim=1)


def measure(attention: Attention, scorers: Mapping[K, Scorer], budgets: Sequence[int]) -> dict[K, torch.Tensor]:
    """Captured mass of every scorer: `[len(budgets), Hkv, G * n]`."""
    true_weights = attention.true_weights()
    return {
        name: captured_mass(true_weights, scorer(attention), attention.positions, budgets).flatten(2).cpu()
        for name, scorer in scorers.items()
    }


class Probe:
    """Observer that hands over one `Attention` per layer once the last token of a sequence of `length` has been seen."""

    def __init__(self, length: int, positions: Sequence[int], use: Callable[[str, Attention], None]) -> None:
        self._length, self._positions, self._use = length, torch.tensor(sorted(positions)), use
        self._keys: dict[str, list[torch.Tensor]] = {}
        self._queries: dict[str, list[torch.Tensor]] = {}

    def __call__(self, layer: str, query: torch.Tensor, key: torch.Tensor) -> None:
        keys, queries = self._keys.setdefault(layer, []), self._queries.setdefault(layer, [])
        seen = sum(len(part) for part in keys)
        mine = self._positions[(self._positions >= seen) & (self._positions < seen + len(key))]
        keys.append(key.clone())
        queries.append(query[(mine - seen).to(query.device)].clone())
        if seen + len(key) < self._length:
            return
        all_keys, all_queries = torch.cat(self._keys.pop(layer)).float(), torch.cat(self._queries.pop(layer)).float()
        n, kv_heads, dim = len(all_queries), all_keys.shape[1], all_keys.shape[2]
        grouped = all_queries.view(n, kv_heads, -1, dim).permute(1, 2, 0, 3).contiguous()
        self._use(layer, Attention(grouped, all_keys.transpose(0, 1).contiguous(), self._positions.to(all_keys.device)))
