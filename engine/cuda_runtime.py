"""What the attention layers of one process share on one GPU: their order, the hot set, and the staging of histories."""

from __future__ import annotations

import functools

import torch

from sparsekv.kernels.fetch import HotSet
from sparsekv.kernels.stage import stage

from .history import HistoryPipeline, Segment, plan_segments
from .metrics import step_counters
from .pools import LayerPool


class CudaRuntime:
    """One per process. Everything is allocated while the layers are loaded, at addresses that captured graphs keep."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.layers: list[LayerPool] = []
        """In the order the model runs them; a draft model's layers come last."""
        self._hot: HotSet | None = None
        self._history: HistoryPipeline | None = None
        self._block_table: torch.Tensor | None = None

    def hot_set(self, pool: LayerPool, hot_bytes: int, staging: int) -> HotSet:
        """The hot set as the next layer sees it. One set for all layers: each gets the rows its heads need."""
        if self._hot is None:
            self._hot = HotSet.allocate(pool.layout, max(hot_bytes // pool.layout.row_bytes, 1), staging, self.device)
            step_counters(self.device).hot = self._hot.counters
        return self._hot.for_layer(len(self.layers), pool.flat_rows.shape[0])

    def add_layer(self, pool: LayerPool, dtype: torch.dtype) -> int:
        """Takes the pool of the next layer; returns its place in the order."""
        if self._history is None:
            self._history = HistoryPipeline(pool.layout.num_kv_heads, pool.layout.head_dim, dtype, self.device, self._stage)
        self.layers.append(pool)
        return len(self.layers) - 1

    @property
    def history(self) -> HistoryPipeline:
        assert self._history is not None
        return self._history

    def begin_prefill(self, histories: list[tuple[int, int]], block_table: torch.Tensor) -> None:
        """Starts staging what the prefills of this step will read.

        Args:
            histories: (row of `block_table`, tokens before this step) of each prefilling request that has any.
        """
        self._block_table = block_table
        self.history.begin(plan_segments(len(self.layers), histories))

    def _stage(self, segment: Segment, key: torch.Tensor, value: torch.Tensor) -> None:
        pool = self.layers[segment.layer]
        assert self._block_table is not None
        stage(pool.rows, pool.row_scales, self._block_table, segment.request, segment.start, segment.end, pool.layout, key, value)


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """The runtime of this process, on its current GPU: a vLLM worker has one."""
    return CudaRuntime(torch.device("cuda", torch.cuda.current_device()))
