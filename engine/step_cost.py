"""What a step of the engine takes, learned while it serves. Pure arithmetic: no vLLM, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FORGET = 0.98
"""What remains of an observation's weight after the next one of its kind: the last ~50 count."""

MAX_SURPRISE = 4.0
"""A step that took longer than this multiple of its prediction counts as that: it compiled a kernel, or the host slept."""

# Contexts count in units of 100K tokens and prefill in units of 1K, so that the coefficients of usual hardware are of one order.
_CONTEXT = 1e5
_PREFILL = 1e3

_PRIOR = (
    # ms, and how firmly it is believed, in observations of steps of that length.
    (10.0, 0.02),  # fixed
    (1.0, 0.02),  # per decode token
    (1.0, 0.02),  # per 100K tokens of decoding contexts
    (2.0, 1.0),  # once if the step prefills at all. Firm: a chunk size that never changes cannot tell it from the next
    (1000.0, 0.02),  # per 1K prefill tokens: slow, so that a server that knows nothing yet starts with small chunks
    (500.0, 0.02),  # per 1K prefill tokens and 100K tokens of prefix
)


@dataclass(frozen=True)
class StepLoad:
    """The work of one step, in tokens."""

    decode_tokens: int = 0
    decode_context: int = 0
    """Summed over the decoding requests."""
    chunks: tuple[tuple[int, int], ...] = ()
    """`(start, tokens)` of every prefill chunk: `start` tokens of its request were computed before."""


class StepCost:
    """Milliseconds of a step, linear in its load; `observe` teaches it.

    Relative errors are minimised, so that a step of a second does not drown one of 20 ms. An observation fades with each
    later one that involves the same coefficients, so that hours of decoding do not wash out what a prefill token costs,
    and no coefficient becomes free: the weight of its prior remains, as inertia at its present value.
    """

    def __init__(self) -> None:
        self.coefficients = [value for value, _ in _PRIOR]
        self._inertia = [weight / value**2 for value, weight in _PRIOR]
        self._observed = [[0.0] * len(_PRIOR) for _ in _PRIOR]

    def predict(self, load: StepLoad) -> float:
        return sum(c * f for c, f in zip(self.coefficients, _features(load), strict=True))

    def mixed_base(self, load: StepLoad) -> float:
        """What the decodes of `load` take in a step that also prefills, without the prefill's tokens."""
        return self.predict(StepLoad(load.decode_tokens, load.decode_context)) + self.coefficients[3]

    def chunk(self, start: int, tokens: int) -> float:
        """What `tokens` of prefill behind a prefix of `start` tokens add to a mixed step."""
        return (self.coefficients[4] + self.coefficients[5] * (start + tokens / 2) / _CONTEXT) * tokens / _PREFILL

    def affordable(self, start: int, ms: float) -> int:
        """The most tokens behind a prefix of `start` tokens that add at most `ms` to a mixed step."""
        if ms <= 0:
            return 0
        # a n^2 + b n = ms, in the form that holds for a = 0 too.
        a = self.coefficients[5] / (2 * _CONTEXT * _PREFILL)
        b = (self.coefficients[4] + self.coefficients[5] * start / _CONTEXT) / _PREFILL
        slope = b + math.sqrt(b * b + 4 * a * ms)
        return int(2 * ms / slope + 1e-6) if slope > 0 else 1 << 30

    def observe(self, load: StepLoad, ms: float) -> None:
        """A step with this load took `ms`."""
        features = _features(load)
        if ms <= 0 or not any(features[1:]):
            return
        ms = min(ms, MAX_SURPRISE * self.predict(load))
        fade = [math.sqrt(FORGET) if f else 1.0 for f in features]
        seen = [[v * fade[i] * fade[j] for j, v in enumerate(row)] for i, row in enumerate(self._observed)]
        # What is remembered argues for the present coefficients, the new observation for itself.
        moment = [
            sum(v * c for v, c in zip(row, self.coefficients, strict=True)) + self._inertia[i] * self.coefficients[i]
            for i, row in enumerate(seen)
        ]
        x = [f / ms for f in features]
        self._observed = [[v + x[i] * x[j] for j, v in enumerate(row)] for i, row in enumerate(seen)]
        information = [[v + self._inertia[i] * (i == j) for j, v in enumerate(row)] for i, row in enumerate(self._observed)]
        self.coefficients = _solve_non_negative(information, [m + f for m, f in zip(moment, x, strict=True)])


def _features(load: StepLoad) -> tuple[float, ...]:
    tokens = sum(n for _, n in load.chunks)
    prefix = sum(n * (start + n / 2) for start, n in load.chunks)
    return (
        1.0,
        float(load.decode_tokens),
        load.decode_context / _CONTEXT,
        1.0 if tokens else 0.0,
        tokens / _PREFILL,
        prefix / (_PREFILL * _CONTEXT),
    )


def _solve_non_negative(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves for a symmetric positive definite matrix; the most negative unknown is set to 0 until none is left."""
    kept = list(range(len(right)))
    while True:
        solution = _solve([[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept])
        if min(solution) >= 0:
            break
        kept.pop(solution.index(min(solution)))
    result = [0.0] * len(right)
    for i, value in zip(kept, solution, strict=True):
        result[i] = value
    return result


def _solve(matrix: Sequence[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination without pivoting, which such a matrix does not need. Changes its arguments."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][j] * right[j] for j in range(i + 1, size))) / matrix[i][i]
    return right
