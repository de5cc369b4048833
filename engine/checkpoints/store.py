"""A worker's copies of recurrent states: one slot of host memory per checkpoint, holding all layers of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec


@dataclass(frozen=True)
class Copy:
    """Between a slot and the blocks that hold one state: one block of each recurrent group."""

    slot: int
    blocks: tuple[int, ...]
    """In the order of `recurrent_groups`."""


def recurrent_groups(config: KVCacheConfig) -> list[int]:
    """The KV cache groups of recurrent layers; empty for a model that has none."""
    return [i for i, group in enumerate(config.kv_cache_groups) if isinstance(group.kv_cache_spec, MambaSpec)]


def checkpoint_bytes(config: KVCacheConfig) -> int:
    """Bytes of one checkpoint on one rank: the live states as they are, without the padding of their blocks."""
    groups = [config.kv_cache_groups[i] for i in recurrent_groups(config)]
    return sum(len(group.layer_names) * _state_bytes(group.kv_cache_spec) for group in groups)


def _state_bytes(spec: MambaSpec) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))


class CheckpointStore:
    """Slots of pinned memory beside the states of the GPU.

    Stores run on the compute stream: the step's kernels come before them, and what overwrites the block behind. Loads
    run on a stream of their own; nobody reads their block before the scheduler has heard that they are done.
    """

    def __init__(
        self, config: KVCacheConfig, states: Mapping[str, Sequence[torch.Tensor]], num_slots: int, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        """
        Args:
            states: by layer, its state tensors `[num_blocks, …]`.
            allocate: gives `n` bytes of host memory as uint8 `[n]`, page-locked if there is a GPU.

        Raises:
            ValueError: a state does not lie in one piece, or a layer's states are not those of its spec.
        """
        self.bytes = checkpoint_bytes(config)
        self.slots = allocate(num_slots * self.bytes).view(num_slots, self.bytes)
        self._parts: list[list[tuple[torch.Tensor, slice]]] = []
        """By group: its state tensors, and where in a slot each lies."""
        end = 0
        for i in recurrent_groups(config):
            group = config.kv_cache_groups[i]
            parts = []
            for name in group.layer_names:
                first = end
                for state in states[name]:
                    if not state[0].is_contiguous():
                        raise ValueError(f"the recurrent state of {name} does not lie in one piece: {tuple(state.shape)}, {state.stride()}")
                    start, end = end, end + state[0].nbytes
                    parts.append((state, slice(start, end)))
                if end - first != _state_bytes(group.kv_cache_spec):
                    raise ValueError(f"{name} has {end - first} bytes of state, its spec says {_state_bytes(group.kv_cache_spec)}")
            self._parts.append(parts)
        self._device = self._parts[0][0][0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._running: list[_Running] = []
        self._counts: dict[str, float] = {}

    def store(self, copies: Sequence[Copy]) -> None:
        """Blocks to slots, behind the kernels submitted so far."""
        if not copies:
            return
        with self._timed("store", len(copies)):
            for copy in copies:
                for block, parts in zip(copy.blocks, self._parts, strict=True):
                    for state, place in parts:
                        self.slots[copy.slot, place].copy_(_bytes(state, block), non_blocking=True)

    def load(self, request_id: str, copy: Copy) -> None:
        """A slot to the blocks of a request; `finished` tells when."""
        if self._stream is not None:
            # A block's former owner, or the store that filled the slot, may still be at work.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), self._timed("load", 1, request_id):
            for block, parts in zip(copy.blocks, self._parts, strict=True):
                for state, place in parts:
                    _bytes(state, block).copy_(self.slots[copy.slot, place], non_blocking=True)

    def finished(self) -> set[str]:
        """Requests whose states have arrived since the last call."""
        done = [r for r in self._running if r.end is None or r.end.query()]
        self._running = [r for r in self._running if r not in done]
        for r in done:
            seconds = r.seconds if r.end is None else r.start.elapsed_time(r.end) / 1e3
            for key, amount in ((f"checkpoint_{r.what}_bytes", r.number * self.bytes), (f"checkpoint_{r.what}_seconds", seconds)):
                self._counts[key] = self._counts.get(key, 0.0) + amount
        return {r.request_id for r in done if r.request_id is not None}

    def drain(self) -> dict[str, float]:
        """Bytes and seconds of the copies that ended since the last call, by metric."""
        counts, self._counts = self._counts, {}
        return counts

    @contextmanager
    def _timed(self, what: str, number: int, request_id: str | None = None) -> Iterator[None]:
        if self._stream is None:
            started = perf_counter()
            yield
            self._running.append(_Running(what, number, request_id, seconds=perf_counter() - started))
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._running.append(_Running(what, number, request_id, start, end))


@dataclass(eq=False)
class _Running:
    """Copies under way; on a CPU they are done already."""

    what: str
    number: int
    request_id: str | None
    start: Any = None
    end: Any = None
    seconds: float = 0.0


def _bytes(state: torch.Tensor, block: int) -> torch.Tensor:
    return state[block].view(-1).view(torch.uint8)
