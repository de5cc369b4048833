"""The scheduler's book of checkpoints: what each slot holds, what is worth keeping, and who gives way."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

Key = bytes
"""vLLM's hash of a whole prefix: of its last block and, through it, of all before."""


class Kind(Enum):
    """Why a state is worth keeping."""

    INTERIOR = "interior"
    """Somewhere inside a prompt: kept for edits, as far apart as the policy says."""
    JUNCTION = "junction"
    """Where a prompt parted from what was cached: more may part there."""
    TURN = "turn"
    """The last block boundary of a prompt: a follow-up that drops or rewrites the answer resumes here."""
    ANSWER = "answer"
    """The last block boundary of an answer so far: a follow-up resumes here."""


@dataclass(frozen=True)
class RetentionPolicy:
    """Which of the states that pass by are kept."""

    interval: int = 0
    """Blocks between two interior checkpoints of a conversation at least; 0 keeps none."""
    turns: int = 2
    """A conversation's latest prompts whose ends, and whose answers' ends, are kept. Older ones stay where they fit the interval."""


@dataclass
class Checkpoint:
    """One slot in use."""

    key: Key
    blocks: int
    """Length of the prefix."""
    slot: int
    kind: Kind
    stored: float
    pins: int = 0
    """Loads under way from the slot."""
    dropped: bool = False
    """No longer to be found; the slot is freed when its last load ends."""


class CheckpointIndex:
    """Slots `0 … num_slots - 1`.

    Within the limits of the policy, the least recently used gives way: interior checkpoints first, and an interior one
    drives out only its like. A conversation with many of them does not cost the others their latest states.
    """

    def __init__(self, num_slots: int, policy: RetentionPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.clock = clock
        self.num_evicted = 0
        """Checkpoints that lost their slot to others or lost their rows; those the policy let go are not counted."""
        self.num_refused = 0
        """States worth keeping that found no slot."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._interior: OrderedDict[Key, Checkpoint] = OrderedDict()
        self._others: OrderedDict[Key, Checkpoint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._interior) + len(self._others)

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[Checkpoint]:
        yield from self._interior.values()
        yield from self._others.values()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def oldest(self) -> float:
        """Seconds since the oldest checkpoint was stored; 0 where there is none."""
        return self.clock() - min(c.stored for c in self) if len(self) else 0.0

    def get(self, key: Key) -> Checkpoint | None:
        return self._others.get(key) or self._interior.get(key)

    def longest(self, keys: Sequence[Key], above: int, limit: int) -> Checkpoint | None:
        """The checkpoint of the longest prefix of `keys` of more than `above` and at most `limit` blocks."""
        for blocks in range(min(limit, len(keys)), above, -1):
            if (found := self.get(keys[blocks - 1])) is not None:
                return found
        return None

    def offer(self, keys: Sequence[Key], blocks: int, kind: Kind) -> Checkpoint | None:
        """A state passes by: that behind the first `blocks` blocks of the prefix `keys`.

        Returns:
            The checkpoint to copy it to; None if it is kept already or not worth it.
        """
        if (known := self.get(keys[blocks - 1])) is not None:
            self._rank(known, kind)
            return None
        before = self._before(keys, blocks)
        if kind is Kind.INTERIOR and not self._apart(before[0] if before else None, blocks):
            return None
        self._thin(before, kind)
        slot = self._take_slot(kind)
        if slot is None:
            self.num_refused += 1
            return None
        checkpoint = Checkpoint(keys[blocks - 1], blocks, slot, kind, self.clock())
        self._queue(kind)[checkpoint.key] = checkpoint
        return checkpoint

    def use(self, checkpoint: Checkpoint) -> None:
        """A request resumes from it."""
        self._queue(checkpoint.kind).move_to_end(checkpoint.key)

    def pin(self, checkpoint: Checkpoint) -> None:
        """A load from its slot begins: the slot is not given away until `unpin`."""
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins -= 1
        if checkpoint.dropped and not checkpoint.pins:
            self._free.append(checkpoint.slot)

    def rows_evicted(self, key: Key) -> None:
        """The last rows of this prefix are gone: its state alone is of no use."""
        if (checkpoint := self.get(key)) is not None:
            self.num_evicted += 1
            self._drop(checkpoint)

    def clear(self) -> None:
        for checkpoint in list(self):
            self._drop(checkpoint)

    def _before(self, keys: Sequence[Key], blocks: int) -> list[Checkpoint]:
        """Those of shorter prefixes, the longest first."""
        found = (self.get(keys[i]) for i in range(blocks - 2, -1, -1))
        return [checkpoint for checkpoint in found if checkpoint is not None]

    def _apart(self, before: Checkpoint | None, blocks: int) -> bool:
        return self.policy.interval > 0 and blocks - (before.blocks if before else 0) >= self.policy.interval

    def _thin(self, before: list[Checkpoint], kind: Kind) -> None:
        """A conversation goes on: earlier ends of the same answer, and ends of old turns, become interior or go."""
        turns, superseded = int(kind is Kind.TURN), kind is Kind.ANSWER
        for i, checkpoint in enumerate(before):
            if checkpoint.kind is Kind.TURN:
                turns, superseded = turns + 1, False
                expired = turns > self.policy.turns
            elif checkpoint.kind is Kind.ANSWER:
                expired = superseded or turns >= self.policy.turns
                superseded = True
            else:
                continue
            if not expired:
                continue
            if self._apart(before[i + 1] if i + 1 < len(before) else None, checkpoint.blocks):
                self._move(checkpoint, Kind.INTERIOR)
            else:
                self._drop(checkpoint)

    def _rank(self, checkpoint: Checkpoint, kind: Kind) -> None:
        """The same state again, perhaps for a better reason."""
        if checkpoint.kind is Kind.INTERIOR and kind is not Kind.INTERIOR:
            self._move(checkpoint, kind)
        self.use(checkpoint)

    def _move(self, checkpoint: Checkpoint, kind: Kind) -> None:
        del self._queue(checkpoint.kind)[checkpoint.key]
        checkpoint.kind = kind
        self._queue(kind)[checkpoint.key] = checkpoint

    def _queue(self, kind: Kind) -> OrderedDict[Key, Checkpoint]:
        return self._interior if kind is Kind.INTERIOR else self._others

    def _take_slot(self, kind: Kind) -> int | None:
        if not self._free:
            queues = [self._interior] if kind is Kind.INTERIOR else [self._interior, self._others]
            victim = next((c for queue in queues for c in queue.values() if not c.pins), None)
            if victim is None:
                return None
            self.num_evicted += 1
            self._drop(victim)
        return self._free.pop()

    def _drop(self, checkpoint: Checkpoint) -> None:
        del self._queue(checkpoint.kind)[checkpoint.key]
        checkpoint.dropped = True
        if not checkpoint.pins:
            self._free.append(checkpoint.slot)
