"""Drafts are made, and accepted often enough to pay."""

from __future__ import annotations

from ..check import Check, Findings, error, info, ok, skip, warn
from ..machine import Machine

FLOOR = 0.3
MIN_DRAFTS = 1_000


def _run(machine: Machine) -> Findings:
    metrics = machine.metrics
    drafted = metrics.total("vllm:spec_decode_num_draft_tokens_total")
    accepted = metrics.total("vllm:spec_decode_num_accepted_tokens_total")
    wanted = machine.profile is not None and machine.profile.speculation.method != "none"
    generated = metrics.total("vllm:generation_tokens_total") or 0
    if not drafted or accepted is None:
        if wanted and generated > MIN_DRAFTS:
            yield error(
                "the profile speculates, and no draft was made",
                f"{generated:,.0f} tokens were generated",
                cause="the draft model is missing, or the server runs another profile",
            )
        else:
            yield skip("no speculation")
        return
    rate = accepted / drafted
    evidence = f"{accepted:,.0f} of {drafted:,.0f} drafted tokens were accepted"
    if drafted < MIN_DRAFTS:
        yield info(f"{rate:.0%} of few drafts accepted", evidence)
    elif rate < FLOOR:
        yield warn(
            f"only {rate:.0%} of the drafts are accepted", evidence, remedy="lower speculation.tokens, or set speculation.method: none"
        )
    else:
        yield ok(f"{rate:.0%} of the drafts are accepted", evidence)


CHECK = Check("live.speculation", "Running server", "accepted drafts", _run, limit_s=15)
