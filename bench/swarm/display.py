"""Feeds the live screen, or prints a line now and then, from what the agents and the sampler know."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .options import Ui
from .sampler import Sampler
from .sender import AgentView, Clock

FRAME_SECONDS = 0.25
LINE_SECONDS = 10.0
RATE_SECONDS = 2.0
"""Rates on the screen are means over this."""
MAX_PENDING_BYTES = 1 << 18


class Display:
    """Runs beside the load until cancelled."""

    def __init__(
        self, ui: Ui, views: Sequence[AgentView], sampler: Sampler, clock: Clock, phase: Callable[[], str], model: str, target: int
    ) -> None:
        self._ui, self._views, self._sampler, self._clock, self._phase = ui, views, sampler, clock, phase
        self._model, self._target = model, target
        self._history: deque[tuple[float, list[float]]] = deque(maxlen=int(RATE_SECONDS / FRAME_SECONDS) + 1)
        self._rates: deque[float] = deque(maxlen=480)
        self.errors: dict[str, int] = {}

    async def run(self) -> None:
        if self._ui is Ui.LIVE:
            await self._live()
        elif self._ui is Ui.SIMPLE:
            await self._simple()

    async def _live(self) -> None:
        command = (sys.executable, "-m", "sparsekv.bench.report.screen")
        child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        assert child.stdin is not None
        try:
            while child.returncode is None:
                if child.stdin.transport.get_write_buffer_size() < MAX_PENDING_BYTES:  # a slow terminal loses frames, not our time
                    child.stdin.write(json.dumps(self.snapshot()).encode() + b"\n")
                await asyncio.sleep(FRAME_SECONDS)
        finally:
            child.stdin.write(json.dumps(self.snapshot()).encode() + b"\n")
            child.stdin.close()
            try:
                await asyncio.wait_for(asyncio.shield(child.wait()), 5)
            except TimeoutError:
                child.kill()

    async def _simple(self) -> None:
        before = 0.0
        while True:
            await asyncio.sleep(LINE_SECONDS)
            total = sum(view.tokens for view in self._views)
            states = {state: sum(view.state == state for view in self._views) for state in ("reading", "decoding", "retrying", "failed")}
            shown = ", ".join(f"{count} {state}" for state, count in states.items() if count)
            context = max((view.context for view in self._views), default=0)
            rate = f"{(total - before) / LINE_SECONDS:.1f} tok/s"
            line = f"{self._clock.now():6.0f} s  {self._phase()}: {rate}, context up to {context}, {shown or 'waiting'}"
            print(line, file=sys.stderr, flush=True)
            before = total

    def snapshot(self) -> dict[str, Any]:
        """What one frame shows."""
        now = self._clock.now()
        self._history.append((now, [view.tokens for view in self._views]))
        then, before = self._history[0]
        span = max(now - then, FRAME_SECONDS)
        rates = [(view.tokens - old) / span for view, old in zip(self._views, before, strict=True)]
        self._rates.append(sum(rates))
        return {
            "t": now,
            "model": self._model,
            "target": self._target,
            "phase": self._phase(),
            "rates": list(self._rates),
            "agents": [
                {
                    "index": v.index, "state": v.state, "turn": v.turn, "context": v.context,
                    "rate": rate, "ttft": v.ttft, "words": v.words, "errors": v.errors,
                }
                for v, rate in zip(self._views, rates, strict=True)
            ],
            "gauges": self._gauges(),
            "facts": {k: v for k, v in self._sampler.latest.items() if k != "phase"},
            "errors": self.errors,
        }  # fmt: skip

    def _gauges(self) -> dict[str, float | None]:
        now, before = self._sampler.latest_metrics, self._sampler.previous_metrics
        used, free = now.get("sparsekv_pool_tokens{state=used}"), now.get("sparsekv_pool_tokens{state=free}")

        def share(part: str, *whole: str) -> float | None:
            grown = sum(now.get(name, 0.0) - before.get(name, 0.0) for name in whole)
            return (now.get(part, 0.0) - before.get(part, 0.0)) / grown if grown > 0 else None

        return {
            "KV pool": used / (used + free)
            if used is not None and free is not None and used + free
            else now.get("vllm:kv_cache_usage_perc"),
            "hot hits": share(
                "sparsekv_hot_rows_total{result=hit}", "sparsekv_hot_rows_total{result=hit}", "sparsekv_hot_rows_total{result=miss}"
            ),
            "coverage": share("sparsekv_decode_selected_mass_total", "sparsekv_decode_selections_total"),
            "read": share("sparsekv_decode_selected_tokens_total", "sparsekv_decode_context_tokens_total"),
        }
