"""Whether every agent gets its share, and what an intruder does to the others."""

from __future__ import annotations

from .data import Window
from .declare import Value, metric


@metric("Slowest agent / median agent", "%", "higher")
def slowest_share(window: Window) -> Value:
    """Lowest output rate of an agent / median of all agents."""
    rates = sorted(window.output_tokens(agent) for agent in range(window.run.agents))
    middle = (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) / 2
    return rates[0] / middle if window.events and middle and len(rates) > 1 else None


@metric("Fairness (Jain)", "", "higher", 3)
def jain(window: Window) -> Value:
    """(sum x)^2 / (n sum x^2) over the agents' output rates: 1 if all are equal, 1/n if one has everything."""
    rates = [window.output_tokens(agent) for agent in range(window.run.agents)]
    squares = sum(rate * rate for rate in rates)
    return sum(rates) ** 2 / (len(rates) * squares) if window.events and squares and len(rates) > 1 else None


@metric("Intruder's time to first token", "s", "lower", 2)
def intruder_ttft(window: Window) -> Value:
    """From sending the huge prompt to its first token."""
    times = [r.first - r.sent for r in window.intruder if r.first is not None and not r.failed]
    return times[0] if times else None


@metric("Others' rate beside the intruder", "%", "higher")
def rate_beside_intruder(window: Window) -> Value:
    """Output rate of the other agents while the huge prompt is read / their rate in the calm before it."""
    if window.before is None or not window.before.events:
        return None
    return (window.output_tokens() / window.seconds) / (window.before.output_tokens() / window.before.seconds)
