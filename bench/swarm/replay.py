"""A trace sent again: the same lengths, the same shared beginnings, the same order; other tokens in every run."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .client import Answer
from .conversation import Conversation
from .options import SwarmOptions
from .phases import PhaseRecord
from .run import Load, Outcome, Request, run_load
from .sender import AgentFailed, AgentView, Sender
from .trace import BLOCK_TOKENS, TraceRow

INTRUDE = "intrude"


@dataclass(frozen=True)
class ReplayOptions(SwarmOptions):
    """How a trace is sent; of a swarm's options those that shape one request hold here too."""

    longest: int = 0
    """Prompt and answer of the trace's longest request, in tokens."""
    max_delay: float = 10.0
    """Longest pause before a request; seconds."""

    @property
    def peak(self) -> int:
        return self.longest

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (self.agents < 1, f"--agents {self.agents}: at least 1"),
            (self.max_delay < 0, f"--max-delay {self.max_delay:g}: not negative"),
            (self.vocabulary < 1000, f"--vocabulary {self.vocabulary}: at least 1000"),
        ]


def run_replay(rows: Sequence[TraceRow], options: ReplayOptions, request: Request) -> Outcome:
    """Replays a trace; see `run_load` for what it raises."""
    return run_load(options, request, lambda sender, changed: ReplayLoad(rows, options, sender, changed))


def sessions(rows: Sequence[TraceRow]) -> list[list[TraceRow]]:
    """The trace's conversations, in the order of their first request. Where it does not name them, a request belongs to the one whose
    last prompt it begins with."""
    found: dict[Any, list[TraceRow]] = {}
    last: dict[tuple[int, ...], Any] = {}
    for number, row in enumerate(rows):
        key: Any = row.agent
        if key is None:
            key = next((last[known] for end in range(len(row.hash_ids), 0, -1) if (known := tuple(row.hash_ids[:end])) in last), (number,))
        session = found.setdefault(key, [])
        if row.agent is None:
            if session:
                last.pop(tuple(session[-1].hash_ids), None)
            last[tuple(row.hash_ids)] = key
        session.append(row)
    return list(found.values())


class ReplayConversation(Conversation):
    """Token ids made up to a row's lengths. Rows of our own traces say how much of the conversation before they begin with, and get
    exactly that; those of others share whole blocks by their ids."""

    path = "/v1/completions"

    def __init__(self, salt: str, vocabulary: int, seen: set[int]) -> None:
        super().__init__()
        self._salt, self._vocabulary, self._seen = salt, vocabulary, seen
        self._ids = np.empty(0, np.int64)
        self._made = 0

    def ask(self, row: TraceRow) -> None:
        """Makes the next prompt."""
        if row.shared is not None:
            kept = min(row.shared, len(self._ids), row.input_length)
            self._made += 1
            fresh = _tokens(f"{self._salt}/{self._made}", row.input_length - kept, self._vocabulary)
            self._ids = np.concatenate([self._ids[:kept], fresh])
            self.reusable_tokens = kept
            return
        known = next((i for i, block in enumerate(row.hash_ids) if block not in self._seen), len(row.hash_ids))
        self._seen.update(row.hash_ids)
        self.reusable_tokens = min(known * BLOCK_TOKENS, row.input_length - 1)
        blocks = [_block(self._salt, block, self._vocabulary) for block in row.hash_ids]
        rest = row.input_length - BLOCK_TOKENS * len(blocks)
        if rest > 0:
            self._made += 1
            blocks.append(_tokens(f"{self._salt}/tail/{id(self)}/{self._made}", rest, self._vocabulary))
        self._ids = np.concatenate(blocks)[: row.input_length]

    def add_user(self, text: str) -> None:
        raise NotImplementedError("a replay has no words")

    def add_answer(self, answer: Answer) -> None:
        self._ids = np.concatenate([self._ids, np.array(answer.token_ids, np.int64)])

    def body(self, options: dict[str, Any]) -> bytes:
        return json.dumps(options | {"return_token_ids": True, "prompt": self._ids.tolist()}).encode()


@dataclass
class _Lane:
    """One agent at a time, as many as the server shall see at once."""

    view: AgentView
    rows: Iterator[tuple[TraceRow, ReplayConversation]]
    next: tuple[TraceRow, ReplayConversation] | None = None
    ended: float | None = None
    intruder: bool = False

    def advance(self) -> None:
        self.next = next(self.rows, None)


@dataclass
class _Progress:
    """Of one phase: which lanes have had output, and when the first of them was done."""

    waiting: set[int] = field(default_factory=set)
    first_done: float | None = None


