"""One line of requests.jsonl: what happened to one request. Texts are never in it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class RequestRecord:
    """Times are seconds since the run began, by the client's monotonic clock."""

    agent: int
    turn: int
    """Counts the agent's questions; a retry or the round after a tool call has the same."""
    phase: str
    kind: str
    """What was asked: explain, locate, trace, quote, compare, recall, read (filling), intrude or replay."""
    sent: float
    end: float = 0.0
    status: str = "ok"
    """`ok`; `stopped` (by us, at a phase's end); else the kind of error."""
    detail: str = ""
    """The server's message, without any stretch of the prompt."""
    attempt: int = 0
    first: float | None = None
    """First event that carried something generated, of any kind."""
    first_answer: float | None = None
    """First event that carried text of the answer itself, not reasoning or a tool call."""
    last: float | None = None
    gaps_ms: list[float] = field(default_factory=list)
    """Between events that carried something generated."""
    event_tokens: list[int] | None = None
    """Tokens of each event where the server counts along; None: taken as equal."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reusable_tokens: int = 0
    """Of the prompt, what this client had sent or received before: the hits of a prefix cache without limits."""
    max_tokens: int = 0
    finish_reason: str | None = None
    keep_alives: int = 0
    tool_calls: int = 0
    tool_seconds: float = 0.0
    """Spent running tools before this request."""
    retry_after: float | None = None
    recalled: bool | None = None
    """Of a question for a planted fact: answered right."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def failed(self) -> bool:
        return self.status not in ("ok", "stopped")

    @property
    def event_times(self) -> list[float]:
        if self.first is None:
            return []
        times = [self.first]
        for gap in self.gaps_ms:
            times.append(times[-1] + gap / 1e3)
        return times

    @property
    def tokens_of_events(self) -> list[float]:
        """Output tokens of each event; those of a server that does not count along are spread evenly."""
        count = 0 if self.first is None else len(self.gaps_ms) + 1
        if self.event_tokens is not None:
            return [float(n) for n in self.event_tokens]
        total = count if self.output_tokens is None else self.output_tokens
        return [total / count] * count if count else []

    @property
    def tpot(self) -> float | None:
        """(last event - first event) / (output tokens - tokens of the first event); None for a single event."""
        tokens = self.tokens_of_events
        after_first = sum(tokens[1:])
        return (self.last - self.first) / after_first if after_first and self.first is not None and self.last is not None else None

    def to_line(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v not in (None, [], "")}, separators=(",", ":"))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RequestRecord:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in value.items() if k in known})
