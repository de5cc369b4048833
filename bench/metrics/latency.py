"""How long things take, seen by the client."""

from __future__ import annotations

import itertools

import numpy as np

from .data import Window
from .declare import Value, metric


@metric("Time to first token (TTFT)", "s", "lower", 3)
def ttft(window: Window) -> Value:
    """From sending a request to the first event that carries something generated (reasoning, answer, tool call), over the requests of the
    phase that got one and did not fail. Keep-alive comments, roles and empty texts are not output."""
    return [r.first - r.sent for r in window.measured if r.first is not None]


@metric("Time to first answer", "s", "lower", 3)
def ttfa(window: Window) -> Value:
    """From sending a request to the first event with text of the answer itself, not reasoning or a tool call; only where it differs from
    TTFT in some request."""
    answers = [r for r in window.measured if r.first_answer is not None]
    if all(r.first_answer == r.first for r in answers):
        return None
    return [r.first_answer - r.sent for r in answers if r.first_answer is not None]


@metric("Inter-token latency (ITL)", "s", "lower", 4)
def itl(window: Window) -> Value:
    """Time between consecutive events of one stream that carry output, over all streams, where the later one arrived in the window. An
    event may carry several tokens (speculation, batching): see tokens per event."""
    gaps = [gaps[~np.isnan(gaps)] for _, _, gaps in window.events.values()]
    return np.concatenate(gaps).tolist() if gaps else None


@metric("Tokens per event", "tok", "", 2)
def tokens_per_event(window: Window) -> Value:
    """Output tokens in the window / events that carried them."""
    events = sum(len(times) for times, _, _ in window.events.values())
    return window.output_tokens() / events if events else None


@metric("Time per output token (TPOT)", "s", "lower", 4)
def tpot(window: Window) -> Value:
    """(last event - first event) / (output tokens - tokens of the first event), per request of the phase that was answered or that we
    stopped. It leaves out the first token's wait, as vLLM's own benchmark does."""
    return [r.tpot for r in window.measured if r.tpot is not None]


@metric("Turn time", "s", "lower", 2)
def turn_time(window: Window) -> Value:
    """From a question to the end of its last answer: retries, tool calls and their rounds included."""
    return [records[-1].end - records[0].sent for records in window.turns()]


@metric("Tool time per turn", "s", "", 3)
def tool_time(window: Window) -> Value:
    """Time in tools within a turn, which is the client's and not the model's; only of turns with tool calls."""
    times = [sum(r.tool_seconds for r in records) for records in window.turns() if any(r.tool_calls for r in records)]
    return times


@metric("Longest silence", "s", "lower", 2)
def longest_silence(window: Window) -> Value:
    """The longest gap between two events of one stream in the window; a stream that stands still at the window's end counts until then."""
    longest = 0.0
    for record in window.measured:
        if record.first is None or record.first >= window.end:
            continue
        times = [*record.event_times, max(record.end, record.last or 0.0)]
        for before, after in itertools.pairwise(times):
            if after > window.start and before < window.end:
                longest = max(longest, min(after, window.end) - max(before, window.start))
    return longest if window.active else None