class ReplayLoad(Load):
    """Lanes that send a trace's sessions. Our own traces keep their phases, each ended by every lane before the next begins; in others
    each lane begins another session as soon as one ends."""

    kind = "replay"

    def __init__(self, rows: Sequence[TraceRow], options: ReplayOptions, sender: Sender, changed: Callable[[], None]) -> None:
        self._options, self._sender, self._changed = options, sender, changed
        self.phases: list[PhaseRecord] = []
        self.failures: dict[int, str] = {}
        self._salt = f"{options.seed}" if options.warm else os.urandom(8).hex()
        self._seen: set[int] = set()
        found = sessions(rows)
        own = all(row.agent is not None and row.shared is not None for row in rows)
        self._lanes = self._named(found) if own else self._pooled(found)
        self.views = [lane.view for lane in self._lanes]
        for lane in self._lanes:
            lane.advance()
        self._names = list(dict.fromkeys(row.phase for row in rows)) if own else ["replay"]
        self._starts = {name: min(row.timestamp for row in rows if row.phase == name) for name in self._names} if own else {}
        self.info = {"trace": {"requests": len(rows), "sessions": len(found), "own": own}}

    async def run(self) -> None:
        for name in self._names:
            await self._phase(name)

    def _named(self, found: list[list[TraceRow]]) -> list[_Lane]:
        """Lane i sends session i; with more lanes than sessions the sessions begin again, with other tokens."""
        ordinary = [s for s in found if not any(row.kind == INTRUDE for row in s)]
        chosen = [ordinary[i % len(ordinary)] for i in range(self._options.agents)] if ordinary else []
        lanes = [_Lane(AgentView(i), self._of_session(i, session)) for i, session in enumerate(chosen)]
        for session in (s for s in found if s not in ordinary):
            lanes.append(_Lane(AgentView(len(lanes)), self._of_session(len(lanes), session), intruder=True))
        return lanes

    def _of_session(self, lane: int, session: list[TraceRow]) -> Iterator[tuple[TraceRow, ReplayConversation]]:
        conversation = ReplayConversation(f"{self._salt}/{lane}", self._options.vocabulary, self._seen)
        return ((row, conversation) for row in session)

    def _pooled(self, found: list[list[TraceRow]]) -> list[_Lane]:
        waiting = deque(found)

        def draw() -> Iterator[tuple[TraceRow, ReplayConversation]]:
            while waiting:
                conversation = ReplayConversation(self._salt, self._options.vocabulary, self._seen)
                yield from ((row, conversation) for row in waiting.popleft())

        return [_Lane(AgentView(i), draw()) for i in range(min(self._options.agents, len(found)))]

    async def _phase(self, name: str) -> None:
        clock = self._sender.clock
        phase = PhaseRecord(name, clock.now())
        self.phases.append(phase)
        self._sender.phase = name
        self._changed()
        lanes = [
            lane
            for lane in self._lanes
            if lane.next is not None and lane.view.index not in self.failures and (not self._starts or lane.next[0].phase == name)
        ]
        progress = _Progress({lane.view.index for lane in lanes if not lane.intruder})
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(self._send_all(lane, phase, progress))
        last = clock.now()
        if name == "fill":
            phase.window_start, phase.window_end = phase.start, last
        else:
            phase.window_end = progress.first_done
            if phase.window_start is None or phase.window_end is None or phase.window_end <= phase.window_start:
                phase.window_start, phase.window_end = phase.start, last  # one lane was done before another had begun
        phase.end = last
        self._changed()

    async def _send_all(self, lane: _Lane, phase: PhaseRecord, progress: _Progress) -> None:
        """The lane's rows of this phase."""
        clock, view, first = self._sender.clock, lane.view, True
        try:
            while lane.next is not None and (not self._starts or lane.next[0].phase == phase.name):
                row, conversation = lane.next
                await asyncio.sleep(self._pause(row, lane, phase, first=first))
                first = False
                await self._send(row, conversation, lane, phase, progress)
                lane.ended = clock.now()
                lane.advance()
        except AgentFailed as failure:
            self.failures[view.index] = str(failure)
        view.state = "failed" if view.index in self.failures else "waiting"
        progress.waiting.discard(view.index)
        if not lane.intruder and progress.first_done is None:
            progress.first_done = clock.now()

    def _pause(self, row: TraceRow, lane: _Lane, phase: PhaseRecord, *, first: bool) -> float:
        """A phase's first requests come as far apart as they came in the trace; later ones after the agent's own pause."""
        now = self._sender.clock.now()
        if first and self._starts:
            return max(0.0, phase.start + (row.timestamp - self._starts[phase.name]) / 1e3 - now)
        return max(0.0, (lane.ended or now) + min((row.delay or 0) / 1e3, self._options.max_delay) - now)

    async def _send(
        self, row: TraceRow, conversation: ReplayConversation, lane: _Lane, phase: PhaseRecord, progress: _Progress
    ) -> None:
        view, clock = lane.view, self._sender.clock
        view.turn, view.ttft = row.turn, None
        conversation.ask(row)
        sent = clock.now()

        def started() -> None:
            if lane.intruder:
                phase.marks |= {"intruder_sent": sent, "intruder_first": clock.now()}
            progress.waiting.discard(view.index)
            if not progress.waiting and phase.window_start is None and progress.first_done is None:
                phase.window_start = clock.now()
                self._changed()

        answer = await self._sender.ask(view, conversation, row.kind, row.output_length, ignore_eos=True, on_first=started)
        conversation.add_answer(answer)
        conversation.count(answer)
        view.context = conversation.context_tokens


@functools.lru_cache(maxsize=16384)
def _block(salt: str, block: int, vocabulary: int) -> np.ndarray:
    return _tokens(f"{salt}/block/{block}", BLOCK_TOKENS, vocabulary)


def _tokens(key: str, count: int, vocabulary: int) -> np.ndarray:
    """Ids in [100, vocabulary - 100): the lowest ones are special in most vocabularies."""
    seed = np.frombuffer(key.encode().ljust(-(-len(key.encode()) // 4) * 4, b"\0"), np.uint32)
    return np.random.default_rng(seed).integers(100, vocabulary - 100, count)


def replay_options(rows: Sequence[TraceRow], url: str, trace: Path, agents: int | None, **others: Any) -> ReplayOptions:
    """Options that fit a trace: by default as many lanes as it has agents, or 8 where it does not say."""
    from .options import Plan, PromptForm

    named = {row.agent for row in rows if row.agent is not None and row.kind != INTRUDE}
    longest = max(row.input_length + row.output_length for row in rows)
    return ReplayOptions(
        url, trace, agents=agents or len(named) or 8, context=0, turns=0, decode_seconds=0, longest=longest,
        plan=Plan.SCRIPTED, prompt=PromptForm.TOKENS, ignore_eos=True, **others,
    )  # fmt: skip
