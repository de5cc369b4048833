"""Whether a profile's plan fits: if not, which term breaks it and the nearest setting that would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .budget import Term, plan, pool_size, state_bytes, states_per_request
from .fields import FieldPath
from .relations import BLOCK_TOKENS
from .schema import Profile, Shape
from .units import format_size, gib

GRAIN = 16 * 2**20
"""Suggested pools are whole multiples of it."""


def check_budget(profile: Profile, shape: Shape) -> Iterator[tuple[FieldPath, str]]:
    """Yields the key that asks for too much, and the arithmetic with the nearest value that fits."""
    budget = plan(profile, shape)
    yield from _one_request(profile, shape)
    if profile.hardware.ram:
        yield from _check(profile, shape, budget.host, budget.host_limit)
    if budget.card_limit is not None:
        yield from _check(profile, shape, budget.card, budget.card_limit)
    yield from _state_slots(profile, shape)


def host_memory_problem(profile: Profile, shape: Shape, available: int, source: str) -> str | None:
    """One sentence with the arithmetic where the plan does not fit the memory that is free now.

    Args:
        source: where `available` comes from, such as `/proc/meminfo`.
    """
    terms = plan(profile, shape).host
    needed = sum(term.value for term in terms)
    if needed <= available:
        return None
    return f"{_sum(terms)} of host memory, but {gib(available)} is free ({source})"


def _one_request(profile: Profile, shape: Shape) -> Iterator[tuple[FieldPath, str]]:
    """The engine does not start with a pool that cannot hold one request of the greatest length."""
    pool, longest = pool_size(profile, shape), profile.model.max_model_len
    if pool.tokens >= longest:
        return
    nearest = f"kv.pool: {format_size(_smallest_pool(profile, shape))}"
    if pool.tokens:
        nearest += f", or model.max_model_len: {pool.tokens}"
    yield ("kv", "pool"), f"holds {pool.tokens:,} tokens, one request may have {longest:,}; nearest that fits: {nearest}"


def _state_slots(profile: Profile, shape: Shape) -> Iterator[tuple[FieldPath, str]]:
    """vLLM starts a request only when its recurrent states fit: with fewer slots than requests, some would wait unseen."""
    pool, one = profile.memory.device_pool, state_bytes(profile, shape)
    if pool is None or not one:
        return
    seqs, each = profile.scheduler.max_num_seqs, states_per_request(profile)
    fitting = int(pool // (one * each))
    if fitting >= seqs:
        return
    enough = format_size(-(-int(seqs * each * one) // GRAIN) * GRAIN)
    nearest = f"memory.device_pool: {enough}" + (f", or scheduler.max_num_seqs: {fitting}" if fitting else "")
    message = f"holds the recurrent states of {fitting} requests ({each} x {one / 2**20:.1f} MiB each), scheduler.max_num_seqs is {seqs}"
    yield ("memory", "device_pool"), f"{message}; nearest that fits: {nearest}"


def _check(profile: Profile, shape: Shape, terms: tuple[Term, ...], limit: Term) -> Iterator[tuple[FieldPath, str]]:
    """Gives room term by term, in the budget's order; the first that finds too little breaks the plan."""
    room = limit.value
    for term in terms:
        room -= term.value
        if room < 0:
            remedy = _nearest(profile, shape, term.field)
            nearest = f"nearest that fits: {remedy}" if remedy else "no single setting makes it fit"
            too_much = f"{_sum(terms)}, but {limit.formula} is {limit.text}; {term.name} ({term.formula}) breaks it"
            yield term.field or ("hardware",), f"{too_much}; {nearest}"
            return


def _nearest(profile: Profile, shape: Shape, first: FieldPath | None) -> str | None:
    """The largest value of one key with which everything fits, all others being equal; `first` is tried first."""
    ways = {("kv", "hot"): _smaller_hot_set, ("scheduler", "max_num_seqs"): _fewer_requests, ("kv", "pool"): _smaller_pool}
    for path in sorted(ways, key=lambda path: path != first):
        if (text := ways[path](profile, shape)) is not None:
            return f"{'.'.join(path)}: {text}"
    return None


def _smaller_hot_set(profile: Profile, shape: Shape) -> str | None:
    row_bytes = profile.layout(shape).row_bytes
    if profile.hardware.device == "cpu" or profile.kv.placement == "gpu":
        return None
    doublings = _largest(4, (profile.kv.hot // row_bytes).bit_length(), lambda n: _fits(_with(profile, "kv", hot=row_bytes << n), shape))
    return None if doublings is None else format_size(row_bytes << doublings)


def _fewer_requests(profile: Profile, shape: Shape) -> str | None:
    seqs = _largest(1, profile.scheduler.max_num_seqs, lambda n: _fits(_with(profile, "scheduler", max_num_seqs=n), shape))
    return None if seqs is None else str(seqs)


def _smaller_pool(profile: Profile, shape: Shape) -> str | None:
    lowest = _smallest_pool(profile, shape) // GRAIN
    grains = _largest(lowest, profile.kv.pool // GRAIN, lambda n: _fits(_with(profile, "kv", pool=n * GRAIN), shape))
    return None if grains is None else format_size(grains * GRAIN)


def _smallest_pool(profile: Profile, shape: Shape) -> int:
    blocks = -(-profile.model.max_model_len // BLOCK_TOKENS) + 1
    return -(-blocks * pool_size(profile, shape).block_bytes // GRAIN) * GRAIN


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest n in [low, high] that fits, where every smaller one fits too; None where not even `low` does."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _fits(profile: Profile, shape: Shape) -> bool:
    budget = plan(profile, shape)
    sides = [(budget.host, budget.host_limit), (budget.card, budget.card_limit)]
    return all(sum(term.value for term in terms) <= limit.value for terms, limit in sides if limit is not None and limit.value)


def _with(profile: Profile, section: str, **values: int) -> Profile:
    return profile.model_copy(update={section: getattr(profile, section).model_copy(update=values)})


def _sum(terms: tuple[Term, ...]) -> str:
    return f"{' + '.join(f'{term.name} {term.text}' for term in terms)} = {gib(sum(term.value for term in terms))}"
