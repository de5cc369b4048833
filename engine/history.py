"""Prefill over a history that lives in host memory.

A chunk of a long prompt attends to every earlier row of its request. Those rows are staged to the GPU in segments on a
side stream while the previous segment is attended to, so the bus works under the matrix units. The order of all
segments of a step is known when the step starts (layer by layer, request by request), so staging runs ahead across
layers too: it uses the time of the layers in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SEGMENT_TOKENS = 16384
BUFFERS = 3


@dataclass(frozen=True)
class Segment:
    """Tokens `[start, end)` of one prefilling request, as one layer reads them."""

    layer: int
    request: int
    start: int
    end: int


def segment_lengths(history: int) -> list[int]:
    """Tokens of each segment of a history."""
    return [min(SEGMENT_TOKENS, history - start) for start in range(0, history, SEGMENT_TOKENS)]


def plan_segments(layers: int, histories: list[tuple[int, int]]) -> list[Segment]:
    """All segments of a step in the order the layers consume them.

    Args:
        histories: (row of the block table, tokens already in the pool) of each prefilling request that has a history.
    """
    return [
        Segment(layer, request, i * SEGMENT_TOKENS, i * SEGMENT_TOKENS + length)
        for layer in range(layers)
        for request, history in histories
        for i, length in enumerate(segment_lengths(history))
    ]


StageFn = Callable[[Segment, torch.Tensor, torch.Tensor], None]
"""Dequantises the rows of a segment into key and value buffers `[tokens, Hkv, D]`."""


class HistoryPipeline:
    """Stages the segments of a step ahead of their use through a ring of buffers.

    `begin(segments)` once a step, then `take()` and `release()` once a segment, in order.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, stage: StageFn) -> None:
        shape = (BUFFERS, SEGMENT_TOKENS, num_kv_heads, head_dim)
        self._key = torch.empty(shape, dtype=dtype, device=device)
        self._value = torch.empty(shape, dtype=dtype, device=device)
        self._staged = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._free = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._stream = torch.cuda.Stream(device)
        self._stage = stage
        self._segments: list[Segment] = []
        self._issued = self._taken = 0

    def begin(self, segments: list[Segment]) -> None:
        """Starts staging for a step. Everything queued on the current stream so far may have written the rows."""
        for i in range(self._taken, self._issued):  # staged for a layer that did not run
            self._staged[i % BUFFERS].wait()
        self._segments = segments
        self._issued = self._taken = 0
        for event in self._free:
            event.record()
        for _ in range(BUFFERS):
            self._issue()

    def skip_to(self, layer: int) -> None:
        """Drops segments of layers that did not run (a draft layer may be skipped) until `layer` is next."""
        while self._taken < len(self._segments) and self._segments[self._taken].layer < layer:
            self.take()
            self.release()

    def take(self) -> tuple[Segment, torch.Tensor, torch.Tensor]:
        """The next segment with its keys and values `[end - start, Hkv, D]`, ready on the current stream."""
        buffer = self._taken % BUFFERS
        segment = self._segments[self._taken]
        self._staged[buffer].wait()
        n = segment.end - segment.start
        return segment, self._key[buffer, :n], self._value[buffer, :n]

    def release(self) -> None:
        """The segment last taken has been read by everything queued on the current stream so far."""
        self._free[self._taken % BUFFERS].record()
        self._taken += 1
        self._issue()

    def _issue(self) -> None:
        if self._issued >= len(self._segments):
            return
        buffer = self._issued % BUFFERS
        with torch.cuda.stream(self._stream):
            self._free[buffer].wait()
            segment = self._segments[self._issued]
            self._stage(segment, self._key[buffer], self._value[buffer])
            self._staged[buffer].record()
        self._issued += 1
