"""Right or wrong, per task; no partial credit."""

from __future__ import annotations

import re


def correct(task: str, answer: str, reply: str) -> bool:
    """Whether `reply`, a model's text, gives `answer`.

    Numbers: the last one in the reply (a chain may lead to it). Lists: all numbers, in order. Identifiers: the last one.
    Copied text: the same lines, leading and trailing blanks and a code fence apart.
    """
    match task:
        case "needle" | "count" | "variable":
            return _numbers(reply)[-1:] == _numbers(answer)[-1:]
        case "extract":
            return _numbers(reply) == _numbers(answer)
        case "uuid":
            return re.findall(r"[0-9a-f]{4}(?:-[0-9a-f]{4}){3}", reply)[-1:] == [answer]
        case "function" | "log":
            return _lines(reply) == _lines(answer)
    raise ValueError(f"no scorer for task {task}")


def _numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.-])\d+(?![\w-])", text)


def _lines(text: str) -> list[str]:
    kept = [line.strip() for line in text.strip().splitlines() if not line.strip().startswith("```")]
    if kept and kept[0].startswith("def "):  # the header was not asked for, but is no mistake
        kept = kept[1:]
    return [line for line in kept if line]
