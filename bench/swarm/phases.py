"""A run in phases, each ended by every agent before the next begins: fill, warm, decode, and decode with an intruder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .agent import Agent
from .options import SwarmOptions
from .sender import AgentFailed, Sender

INTRUDER_ANSWER_TOKENS = 32


@dataclass
class PhaseRecord:
    """Seconds since the run began. Rates are taken over the window: after the ramp, before the drain."""

    name: str
    start: float
    end: float | None = None
    window_start: float | None = None
    window_end: float | None = None
    marks: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Swarm:
    """Drives agents through the phases; `phases` tells how far it is."""

    def __init__(self, agents: Sequence[Agent], sender: Sender, options: SwarmOptions, on_phase: Callable[[], None]) -> None:
        self.agents = list(agents)
        self.phases: list[PhaseRecord] = []
        self.failures: dict[int, str] = {}
        """Agent -> why it stopped."""
        self._sender, self._options, self._on_phase = sender, options, on_phase

    async def run(self, intruder: Agent | None = None) -> None:
        await self._all("fill", lambda agent: agent.fill())
        if self._options.turns:
            await self._all("warm", self._follow_ups)
        if self._options.decode_seconds:
            await self._steady("decode", None)
        if intruder is not None:
            await self._steady("intrusion", intruder)

    @property
    def active(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.view.index not in self.failures]

    async def _follow_ups(self, agent: Agent) -> None:
        for number in range(self._options.turns):
            await agent.follow_up(number)

    async def _all(self, name: str, work: Callable[[Agent], Awaitable[None]]) -> None:
        """Every agent does `work` once; the window ends when the first of them has finished."""
        phase = self._begin(name)
        agents, finished = self.active, list[float]()

        async def one(agent: Agent, order: int) -> None:
            await self._ramp(order)
            if order == len(agents) - 1:
                phase.window_start = self._sender.clock.now()
            await self._guard(agent, work(agent))
            finished.append(self._sender.clock.now())
            agent.view.state = "failed" if agent.view.index in self.failures else "waiting"

        async with asyncio.TaskGroup() as group:
            for order, agent in enumerate(agents):
                group.create_task(one(agent, order))
        # Filling is a passage, not a steady state: its rate is that of the whole.
        phase.window_end = max(finished, default=None) if name == "fill" else min(finished, default=None)
        if name == "fill":
            phase.window_start = phase.start
        elif phase.window_end is not None and phase.window_end <= (phase.window_start or 0.0):
            phase.window_start, phase.window_end = phase.start, max(finished)  # over before the last agent had begun
        self._finish(phase)

    async def _steady(self, name: str, intruder: Agent | None) -> None:
        """All agents decode without pause; the window is open while every one of them does."""
        phase = self._begin(name)
        if intruder is not None and self.active:
            density = sum(agent.conversation.text_per_token for agent in self.active) / len(self.active)
            intruder.load(self._options.intruder_tokens, density)

        async def forever(agent: Agent, order: int) -> None:
            await self._ramp(order)
            while True:
                await agent.decode()

        tasks = {agent: asyncio.create_task(self._guard(agent, forever(agent, order))) for order, agent in enumerate(self.active)}
        try:
            if not await self._until_all_decode(tasks):
                return
            phase.window_start = self._sender.clock.now()
            self._on_phase()
            failed = asyncio.create_task(asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED))
            load = asyncio.create_task(asyncio.sleep(self._options.decode_seconds) if intruder is None else self._intrude(intruder, phase))
            await asyncio.wait({failed, load}, return_when=asyncio.FIRST_COMPLETED)
            phase.window_end = self._sender.clock.now()
            for task in (failed, load):
                task.cancel()
            await asyncio.gather(failed, load, return_exceptions=True)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            for agent in self.active:
                agent.reset()
                agent.view.state = "waiting"
            self._finish(phase)

    async def _until_all_decode(self, tasks: dict[Agent, asyncio.Task[None]]) -> bool:
        """True once every agent has had output in this phase; False if none is left that could."""
        before = {agent: agent.view.tokens for agent in tasks}
        while not all(agent.view.tokens > before[agent] for agent in self.active):
            if not self.active:
                return False
            await asyncio.sleep(0.02)
        return bool(self.active)

    async def _intrude(self, intruder: Agent, phase: PhaseRecord) -> None:
        """A third of the decode time before, the whole of the huge prompt, and a third after."""
        calm = max(1.0, self._options.decode_seconds / 3)
        await asyncio.sleep(calm)
        view, clock = intruder.view, self._sender.clock
        view.turn, view.ttft = 1, None
        phase.marks["intruder_sent"] = clock.now()
        asking = asyncio.create_task(intruder.intrude(INTRUDER_ANSWER_TOKENS))
        try:
            while view.ttft is None and not asking.done():
                await asyncio.sleep(0.005)
            if view.ttft is not None:
                phase.marks["intruder_first"] = phase.marks["intruder_sent"] + view.ttft
            await asyncio.sleep(calm)
            await asking
        except AgentFailed as failure:
            self.failures[view.index] = str(failure)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _guard(self, agent: Agent, work: Awaitable[None]) -> None:
        try:
            await work
        except AgentFailed as failure:
            self.failures[agent.view.index] = str(failure)
            agent.view.state = "failed"

    async def _ramp(self, order: int) -> None:
        await asyncio.sleep(self._options.ramp_seconds * order / max(1, len(self.agents)))

    def _begin(self, name: str) -> PhaseRecord:
        phase = PhaseRecord(name, self._sender.clock.now())
        self.phases.append(phase)
        self._sender.phase = name
        self._on_phase()
        return phase

    def _finish(self, phase: PhaseRecord) -> None:
        phase.end = self._sender.clock.now()
        self._on_phase()
