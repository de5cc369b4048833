"""How much prefill a step takes on, and whose. Pure arithmetic: no vLLM, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .step_cost import StepCost, StepLoad

MIN_CHUNK = 32
"""Tokens below which a block is not split."""

BURST = 1.8
"""A step with decodes is planned no longer than this multiple of the target, if any chunk is short enough for that."""

MIN_PREFILL_SHARE = 0.1
"""Share of the time that prefill gets where the decodes alone already exceed the target."""


@dataclass(frozen=True)
class SchedulerSettings:
    """Section `scheduler` of a profile."""

    itl_target_ms: float = 50.0
    """Time between two steps of a decoding request while prompts are prefilled; under speculation a step yields several tokens."""
    idle_step_ms: float = 1000.0
    """Longest step while nobody decodes. A newcomer waits for at most two of them."""
    retry_after_s: int = 15
    """What a client refused with 503 is told to wait."""

    def __post_init__(self) -> None:
        for name in ("itl_target_ms", "idle_step_ms", "retry_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"scheduler.{name} is {getattr(self, name)}, must be greater than 0")


@dataclass(frozen=True)
class Prefill:
    """A request with prompt tokens left to compute."""

    request_id: str
    start: int
    """Tokens computed so far, prefix hits included."""
    remaining: int
    urgent: bool = False
    """Ahead of all others: it holds memory and blocks the queue until it runs."""


class PrefillPlanner:
    """Decides each step's chunks.

    **How much.** Steps with decodes last `itl_target_ms` on average, by the learned cost. Chunks end at multiples of a
    block and do not fill a step exactly: what a step leaves of the target goes to a reserve, and a block runs once
    target and reserve pay for it; where one block takes longer than the target leaves, prefill waits for that. Where even a block alone
    would make a step longer than `BURST` targets, it is computed in halves or quarters. Without decodes the limit is
    `idle_step_ms`, and the first chunk always runs.

    **Whose.** Half of the prefill tokens are shared evenly: who lags behind its half share by a chunk is served first,
    the oldest foremost. The rest goes to whoever has least left. A short question behind a huge prompt starts in the
    next step, and the huge prompt keeps at least half of its fair share whatever arrives. A step that ends a prompt
    takes on no more than that, so that its first token comes soon.
    """

    def __init__(self, settings: SchedulerSettings, cost: StepCost, block_size: int) -> None:
        self.settings = settings
        self.cost = cost
        self.block_size = block_size
        self._reserve_ms = 0.0
        self._owed: dict[str, float] = {}

    def plan(self, decodes: StepLoad, prefills: Sequence[Prefill], max_tokens: int) -> dict[str, int]:
        """Tokens to prefill in the next step, by request; a request not named gets none.

        Args:
            prefills: the oldest first.
            max_tokens: room for prefill in the step's batch.
        """
        if not prefills:
            self._reserve_ms, self._owed = 0.0, {}
            return {}
        base = self.cost.mixed_base(decodes)
        target, busy = self.settings.itl_target_ms, bool(decodes.decode_tokens)
        longest = target * BURST if busy else self.settings.idle_step_ms
        quanta = {p.request_id: self._quantum(p, longest - base, max_tokens) for p in prefills}
        dearest = max(self.cost.chunk(p.start, _first_chunk(p, quanta[p.request_id])) for p in prefills)
        lacking = max(base + dearest - target, 0.0)
        limit = min(target + self._reserve_ms, max(longest, base + dearest)) if busy else longest
        granted = self._share(prefills, quanta, limit - base, max_tokens, must_run=not busy)
        self._save(decodes, prefills, granted, lacking)
        self._account(prefills, granted)
        return granted

    def _quantum(self, prefill: Prefill, ms: float, max_tokens: int) -> int:
        """A block, or the largest half, quarter … of it that takes at most `ms` and `max_tokens`."""
        tokens = self.block_size
        while (tokens > max_tokens or self.cost.chunk(prefill.start, tokens) > ms) and tokens % 2 == 0 and tokens // 2 >= MIN_CHUNK:
            tokens //= 2
        return tokens

    def _share(
        self, prefills: Sequence[Prefill], quanta: dict[str, int], room_ms: float, max_tokens: int, must_run: bool
    ) -> dict[str, int]:
        granted: dict[str, int] = {}
        ends_one = False
        for prefill, most in self._order(prefills, quanta):
            got, quantum = granted.get(prefill.request_id, 0), quanta[prefill.request_id]
            left = replace(prefill, start=prefill.start + got, remaining=prefill.remaining - got)
            most = min(most, left.remaining, max_tokens)
            if most <= 0:
                continue
            tokens = _to_boundary(left, min(most, self.cost.affordable(left.start, room_ms)), quantum)
            if not tokens and must_run and not granted:
                tokens = min(_first_chunk(left, quantum), max_tokens)
            ends = tokens == left.remaining
            if not tokens or (ends_one and not ends):
                break
            ends_one |= ends
            granted[prefill.request_id] = got + tokens
            room_ms -= self.cost.chunk(left.start, tokens)
            max_tokens -= tokens
        return granted

    def _order(self, prefills: Sequence[Prefill], quanta: dict[str, int]) -> list[tuple[Prefill, int]]:
        """Who is served in which order, and with how many tokens at most."""
        age = {p.request_id: i for i, p in enumerate(prefills)}
        by_need = sorted(prefills, key=lambda p: (not p.urgent, p.remaining, age[p.request_id]))
        urgent = [(p, _first_chunk(p, quanta[p.request_id])) for p in by_need if p.urgent]
        owed = [(p, _to_boundary(p, int(self._owed.get(p.request_id, 0.0)), quanta[p.request_id])) for p in prefills if not p.urgent]
        return urgent + owed + [(p, p.remaining) for p in by_need]

    def _save(self, decodes: StepLoad, prefills: Sequence[Prefill], granted: dict[str, int], lacking: float) -> None:
        """Adds to the reserve what the step leaves of the target, up to what the dearest first chunk lacks and a step's rest."""
        if not decodes.decode_tokens:
            self._reserve_ms = 0.0
            return
        target, pure_ms = self.settings.itl_target_ms, self.cost.predict(decodes)
        rest = max(target - pure_ms, MIN_PREFILL_SHARE * pure_ms)
        chunks = tuple((p.start, granted[p.request_id]) for p in prefills if p.request_id in granted)
        left = target - self.cost.predict(replace(decodes, chunks=chunks)) if granted else rest
        self._reserve_ms = max(min(self._reserve_ms + left, lacking + rest), 0.0)

    def _account(self, prefills: Sequence[Prefill], granted: dict[str, int]) -> None:
        share = sum(granted.values()) / (2 * len(prefills))
        self._owed = {p.request_id: max(0.0, self._owed.get(p.request_id, 0.0) + share - granted.get(p.request_id, 0)) for p in prefills}


def _first_chunk(prefill: Prefill, quantum: int) -> int:
    """Tokens of the smallest chunk it can run."""
    return min(quantum - prefill.start % quantum, prefill.remaining)


def _to_boundary(prefill: Prefill, tokens: int, quantum: int) -> int:
    """The most of `tokens` with which a chunk ends on a multiple of the quantum, or ends the prefill."""
    if tokens >= prefill.remaining:
        return prefill.remaining
    return max((prefill.start + tokens) // quantum * quantum - prefill.start, 0)
