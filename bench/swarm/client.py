"""Sends one request and reads its stream: what came, when, and whether it may count as an answer."""

from __future__ import annotations

import asyncio
import email.utils
import io
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from .chunks import Delta, ToolCalls, Usage, read_delta
from .options import Limits
from .sse import EventParser

PERMANENT = frozenset({"refused", "unauthorized", "too_long", "not_found"})
"""Errors that sending again will not mend."""


@dataclass
class Answer:
    """Filled while the stream runs, so that one that is cancelled leaves what came until then. Times of `time.perf_counter`.
    With another status than `ok` it is no answer, whatever text came."""

    sent: float = 0.0
    status: str = "stopped"
    detail: str = ""
    retry_after: float | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    first: float | None = None
    first_answer: float | None = None
    end: float = 0.0
    event_times: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    """Output tokens by the server's count at each of these events; empty if it does not count along."""
    keep_alives: int = 0

    @property
    def event_tokens(self) -> list[int] | None:
        """Of each event, where the server counts along and they differ."""
        if len(self.counted) != len(self.event_times):
            return None
        tokens = [now - before for before, now in itertools.pairwise([0, *self.counted])]
        return tokens if len(set(tokens)) > 1 or self.status == "stopped" else None


OnEvent = Callable[[Delta, float], None]


class Client:
    """One connection pool to one server. `headers` carry the key; nothing of them is kept in an answer."""

    def __init__(self, base: str, headers: dict[str, str], limits: Limits) -> None:
        self.base = base
        self._limits = limits
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=limits.idle)
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 18
        )

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, seconds: float = 10.0) -> tuple[int, str]:
        """Status and body; status 0 where nobody answers."""
        try:
            async with self._session.get(self.base + path, timeout=aiohttp.ClientTimeout(total=seconds)) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, str(error) or type(error).__name__

    async def stream(self, path: str, body: bytes, answer: Answer, on_event: OnEvent = lambda delta, moment: None) -> None:
        """Posts `body` and reads the stream into `answer` to its end. Raises nothing but cancellation."""
        answer.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._limits.first_token) as patience:
                async with self._session.post(
                    self.base + path, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
                ) as response:
                    if response.status != 200:
                        await _read_refusal(response, answer, body)
                    else:
                        await _read_stream(response, answer, on_event, patience)
        except TimeoutError:
            answer.status = "no_first_token" if answer.first is None else "idle"
        except aiohttp.ClientConnectorError as error:
            answer.status, answer.detail = "no_connection", type(error.os_error).__name__
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            answer.status, answer.detail = "cut", type(error).__name__
        finally:
            answer.end = time.perf_counter()
        if answer.detail:
            answer.detail = scrub(answer.detail, body)


async def _read_refusal(response: aiohttp.ClientResponse, answer: Answer, body: bytes) -> None:
    text = (await response.content.read(65536)).decode("utf-8", "replace")
    answer.detail = _message(text)
    answer.retry_after = parse_retry_after(response.headers.get("Retry-After"))
    match response.status:
        case 401 | 403:
            answer.status = "unauthorized"
        case 404:
            answer.status = "not_found"
        case 429:
            answer.status = "too_many"
        case 400 | 413 | 422:
            lower = answer.detail.lower()
            answer.status = "too_long" if response.status == 413 or "context length" in lower or "max_model_len" in lower else "refused"
        case status if status >= 500:
            answer.status = "unavailable" if status == 503 else "server_error"
        case _:
            answer.status = "refused"
    answer.detail = f"HTTP {response.status}: {answer.detail}"


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer, on_event: OnEvent, patience: asyncio.Timeout) -> None:
    if "event-stream" not in response.headers.get("Content-Type", ""):
        refusal = (await response.content.read(65536)).decode("utf-8", "replace")
        answer.status, answer.detail = "not_a_stream", _message(refusal)
        return
    text: list[str] = []
    reasoning: list[str] = []
    calls = ToolCalls()
    try:
        await _read_events(response, answer, on_event, patience, text, reasoning, calls)
    finally:
        answer.text, answer.reasoning, answer.tool_calls = "".join(text), "".join(reasoning), calls.finished()


async def _read_events(
    response: aiohttp.ClientResponse,
    answer: Answer,
    on_event: OnEvent,
    patience: asyncio.Timeout,
    text: list[str],
    reasoning: list[str],
    calls: ToolCalls,
) -> None:
    parser, done = EventParser(), False
    async for chunk in response.content.iter_any():
        moment = time.perf_counter()
        for data in parser.feed(chunk):
            if data == "[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                answer.status, answer.detail = "bad_event", f"an event of {len(data)} characters is not JSON"
                return
            if not isinstance(event, dict):
                continue
            if error := event.get("error"):
                answer.status, answer.detail = "error_event", str(error.get("message", "")) if isinstance(error, dict) else str(error)
                return
            delta = read_delta(event)
            answer.finish_reason = delta.finish_reason or answer.finish_reason
            if delta.usage is not None:
                answer.usage = delta.usage
            if delta.generated:
                if answer.first is None:
                    answer.first = moment
                    patience.reschedule(None)
                if delta.answer and answer.first_answer is None:
                    answer.first_answer = moment
                answer.event_times.append(moment)
                if delta.usage is not None and delta.usage.output_tokens is not None:
                    answer.counted.append(delta.usage.output_tokens)
                text.append(delta.answer)
                reasoning.append(delta.reasoning)
                answer.token_ids += delta.token_ids
                calls.add(delta.tool_calls)
                on_event(delta, moment)
        answer.keep_alives = parser.comments
    if answer.finish_reason is None and not (done and answer.first is not None):
        answer.status = "empty" if done else "cut"
    elif answer.finish_reason in ("abort", "error"):
        answer.status = "aborted"
    else:
        answer.status = "empty" if answer.first is None else "ok"


def parse_retry_after(value: str | None) -> float | None:
    """Seconds from a `Retry-After` header: a number or an HTTP date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def scrub(message: str, body: bytes, window: int = 16) -> str:
    """The message on one line of at most 300 characters, without any stretch of `window` characters that stands in the request too."""
    text = re.sub(r"\s+", " ", message)[:400]
    sent = body.decode("utf-8", "replace")
    keep = [True] * len(text)
    for start in range(len(text) - window + 1):
        if text[start : start + window] in sent:
            keep[start : start + window] = [False] * window
    return re.sub(r"\0+", "[…]", "".join(c if kept else "\0" for c, kept in zip(text, keep, strict=True)))[:300]


def _message(text: str) -> str:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text[:300]
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    return value if isinstance(value, str) else json.dumps(value)[:300]
