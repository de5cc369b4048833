"""What a swarm is told to do; checked before anything starts."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.profiles.errors import SparsekvError


class Plan(enum.StrEnum):
    """Who decides what an agent reads."""

    AUTO = "auto"
    """The model where the server takes tools, else the script."""
    MODEL = "model"
    SCRIPTED = "scripted"


class PromptForm(enum.StrEnum):
    """How a prompt is sent."""

    CHAT = "chat"
    """Messages to /v1/chat/completions."""
    TOKENS = "tokens"
    """Token ids to /v1/completions: for a server without a tokenizer. The ids are hashes of pieces of text."""


class Ui(enum.StrEnum):
    LIVE = "live"
    SIMPLE = "simple"
    NONE = "none"


@dataclass(frozen=True)
class Slo:
    """A turn is good if it meets every limit that is set; seconds."""

    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class Limits:
    """How long the client waits; seconds. A long prompt is silent for minutes, so the first limit is generous."""

    first_token: float = 3600.0
    idle: float = 600.0
    """Without a byte, comments included."""
    server_wait: float = 600.0
    """For a server that restarts."""
    retry_after: float = 120.0
    """The longest `Retry-After` that is honoured as it is."""
    attempts: int = 6


@dataclass(frozen=True)
class SwarmOptions:
    """One swarm. Lengths are tokens, times seconds."""

    url: str
    repo: Path
    agents: int = 8
    context: int = 32768
    """Every agent's conversation grows to this before the measured phases."""
    read_tokens: int = 0
    """What an agent reads each turn while it fills its context; 0: an eighth of the context, at most 8192."""
    fill_answer_tokens: int = 32
    turns: int = 4
    """Follow-up questions of each agent in the warm phase."""
    answer_tokens: int = 192
    follow_up_tokens: int = 128
    """What an agent reads with each follow-up."""
    decode_seconds: float = 60.0
    decode_tokens: int = 1024
    """Longest answer of the decode phase; a new question follows at once."""
    intruder_tokens: int = 0
    """A prompt that one more agent sends while the others decode; 0: no such phase."""
    ramp_seconds: float = 2.0
    """Agents start spread over this."""
    seed: int = 0
    model: str | None = None
    plan: Plan = Plan.AUTO
    prompt: PromptForm = PromptForm.CHAT
    vocabulary: int = 32000
    """Ids of token prompts stay under it."""
    ignore_eos: bool = False
    warm: bool = False
    """Leaves out the mark that keeps a run from hitting the prefixes of an earlier one."""
    check_recall: bool = False
    facts: int = 4
    """Planted in each agent's context."""
    recall_floor: float | None = None
    slo: Slo = field(default_factory=Slo)
    limits: Limits = field(default_factory=Limits)
    min_window: float = 10.0
    """A decode window shorter than this measures nothing."""
    gpus: int | None = None
    """GPUs of the server; None: as many as this machine has, for a server on this machine."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields added to every request, as `{"chat_template_kwargs": {"enable_thinking": false}}`."""
    record_text: bool = False

    def __post_init__(self) -> None:
        problems = [message for wrong, message in self._rules() if wrong]
        if problems:
            raise SparsekvError("these options cannot be run", details=tuple(problems))

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (self.agents < 1, f"--agents {self.agents}: at least 1"),
            (self.context < 512, f"--context {self.context}: at least 512 tokens"),
            (self.turns < 0, f"--turns {self.turns}: not negative"),
            (min(self.answer_tokens, self.decode_tokens, self.fill_answer_tokens) < 1, "answers have at least 1 token"),
            (self.decode_seconds < 0 or self.ramp_seconds < 0, "times are not negative"),
            (self.intruder_tokens < 0, f"--intruder-tokens {self.intruder_tokens}: not negative"),
            (
                self.intruder_tokens > 0 and self.decode_seconds == 0,
                "--intruder-tokens needs --decode-seconds: the others must be decoding",
            ),
            (self.turns == 0 and self.decode_seconds == 0, "--turns 0 with --decode-seconds 0 measures nothing"),
            (self.check_recall and self.prompt is PromptForm.TOKENS, "--check-recall needs text, which a server without a tokenizer lacks"),
            (self.check_recall and self.turns < 1, "--check-recall asks between the follow-ups: at least --turns 1"),
            (self.check_recall and self.facts < 1, f"--facts {self.facts}: at least 1"),
            (self.recall_floor is not None and not self.check_recall, "--recall-floor needs --check-recall"),
            (self.plan is Plan.MODEL and self.prompt is PromptForm.TOKENS, "--plan model needs --prompt chat: tools are part of chat"),
        ]

    @property
    def reading(self) -> int:
        return self.read_tokens or max(256, min(8192, self.context // 8))

    @property
    def peak(self) -> int:
        """Prompt and answer of a filled agent's longest turn: what the server must have room for."""
        return self.context + self.follow_up_tokens + 256 + max(self.answer_tokens, self.decode_tokens if self.decode_seconds else 0)
