"""An event loop whose clock jumps to the next timer as soon as nothing else is to do: minutes of load in seconds, times exact.

For measuring the measurement: with the fake server in the same loop, a time to first token of 250 ms is 250 ms on any machine,
however busy.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from time import perf_counter as real_time
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
GRACE = 0.0003
"""Real seconds in which a packet between two sockets of this process arrives; polled, since epoll sleeps for whole milliseconds."""


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for sockets, but not for time."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        until = real_time() + GRACE
        while not (ready := super().select(0)):
            if real_time() > until:
                self.now += timeout
                break
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Work of threads and other processes takes no virtual time that can be relied on; use it where there is none."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time; `time.perf_counter` and `time.monotonic` follow it."""
    loop = VirtualTimeLoop()
    with (
        patch.object(time, "perf_counter", loop.time),
        patch.object(time, "monotonic", loop.time),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        return runner.run(main)
