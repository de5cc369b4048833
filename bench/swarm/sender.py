"""Sends an agent's requests until one is answered or sending again is of no use, and keeps a record of every attempt."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from .chunks import Delta
from .client import PERMANENT, Answer, Client
from .conversation import Conversation
from .options import SwarmOptions
from .records import RequestRecord
from .server import Server, request_options


class AgentFailed(Exception):
    """An agent cannot go on; the others do."""


@dataclass
class AgentView:
    """What the screen shows of one agent; also what tells the driver that it decodes."""

    index: int
    role: str = ""
    state: str = "waiting"
    """waiting, reading (its prompt is with the server), decoding, tool, retrying, done or failed."""
    turn: int = 0
    context: int = 0
    tokens: float = 0.0
    """Output tokens so far, as far as the stream tells."""
    ttft: float | None = None
    words: str = ""
    errors: int = 0


class Clock:
    """Seconds since the run began."""

    def __init__(self) -> None:
        self.zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.zero

    def of(self, moment: float) -> float:
        return moment - self.zero


class Sender:
    """Shared by all agents of a run."""

    def __init__(
        self,
        client: Client,
        server: Server,
        options: SwarmOptions,
        clock: Clock,
        record: Callable[[RequestRecord], None],
        record_text: Callable[[str], None] | None = None,
    ) -> None:
        self.client, self.server, self.options, self.clock, self._record = client, server, options, clock, record
        self._record_text = record_text
        self.phase = ""
        self._random = random.Random(f"{options.seed}/retry")

    async def ask(
        self,
        view: AgentView,
        conversation: Conversation,
        kind: str,
        max_tokens: int,
        *,
        tools: bool = False,
        ignore_eos: bool = False,
        tool_seconds: float = 0.0,
        score: Callable[[Answer], bool | None] | None = None,
        on_first: Callable[[], None] = lambda: None,
    ) -> Answer:
        """The answer to the conversation's last words; it is not yet part of the conversation. `on_first` is called when output begins.

        Raises:
            AgentFailed: refused for good, or `limits.attempts` attempts failed.
        """
        body = request_options(self.options, self.server, max_tokens, tools=tools)
        if ignore_eos:
            body["ignore_eos"] = True
        payload = conversation.body(body)
        for attempt in range(self.options.limits.attempts):
            answer = Answer()
            view.state = "reading"
            follow = _Follower(view, answer, on_first)
            try:
                await self.client.stream(conversation.path, payload, answer, follow)
            finally:
                record = self._to_record(view, conversation, kind, attempt, answer, max_tokens, tool_seconds)
                if answer.status == "ok" and score is not None:
                    record.recalled = score(answer)
                view.errors += record.failed
                self._record(record)
                if self._record_text is not None:
                    self._record_text(_text_line(record, conversation, answer))
            if answer.status == "ok":
                return answer
            if answer.status in PERMANENT:
                break
            view.state = "retrying"
            await self._pause(answer, attempt)
        view.state = "failed"
        raise AgentFailed(f"{answer.status}: {answer.detail}")

    async def _pause(self, answer: Answer, attempt: int) -> None:
        """Waits as long as the server asks for, or longer each time; for a server that is gone, until it is back."""
        limits = self.options.limits
        if answer.retry_after is not None:
            await asyncio.sleep(min(answer.retry_after, limits.retry_after))
            return
        await asyncio.sleep(min(0.25 * 2**attempt, 8.0) * (1 + self._random.random() / 4))
        give_up = time.monotonic() + limits.server_wait
        while answer.status in ("no_connection", "cut") and time.monotonic() < give_up:
            status, _ = await self.client.get("/health", seconds=5)
            if status:
                return
            await asyncio.sleep(1.0)

    def _to_record(
        self, view: AgentView, conversation: Conversation, kind: str, attempt: int, answer: Answer, max_tokens: int, tool_seconds: float
    ) -> RequestRecord:
        times, of = answer.event_times, self.clock.of
        output = answer.usage.output_tokens
        if output is None and answer.status == "stopped" and answer.counted:
            output = answer.counted[-1]
        return RequestRecord(
            agent=view.index,
            turn=view.turn,
            phase=self.phase,
            kind=kind,
            sent=round(of(answer.sent), 6),
            end=round(of(answer.end), 6),
            status=answer.status,
            detail=answer.detail,
            attempt=attempt,
            first=None if answer.first is None else round(of(answer.first), 6),
            first_answer=None if answer.first_answer is None else round(of(answer.first_answer), 6),
            last=round(of(times[-1]), 6) if times else None,
            gaps_ms=[round((b - a) * 1e3, 3) for a, b in itertools.pairwise(times)],
            event_tokens=answer.event_tokens,
            input_tokens=answer.usage.input_tokens,
            output_tokens=output,
            cached_tokens=answer.usage.cached_tokens,
            reusable_tokens=conversation.reusable_tokens,
            max_tokens=max_tokens,
            finish_reason=answer.finish_reason,
            keep_alives=answer.keep_alives,
            tool_calls=len(answer.tool_calls),
            tool_seconds=round(tool_seconds, 6),
            retry_after=answer.retry_after,
        )


def _text_line(record: RequestRecord, conversation: Conversation, answer: Answer) -> str:
    """One line of text.jsonl: what the prompt has more than the agent's last one, and what came."""
    sent = [json.loads(part) if part.startswith(b"{") else part.decode() for part in conversation.new_parts()]
    got = {"text": answer.text, "reasoning": answer.reasoning, "tool_calls": answer.tool_calls, "token_ids": answer.token_ids}
    return json.dumps(
        {"agent": record.agent, "turn": record.turn, "attempt": record.attempt, "sent": sent, "got": {k: v for k, v in got.items() if v}},
        ensure_ascii=False,
    )


class _Follower:
    """Keeps a view up to date while a stream runs."""

    def __init__(self, view: AgentView, answer: Answer, on_first: Callable[[], None]) -> None:
        self._view, self._answer, self._on_first, self._counted = view, answer, on_first, 0

    def __call__(self, delta: Delta, moment: float) -> None:
        view = self._view
        if view.state != "decoding":
            view.state = "decoding"
            view.ttft = moment - self._answer.sent
            self._on_first()
        if delta.usage is not None and delta.usage.output_tokens is not None:
            view.tokens += delta.usage.output_tokens - self._counted
            self._counted = delta.usage.output_tokens
        else:
            view.tokens += max(1, len(delta.token_ids))
        if piece := delta.answer or delta.reasoning:
            view.words = (view.words + piece)[-160:]
