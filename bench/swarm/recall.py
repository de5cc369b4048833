"""Facts planted in what agents read, asked for later under load, and scored."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_FIRST = (
    "amber",
    "birch",
    "cobalt",
    "dusty",
    "ember",
    "frost",
    "granite",
    "hazel",
    "indigo",
    "juniper",
    "kelp",
    "lunar",
    "maple",
    "nickel",
)
_SECOND = ("falcon", "otter", "heron", "badger", "lynx", "marten", "osprey", "plover", "raven", "sable", "tern", "vole", "wren", "yak")


@dataclass(frozen=True)
class Fact:
    """A line that stands nowhere else, and the question for it."""

    name: str
    code: str

    @property
    def line(self) -> str:
        return f"# note: the release code of {self.name} is {self.code}"

    @property
    def question(self) -> str:
        return f"One of the notes you have read names a release code. What is the release code of {self.name}? Reply with the code only."

    def answered_by(self, text: str) -> bool:
        """Whether the answer names the code, and no other number of its length."""
        return set(re.findall(r"(?<!\d)\d{6}(?!\d)", text)) == {self.code}


def make_facts(count: int, seed: int, agent: int) -> list[Fact]:
    """`count` facts of one agent; no two agents of a seed share a name and code."""
    source = random.Random(f"facts/{seed}/{agent}")
    names = source.sample([f"{a}-{b}" for a in _FIRST for b in _SECOND], count)
    return [Fact(f"{name}-{agent}", f"{source.randrange(100000, 1000000)}") for name in names]


def plant(text: str, fact: Fact, depth: float) -> str:
    """`text` with the fact as a line of its own, `depth` of the way down."""
    lines = text.split("\n")
    at = min(len(lines), max(1, round(depth * len(lines))))
    return "\n".join([*lines[:at], fact.line, *lines[at:]])
