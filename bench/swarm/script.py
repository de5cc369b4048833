"""What an agent reads and asks when nobody else decides: the same for every model, given the repository and the seed."""

from __future__ import annotations

import random
import re

from .repository import Repository
from .tools import excerpt

ROLES = (
    "an engineer new to this code base who wants to understand how it fits together",
    "a reviewer who looks for mistakes in error handling",
    "a performance engineer who follows the hot path",
    "a security auditor who follows untrusted input",
    "a technical writer who documents the public interface",
    "a tester who looks for cases that nothing covers",
    "a maintainer who plans a refactoring",
    "a debugger who traces a wrong value to its source",
)

QUESTIONS = {
    "explain": "Explain what {symbol} in {path} does, step by step, and why it is needed.",
    "locate": "Where is {symbol} defined, and which of the files you have read use it?",
    "trace": "Trace what happens from a call of {symbol} in {path} until it returns. Name every function on the way.",
    "quote": "Quote the lines of {path} that define {symbol}, exactly as they stand.",
    "compare": "Compare {symbol} in {path} with {other}. What do they share, and where do they differ?",
}

_SYMBOL = re.compile(r"\b(?:def|class|func|fn|function|interface|struct|type|const|let|var|enum|trait|impl)\s+([A-Za-z_]\w{2,})")
_WORD = re.compile(r"[A-Za-z_]\w{3,}")


class Script:
    """One agent's reading and questions."""

    def __init__(self, repository: Repository, seed: int, agent: int) -> None:
        self.role = ROLES[agent % len(ROLES)]
        self._repository = repository
        self._random = random.Random(f"{seed}/{agent}")
        self._order: list[str] = []
        self._path, self._line = "", 0
        self._symbols: list[tuple[str, str]] = []
        """(symbol, path) of what was read, latest last."""
        self.passes = 0
        """How often the whole repository was begun: more than once, and the agent reads again what it knows."""

    def read(self, chars: int) -> str:
        """Excerpts of about `chars` characters, where the last reading ended."""
        parts: list[str] = []
        left = chars
        while left > 0:
            if not self._path or self._line >= len(self._repository.files[self._path]):
                self._path, self._line = self._next_file(), 0
            lines = self._repository.files[self._path]
            end, size = self._line, 0
            while end < len(lines) and (size < left or end == self._line):
                size += len(lines[end]) + 1
                end += 1
            taken = lines[self._line : end]
            parts.append(excerpt(self._path, self._line + 1, taken))
            self._learn(self._path, taken)
            self._line = end
            left -= len(parts[-1]) + 2
        return "\n\n".join(parts)

    def question(self) -> tuple[str, str]:
        """(kind, text) of a new question about something that was read."""
        kind = self._random.choice(sorted(QUESTIONS))
        symbol, path = self._pick()
        other, _ = self._pick()
        return kind, QUESTIONS[kind].format(symbol=f"`{symbol}`", path=path, other=f"`{other}`")

    def _next_file(self) -> str:
        if not self._order:
            self._order = list(self._repository.files)
            self._random.shuffle(self._order)
            self.passes += 1
        return self._order.pop()

    def _learn(self, path: str, lines: list[str]) -> None:
        text = "\n".join(lines)
        found = _SYMBOL.findall(text) or _WORD.findall(text)[:3] or [path.rsplit("/", 1)[-1]]
        self._symbols += [(symbol, path) for symbol in dict.fromkeys(found)]
        del self._symbols[:-2000]

    def _pick(self) -> tuple[str, str]:
        return self._random.choice(self._symbols) if self._symbols else ("main", next(iter(self._repository.files)))
