"""Which rows a decode step must read, as numbers a profile can set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectionPolicy:
    """Budget of one selection; token counts are per (request, KV head).

    The selected set is: sinks + window + the highest-scoring tokens, their number being the smallest that reaches
    `mass` of the sketch-estimated attention, clamped to [`min_tokens`, `max_tokens`], + runs of `run_radius` on either
    side of the `run_hits` strongest tokens. Requests of at most `dense_below` tokens select everything.
    """

    min_tokens: int = 512
    max_tokens: int = 2048
    mass: float = 0.99
    sink_tokens: int = 8
    window_tokens: int = 128
    run_hits: int = 32
    run_radius: int = 2
    dense_below: int = 4096

    @property
    def capacity(self) -> int:
        """Rows an index buffer must hold per (request, KV head), padded to 128."""
        sparse = self.max_tokens + self.sink_tokens + self.window_tokens + self.run_hits * 2 * self.run_radius
        return -(-max(sparse, self.dense_below) // 128) * 128
