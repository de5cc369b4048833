"""One event of a completion stream: what it adds to the answer, in any of the dialects that servers speak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Usage:
    """Token counts as the server gives them; None where it does not."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass
class Delta:
    """What one event adds."""

    answer: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None

    @property
    def generated(self) -> bool:
        """Whether the model made something: an opening role, usage or an empty text are not that."""
        return bool(self.answer or self.reasoning or self.token_ids or self.tool_calls)


def read_delta(chunk: dict[str, Any]) -> Delta:
    """Reads chat chunks (`delta`) and completion chunks (`text`). The reasoning comes as `reasoning_content` or `reasoning`."""
    result = Delta(usage=_usage(chunk.get("usage")))
    for choice in chunk.get("choices") or ():
        if reason := choice.get("finish_reason"):
            result.finish_reason = reason
        result.token_ids += choice.get("token_ids") or ()
        result.answer += _text(choice.get("text"))
        delta = choice.get("delta") or {}
        result.answer += _text(delta.get("content")) + _text(delta.get("refusal"))
        result.reasoning += _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
        result.tool_calls += delta.get("tool_calls") or ()
        if call := delta.get("function_call"):  # the form before tools
            result.tool_calls.append({"index": 0, "function": call})
    return result


class ToolCalls:
    """Puts the fragments of tool calls together."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, str]] = {}

    def add(self, fragments: list[dict[str, Any]]) -> None:
        for fragment in fragments:
            index = fragment.get("index")
            call = self._calls.setdefault(len(self._calls) if index is None else index, {"id": "", "name": "", "arguments": ""})
            function = fragment.get("function") or {}
            call["id"] = fragment.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            arguments = function.get("arguments")
            call["arguments"] += arguments if isinstance(arguments, str) else ""

    def finished(self) -> list[dict[str, str]]:
        return [call | {"id": call["id"] or f"call_{index}"} for index, call in sorted(self._calls.items())]


def _text(value: Any) -> str:
    """A text, or the texts of a list of parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part.get("text") or "" if isinstance(part, dict) else str(part) for part in value)
    return ""


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details") or {}
    return Usage(value.get("prompt_tokens"), value.get("completion_tokens"), details.get("cached_tokens"))
