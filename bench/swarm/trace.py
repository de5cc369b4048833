"""The run as a Mooncake trace: lengths, times and which blocks of a prompt came before, but no text.

Format: github.com/kvcache-ai/Mooncake (FAST'25), read by aiperf and guidellm. Block ids count up in the order in which blocks first appear:
they say what is shared and nothing about what it is. The further fields `agent`, `turn`, `phase`, `kind`, `delay` and `shared` are for
`bench replay`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.profiles.errors import SparsekvError

from .records import RequestRecord

BLOCK_TOKENS = 512


@dataclass
class TraceRow:
    """One request: milliseconds since the run began, and tokens."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    agent: int | None = None
    turn: int = 0
    phase: str = "replay"
    delay: int | None = None
    """Milliseconds since the agent's last answer ended."""
    kind: str = "replay"
    shared: int | None = None
    """Tokens that the prompt begins with and that the agent had sent or received before: to the token, where blocks are coarse."""

    def to_line(self) -> str:
        return json.dumps({k: v for k, v in self.__dict__.items() if v is not None}, separators=(",", ":"))


@dataclass
class _Session:
    ids: list[int] = field(default_factory=list)
    input_length: int = 0
    end: float | None = None


def make_trace(records: Iterable[RequestRecord]) -> list[TraceRow]:
    """The rows of every request that was answered, or that we stopped, in the order of sending."""
    sessions: dict[int, _Session] = {}
    rows, fresh = [], 0
    for record in sorted(records, key=lambda r: r.sent):
        if record.failed or record.input_tokens is None or not record.output_tokens:
            continue
        session = sessions.setdefault(record.agent, _Session())
        # Only whole blocks are shared: the last one of a prompt ends where the next prompt goes on.
        kept = min(record.reusable_tokens, session.input_length) // BLOCK_TOKENS
        wanted = -(-record.input_tokens // BLOCK_TOKENS)
        kept = min(kept, wanted, len(session.ids))
        ids = session.ids[:kept] + list(range(fresh, fresh + wanted - kept))
        fresh += wanted - kept
        delay = None if session.end is None else max(0, round((record.sent - session.end) * 1e3))
        rows.append(
            TraceRow(
                timestamp=round(record.sent * 1e3),
                input_length=record.input_tokens,
                output_length=record.output_tokens,
                hash_ids=ids,
                agent=record.agent,
                turn=record.turn,
                phase=record.phase,
                delay=delay,
                kind=record.kind,
                shared=min(record.reusable_tokens, record.input_tokens),
            )
        )
        session.ids, session.input_length, session.end = ids, record.input_tokens, record.end
    return rows


def read_trace(path: Path) -> list[TraceRow]:
    """Rows of a Mooncake trace, ours or another.

    Raises:
        SparsekvError: with the line and what is wrong with it.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SparsekvError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_parse(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise SparsekvError(
                    f"{path}:{number}: {error}", hint="each line is an object with input_length, output_length and hash_ids"
                ) from None
    if not rows:
        raise SparsekvError(f"{path} holds no request")
    return rows


def _parse(value: Any) -> TraceRow:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    for name, least in (("input_length", 1), ("output_length", 1)):
        if not isinstance(value.get(name), int) or value[name] < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value.get(name)!r}")
    ids = value.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    timestamp = value.get("timestamp", 0)
    if not isinstance(timestamp, int | float) or timestamp < 0:
        raise ValueError(f"timestamp must be milliseconds, not {timestamp!r}")
    for name in ("agent", "shared", "delay"):
        if not isinstance(value.get(name, 0), int | None):
            raise ValueError(f"{name} must be a whole number, not {value[name]!r}")
    return TraceRow(
        timestamp=round(timestamp),
        input_length=value["input_length"],
        output_length=value["output_length"],
        hash_ids=ids,
        agent=value.get("agent"),
        turn=int(value.get("turn", 0)),
        phase=str(value.get("phase", "replay")),
        delay=value.get("delay"),
        kind=str(value.get("kind", "replay")),
        shared=value.get("shared"),
    )
