"""Whether the answers are any good."""

from __future__ import annotations

from .data import Window
from .declare import Value, metric


@metric("Recall of planted facts", "%", "higher")
def recall(window: Window) -> Value:
    """Questions for a planted fact answered with its code and no other / such questions answered at all."""
    scores = [r.recalled for r in window.answered if r.recalled is not None]
    return sum(scores) / len(scores) if scores else None
