"""How far a fit is, and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable


class Eta:
    """Lines such as `calibrate 3/8, about 2 min left`, estimated from the sequences of the same stage seen so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage = ""
        self._start = (0.0, 0)

    def line(self, stage: str, done: int, total: int) -> str:
        now = self._clock()
        if stage != self._stage:  # a resumed stage begins at more than 0
            self._stage, self._start = stage, (now, done)
        since, first = self._start
        text = f"{stage} {done}/{total}"
        if first < done < total:
            text += f", about {_spoken((now - since) / (done - first) * (total - done))} left"
        return text


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
