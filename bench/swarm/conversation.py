"""An agent's growing conversation, kept as the bytes that are sent: a turn costs its own length, not that of what went before."""

from __future__ import annotations

import json
import re
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from .client import Answer


@dataclass(frozen=True)
class Mark:
    """A point to come back to."""

    parts: int
    chars: int
    context_tokens: int


class Conversation(ABC):
    """Grows by turns. `context_tokens` is what the server counted: prompt and answer of the last request."""

    path: str

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.chars = 0
        self.context_tokens = 0
        """As the server counted after the last answer; 0 before the first."""
        self.reusable_tokens = 0
        """Of the next prompt, what a prefix cache without limits holds."""
        self.chars_per_token = 3.0
        self._counted_chars = 0
        self._recorded = 0

    @property
    def text_per_token(self) -> float:
        """Characters of text that make a token, going by what was sent so far."""
        return self.chars_per_token

    def new_parts(self) -> list[bytes]:
        """What was added since the last call, as JSON: messages or runs of ids."""
        fresh = self._parts[self._recorded :]
        self._recorded = len(self._parts)
        return fresh

    @abstractmethod
    def add_user(self, text: str) -> None:
        """What the user says next."""

    @abstractmethod
    def add_answer(self, answer: Answer) -> None:
        """What the model answered."""

    @abstractmethod
    def body(self, options: dict[str, Any]) -> bytes:
        """The request's JSON: `options` and the whole conversation."""

    def count(self, answer: Answer) -> None:
        """Takes the server's counts of a request whose answer was added."""
        if answer.usage.input_tokens is None:
            return
        output = answer.usage.output_tokens or 0
        self.context_tokens = answer.usage.input_tokens + output
        # What a chat template drops of an answer (its reasoning) is not in the next prompt.
        self.reusable_tokens = answer.usage.input_tokens if answer.reasoning else self.context_tokens
        self._counted_chars = self.chars
        self.chars_per_token = max(1.0, self.chars / max(1, self.context_tokens))

    def estimate(self) -> int:
        """Tokens of the next prompt."""
        return self.context_tokens + int((self.chars - self._counted_chars) / self.chars_per_token) + 1

    def mark(self) -> Mark:
        return Mark(len(self._parts), self.chars, self.context_tokens)

    def rewind(self, mark: Mark) -> None:
        """Back to a mark: later turns are forgotten, and their prefix is still the server's."""
        del self._parts[mark.parts :]
        self._recorded = min(self._recorded, mark.parts)
        self.chars = self._counted_chars = mark.chars
        self.context_tokens = self.reusable_tokens = mark.context_tokens

    def _append(self, part: bytes, chars: int) -> None:
        self._parts.append(part)
        self.chars += chars


class ChatConversation(Conversation):
    """Messages of /v1/chat/completions."""

    path = "/v1/chat/completions"

    def __init__(self, system: str) -> None:
        super().__init__()
        self._add({"role": "system", "content": system})

    def add_user(self, text: str) -> None:
        self._add({"role": "user", "content": text})

    def add_answer(self, answer: Answer) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            calls = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in answer.tool_calls
            ]
            message["tool_calls"] = calls
        self._add(message)

    def add_tool_result(self, call_id: str, text: str) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": text})

    def body(self, options: dict[str, Any]) -> bytes:
        return json.dumps(options)[:-1].encode() + b', "messages": [' + b",".join(self._parts) + b"]}"

    def _add(self, message: dict[str, Any]) -> None:
        calls = sum(len(c["function"]["arguments"]) for c in message.get("tool_calls", ()))
        self._append(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"), len(message["content"]) + calls)


class TokenConversation(Conversation):
    """Token ids of /v1/completions; `chars` counts ids. Equal text gives equal ids, so code repeats itself as it does in text."""

    path = "/v1/completions"

    def __init__(self, system: str, vocabulary: int) -> None:
        super().__init__()
        self.chars_per_token = 1.0
        self._vocabulary = vocabulary
        self._text = self._pieces = 0
        self.add_user(system)

    @property
    def text_per_token(self) -> float:
        return self._text / max(1, self._pieces)

    def add_user(self, text: str) -> None:
        ids = [hash_token(piece, self._vocabulary) for piece in pieces(text)]
        self._text += len(text)
        self._pieces += len(ids)
        self._add_ids(ids)

    def add_answer(self, answer: Answer) -> None:
        self._add_ids(answer.token_ids)

    def body(self, options: dict[str, Any]) -> bytes:
        return json.dumps(options | {"return_token_ids": True})[:-1].encode() + b', "prompt": [' + b",".join(self._parts) + b"]}"

    def _add_ids(self, ids: list[int]) -> None:
        if ids:
            self._append(",".join(map(str, ids)).encode(), len(ids))


_PIECE = re.compile(r"[A-Za-z_]{1,5}|\d{1,3}|\s+|[^\w\s]{1,2}|.", re.DOTALL)


def pieces(text: str) -> list[str]:
    """Text cut as finely as a tokenizer of code would."""
    return _PIECE.findall(text)


def hash_token(piece: str, vocabulary: int) -> int:
    """An id in [100, vocabulary): the lowest ones are special in most vocabularies."""
    return 100 + zlib.crc32(piece.encode("utf-8", "surrogatepass")) % (vocabulary - 200)
