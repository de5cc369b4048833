"""What a step takes in the simulation, by hardware."""

from __future__ import annotations

import random
from dataclasses import dataclass

from sparsekv.engine.step_cost import StepLoad


@dataclass(frozen=True)
class Hardware:
    """Milliseconds of a step, linear in its load as far as the load goes; with log-normal noise."""

    name: str
    fixed: float
    decode_token: float
    decode_context: float
    """Per token of a decoding context."""
    mixed: float
    """Once, if the step prefills at all: it runs attention outside the CUDA graph."""
    prefill_token: float
    prefill_prefix: float
    """Per pair of prefill token and token of its prefix."""
    noise: float = 0.03
    """Standard deviation of the logarithm."""

    def step_ms(self, load: StepLoad, rng: random.Random) -> float:
        ms = self.fixed + self.decode_token * load.decode_tokens + self.decode_context * load.decode_context
        if load.chunks:
            ms += self.mixed + sum((self.prefill_token + self.prefill_prefix * (start + n / 2)) * n for start, n in load.chunks)
        return ms * rng.lognormvariate(0.0, self.noise)


H200 = Hardware(
    # Measured, the 27B shape, dense attention: 8 sequences decode at 14.3 ms with 1K contexts and at 17.3 ms with 32K;
    # 8 x 32K prompts prefill in 24.5 s in steps of 8192 tokens. Of the 93.5 us per token, attention over the prefix is
    # counted as 4 x 16 layers x 24 heads x 256 flops per pair at 600 TFLOP/s.
    name="H200, 27B W4A16",
    fixed=13.6,
    decode_token=0.075,
    decode_context=12.1e-6,
    mixed=0.0,
    prefill_token=0.081,
    prefill_prefix=0.66e-6,
)

DUAL_3090 = Hardware(
    # Reported: prefill at 1,166 tokens/s at 10K and 942 at 90K. A decode step of eight sequences is an estimate.
    name="2 x RTX 3090, 27B W4A16 (estimate)",
    fixed=28.0,
    decode_token=0.6,
    decode_context=1e-6,
    mixed=0.0,
    prefill_token=0.83,
    prefill_prefix=5.1e-6,
)
