"""Reference of `select`: the exact definition of the selected set.

Every sum is one of integers (or of floats that are multiples of one quantum and small enough to add without rounding), and
every other float operation is a single rounded multiplication or division. So the set does not depend on the device, the
order of summation, the way tokens are split among programs, or the rest of the batch. README.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..layout import KVLayout
from ..policy import SelectionPolicy
from ..sketch import Selection, Sketch, SketchBasis, decode_codes

LOG2E = 1.4426950408889634
STEPS = 8
"""Scores are rounded to 1/8 of a factor of two."""
QUERY_TOP = 127 * 128
"""Queries are rounded to 15 bits before projection: two int8 digits."""
CLIP = float(2**20)
"""Bound of a rounded score, in steps."""
SATURATED = 255
"""A score this many steps under its tile's maximum, or masked: weight 0."""
WEIGHT_BITS = 30
"""Attention weights are integers in units of 2^-30."""
NUM_KEYS = 2048
FORCED_KEY = NUM_KEYS - 1
MASS_ONE = 65536
"""`policy.mass` is rounded to 1/65536."""


@dataclass(frozen=True)
class QueryCodes:
    """Representative queries of each request in sketch space, as integers.

    `codes` `[R, Hkv, N, rank]` int8 with N = representatives x group size, representative-major; `scales` `[R, Hkv, N]`
    float32: the score in steps is `(codes . key_codes) * key_scale * scale`; `last_visible` `[R, N]` int64: the position of
    the query; −1 for rows that repeat another query.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    last_visible: torch.Tensor


def select_reference(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    sketch: Sketch,
    basis: SketchBasis,
    layout: KVLayout,
    policy: SelectionPolicy,
    scale: float,
    representatives: int,
) -> Selection:
    """See `select`. A loop over the requests, vectorised inside."""
    requests, device = seq_lens.shape[0], query.device
    indices = torch.full((requests, layout.num_kv_heads, policy.capacity), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(requests, layout.num_kv_heads, dtype=torch.int32, device=device)
    mass = torch.zeros(requests, layout.num_kv_heads, dtype=torch.float32, device=device)
    lengths = seq_lens.tolist()
    query_lens = (query_start_loc[1:] - query_start_loc[:-1]).tolist()
    queries = None
    for r, (n, query_len) in enumerate(zip(lengths, query_lens, strict=True)):
        if n <= 0 or query_len <= 0:
            continue
        if n <= policy.dense_below:
            indices[r, :, :n] = torch.arange(n, dtype=torch.int32, device=device)
            counts[r], mass[r] = n, 1.0
            continue
        if queries is None:
            queries = project_queries(query, query_start_loc, seq_lens, basis, layout, scale, representatives)
        weights = token_weights(queries, r, n, block_table[r], sketch, layout)
        chosen, mass[r] = choose(weights, policy, query_len)
        counts[r] = chosen.sum(dim=1)
        head, token = chosen.nonzero(as_tuple=True)
        place = torch.arange(head.numel(), device=device) - (counts[r].cumsum(0) - counts[r])[head]
        indices[r, head, place] = token.to(torch.int32)
    return Selection(indices, counts, mass)


def project_queries(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    basis: SketchBasis,
    layout: KVLayout,
    scale: float,
    representatives: int,
) -> QueryCodes:
    """The representatives are spread evenly over the query tokens of a request, the last one first."""
    start, length = query_start_loc[:-1].long(), (query_start_loc[1:] - query_start_loc[:-1]).long()
    used = length.clamp(1, representatives)
    i = torch.arange(representatives, device=query.device)
    offset = (length[:, None] - 1) - (i * (length[:, None] - 1)) // (used[:, None] - 1).clamp_min(1)
    last_visible = torch.where(i < used[:, None], seq_lens[:, None].long() - length[:, None] + offset, -1)
    token = (start[:, None] + offset).clamp(0, query.shape[0] - 1)

    heads, group, dim = layout.num_kv_heads, layout.group_size, layout.head_dim
    q = query[token].float().view(-1, representatives, heads, group, dim).transpose(1, 2).reshape(-1, heads, representatives * group, dim)
    q_max = q.abs().amax(dim=-1).clamp_min(1e-30)
    rounded = torch.round(q * (QUERY_TOP / q_max)[..., None]).to(torch.int32)
    high = (rounded + 64) >> 7
    low = rounded - (high << 7)
    maps = basis.query_codes.float()
    # Integers below 2^24: exact in float32, in any order.
    projected = (high.float() @ maps).to(torch.int32) * 128 + (low.float() @ maps).to(torch.int32)
    z = projected.float() * basis.query_scales[:, None, :]
    z_max = z.abs().amax(dim=-1).clamp_min(1e-30)
    codes = torch.round(z * (127.0 / z_max)[..., None]).to(torch.int8)
    scales = (z_max * q_max) * torch.tensor(STEPS * LOG2E * scale / (127 * QUERY_TOP), dtype=torch.float32)
    return QueryCodes(codes, scales, last_visible.repeat_interleave(group, dim=1))


def token_weights(queries: QueryCodes, r: int, n: int, block_table: torch.Tensor, sketch: Sketch, layout: KVLayout) -> torch.Tensor:
    """Mean softmax weight of each token over the query rows, `[Hkv, n]` int64 in units of 2^-30."""
    size, heads = layout.block_size, layout.num_kv_heads
    tiles = -(-n // size)
    blocks = block_table[:tiles].long()
    last_visible = queries.last_visible[r]
    q = queries.codes[r].float().transpose(1, 2)
    steps = []
    for part in blocks.split(512):
        codes = decode_codes(sketch.codes[part], layout).float()
        dots = codes.transpose(0, 1).reshape(heads, -1, layout.sketch_rank) @ q
        scaled = dots.view(heads, part.numel(), size, -1) * sketch.scales[part].float().transpose(0, 1)[..., None]
        steps.append(torch.round((scaled * queries.scales[r][:, None, None, :]).clamp(-CLIP, CLIP)).to(torch.int32))
    score = torch.cat(steps, dim=1)  # [Hkv, tiles, B, N]
    token = torch.arange(tiles * size, device=q.device).view(tiles, size, 1)
    visible = token <= last_visible

    tile_max = torch.where(visible, score, -(2**21)).amax(dim=2)  # [Hkv, tiles, N]
    below = torch.where(visible, (tile_max[:, :, None] - score).clamp_max(SATURATED), SATURATED).long()
    table = exp2_table().to(q.device)
    weight = table[below]
    tile_sum = torch.where(visible, torch.round(weight * 2.0**14), 0.0).sum(dim=2)
    tile_below = (tile_max.amax(dim=1, keepdim=True) - tile_max).clamp_max(table.numel() - 1).long()
    total = (tile_sum.long() * (table[tile_below] * 2.0**28).long()).sum(dim=1)  # in units of 2^-42 of the maximum
    rows = int((last_visible >= 0).sum())
    numerator = torch.full_like(total, 2 ** (42 + WEIGHT_BITS) / rows, dtype=torch.float32)
    factor = table[tile_below] * (numerator / total.float().clamp_min(1.0))[:, None, :]
    integers = (weight * factor[:, :, None, :]).to(torch.int32)
    return torch.where(last_visible >= 0, integers, 0).sum(dim=-1).view(heads, -1)[:, :n]


@cache
def exp2_table() -> torch.Tensor:
    """`2^(-i/8)` for i = 0..512 as float32 rounded to 16 significant bits: no approximate exp2 rounds to anything else."""
    eighth = torch.exp2(-torch.arange(8, dtype=torch.float64) / 8)
    eighth = torch.round(eighth * 2.0**16) / 2.0**16
    i = torch.arange(513)
    return (eighth[i % 8] * torch.exp2(-(i // 8).double())).float()


def weight_key(weights: torch.Tensor) -> torch.Tensor:
    """Sort key of integer weights, 0..1984: the exponent and six bits of the mantissa, 64 steps per factor of two."""
    bits = weights.to(torch.float32).view(torch.int32)
    return torch.where(weights > 0, (bits >> 17) - (127 << 6) + 1, 0).long()


def key_weight(keys: torch.Tensor) -> torch.Tensor:
    """The smallest integer weight that has this key."""
    bits = ((keys - 1 + (127 << 6)) << 17).to(torch.int32)
    return torch.where(keys > 0, bits.view(torch.float32).clamp_max(2.0**31), 0.0).long()


def choose(weights: torch.Tensor, policy: SelectionPolicy, query_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From weights `[Hkv, n]` to the chosen tokens `[Hkv, n]` bool and their mass `[Hkv]` float32."""
    heads, n = weights.shape
    token = torch.arange(n, device=weights.device)
    forced = (token < policy.sink_tokens) | (token >= n - max(policy.window_tokens, query_len))
    keys = torch.where(forced, FORCED_KEY, weight_key(weights))
    forced_mass = torch.where(forced, weights, 0).sum(dim=1)

    histogram = torch.zeros(heads, NUM_KEYS, dtype=torch.int64, device=weights.device)
    histogram.scatter_add_(1, keys, torch.ones_like(keys))
    histogram[:, FORCED_KEY] = 0
    count = histogram.flip(1).cumsum(1).flip(1)  # tokens with this key or a larger one
    bin_weight = key_weight(torch.arange(NUM_KEYS, device=weights.device))
    reached = (histogram * bin_weight).flip(1).cumsum(1).flip(1) + forced_mass[:, None]
    total = reached[:, 0]

    # The smallest budget that reaches the mass: whole bins above `last`, and enough tokens of `last`.
    target = total * round(policy.mass * MASS_ONE)
    enough = reached * MASS_ONE >= target[:, None]
    last = (enough.long().sum(dim=1, keepdim=True) - 1).clamp_min(0)
    before = reached.gather(1, last) - histogram.gather(1, last) * bin_weight[last]
    missing = (target[:, None] - before * MASS_ONE).clamp_min(0)
    tokens_of_last = -(-missing // (bin_weight[last] * MASS_ONE).clamp_min(1))
    budget = (count.gather(1, last) - histogram.gather(1, last) + tokens_of_last).clamp(policy.min_tokens, policy.max_tokens)
    budget = torch.minimum(budget, count[:, :1])

    top, key, need = strongest(keys, count, histogram, budget)
    hits, _, _ = strongest(keys, count, histogram, budget.clamp_max(policy.run_hits))
    runs = hits
    for _ in range(policy.run_radius):
        grown = runs.clone()
        grown[:, 1:] |= runs[:, :-1]
        grown[:, :-1] |= runs[:, 1:]
        runs = grown
    inside = (reached.gather(1, key) - histogram.gather(1, key) * bin_weight[key] + need * bin_weight[key]).squeeze(1)
    return forced | top | runs, inside.float() / total.float().clamp_min(1.0)


def strongest(
    keys: torch.Tensor, count: torch.Tensor, histogram: torch.Tensor, budget: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `budget` `[Hkv, 1]` largest keys that are not forced, equal ones by index; also the key where it stops and how many of it."""
    pivot = ((count >= budget).long().sum(dim=1, keepdim=True) - 1).clamp_min(0)
    need = budget - (count.gather(1, pivot) - histogram.gather(1, pivot))
    ties = keys == pivot
    return ((keys > pivot) & (keys != FORCED_KEY)) | (ties & (ties.cumsum(1) <= need)), pivot, need
