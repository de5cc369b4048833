"""What a profile can hold and how fast the bus lets it be: every figure with its formula and the numbers put in."""

from __future__ import annotations

from collections.abc import Iterator

from .budget import SKETCH_SCALE_BYTES, Term, plan, pool_size, state_bytes, states_per_request
from .schema import Profile, Shape
from .units import gib

X16_RATE = 25e9
"""Bytes per second of row gathers over PCIe 4.0 x16; other links in proportion. Over 5.0 x16, 46 to 51 GB/s were measured."""


def figures(profile: Profile, shape: Shape) -> list[Term]:
    """Tokens, states, limits, times; the bus only where rows cross one."""
    found = [*_pool(profile, shape), *_states(profile, shape)]
    if profile.hardware.device == "cuda":
        if profile.hardware.vram_rate:
            found.append(card_limit(profile, shape))
        if profile.kv.placement == "host":
            found += [*_bus(profile, shape), *_first_reading(profile, shape)]
    return found


def decode_limits(profile: Profile, shape: Shape) -> tuple[float, float] | None:
    """Tokens per second of all requests together at one token per step and no row hot, as far as bus and card memory go.

    The low one: at most rows, the bus and the card one after the other. The high one: at fewest rows, side by side.
    None where a figure that it takes is not stated.
    """
    if profile.hardware.device == "cpu" or not profile.hardware.vram_rate:
        return None
    card = card_limit(profile, shape).value
    if profile.kv.placement == "gpu":
        return card, card
    slow, fast = (bus_limit(profile, shape, budget).value for budget in (profile.selection.max_tokens, profile.selection.min_tokens))
    return 1 / (1 / card + 1 / slow), min(card, fast)


def link_rate(profile: Profile) -> Term:
    """Row gathers over the link of one card."""
    hardware = profile.hardware
    if hardware.link_rate:
        return Term("link of a card", hardware.link_rate / 1e9, "hardware.link_rate, measured", ("hardware", "link_rate"), "GB/s")
    generation, width = hardware.pcie.generation, hardware.pcie.width
    formula = f"{X16_RATE / 1e9:g} GB/s x 2^({generation} - 4) x {width}/16, an estimate; `sparsekv doctor` measures"
    return Term("link of a card", X16_RATE * 2.0 ** (generation - 4) * width / 16 / 1e9, formula, ("hardware", "pcie"), "GB/s")


def bytes_per_step(profile: Profile, shape: Shape, budget: int) -> Term:
    """What one request reads in one step on one card where it selects `budget` rows and none of them is hot."""
    layout, policy, layers = profile.layout(shape), profile.selection.policy(), profile.attention_layers(shape)
    heads = layout.num_kv_heads // profile.parallel.tensor
    always, runs = policy.sink_tokens + policy.window_tokens, policy.run_hits * 2 * policy.run_radius
    formula = f"({budget:,} selected + {always} always + {runs} in runs) x {heads} KV heads x {layers} layers x {layout.row_bytes} B"
    return Term(f"{budget:,} rows", (budget + always + runs) * heads * layers * layout.row_bytes, formula, ("selection", "max_tokens"))


def bus_limit(profile: Profile, shape: Shape, budget: int) -> Term:
    """Tokens per second of all requests together, at one token per step and with no row hot."""
    link, read = link_rate(profile), bytes_per_step(profile, shape, budget)
    formula = f"{link.value:g} GB/s / {read.value / 1e6:.1f} MB; x tokens accepted per step, / share of rows that are not hot"
    return Term(f"bus limit at {budget:,} rows, none hot", link.value * 1e9 / read.value, formula, ("kv", "hot"), "tok/s")


def card_limit(profile: Profile, shape: Shape) -> Term:
    """Tokens per second of all requests together where each step reads the weights and every running request's sketch once."""
    layout, layers, seqs = profile.layout(shape), profile.attention_layers(shape), profile.scheduler.max_num_seqs
    heads, per_code = layout.num_kv_heads // profile.parallel.tensor, layout.code_bytes + SKETCH_SCALE_BYTES
    rate = profile.hardware.vram_rate or 0
    tokens = min(pool_size(profile, shape).tokens, seqs * profile.model.max_model_len)
    weights, sketch = profile.model.weights / profile.parallel.tensor, tokens * heads * layers * per_code
    formula = f"{seqs} requests x {rate / 1e9:,g} GB/s / (weights {gib(weights)} + sketch of {tokens:,} tokens {gib(sketch)})"
    return Term("card memory limit", seqs * rate / (weights + sketch), formula, ("hardware", "vram_rate"), "tok/s")


def _pool(profile: Profile, shape: Shape) -> Iterator[Term]:
    pool, longest = pool_size(profile, shape), profile.model.max_model_len
    yield Term("tokens the pool holds", pool.tokens, f"({pool.num_blocks:,} blocks - 1) x 128", ("kv", "pool"), "tokens")
    formula = f"{pool.tokens:,} tokens / model.max_model_len {longest:,}"
    yield Term("longest requests it holds", pool.tokens / longest, formula, ("model", "max_model_len"), "requests")


def _states(profile: Profile, shape: Shape) -> Iterator[Term]:
    """States beyond those of the running requests: each lets one conversation go on without being read again."""
    one, pool = state_bytes(profile, shape), profile.memory.device_pool
    if not one:
        return
    running = profile.scheduler.max_num_seqs * states_per_request(profile)
    if pool is not None:
        room, source = float(pool) - running * one, f"memory.device_pool {gib(pool)} - {running} states of running requests"
    else:
        budget = plan(profile, shape)
        assert budget.card_limit is not None
        room, source = budget.card_limit.value - sum(term.value for term in budget.card), "what is left of a card"
    formula = f"({source} = {gib(room)}) / {one / 2**20:.1f} MiB"
    yield Term("recurrent states kept for follow-ups", max(0, room // one), formula, ("memory", "device_pool"), "states")


def _bus(profile: Profile, shape: Shape) -> Iterator[Term]:
    yield link_rate(profile)
    for budget in (profile.selection.max_tokens, profile.selection.min_tokens):
        read = bytes_per_step(profile, shape, budget)
        yield Term(f"bytes per request and step at {read.name}", read.value, read.formula, read.field)
        yield bus_limit(profile, shape, budget)


def _first_reading(profile: Profile, shape: Shape) -> Iterator[Term]:
    """How long the longest request takes to read when nothing of it is known."""
    layout, layers, link = profile.layout(shape), profile.attention_layers(shape), link_rate(profile)
    n, chunk = profile.model.max_model_len, profile.scheduler.max_num_batched_tokens
    per_token = layout.num_kv_heads // profile.parallel.tensor * layers * layout.row_bytes
    crossings = n + n * n / (2 * chunk)
    formula = f"({n:,} rows written + {n:,}^2 / (2 x {chunk:,}) read again) x {per_token:,} B / {link.value:g} GB/s"
    field = ("scheduler", "max_num_batched_tokens")
    yield Term("cold fill of the longest request, bus alone", crossings * per_token / (link.value * 1e9), formula, field, "s")
    band = profile.expected.prefill_tokens_per_second if profile.expected else None
    if band:
        seqs = profile.scheduler.max_num_seqs
        for rate in dict.fromkeys(band):
            formula = f"{seqs} requests x {n:,} tokens / {rate:,g} tok/s of expected.prefill_tokens_per_second"
            yield Term("cold fill of all that run", seqs * n / rate, formula, ("expected", "prefill_tokens_per_second"), "s")
