"""How much memory a profile takes: every figure with its formula and the numbers put in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparsekv.kernels.layout import SCALES_BYTES

from .fields import FieldPath
from .relations import BLOCK_TOKENS
from .schema import Profile, Shape
from .units import gib

SKETCH_SCALE_BYTES = 2
"""One float16 per code (`kernels.sketch`)."""
HOT_WAYS = 16
"""Entries per set of the hot set; sets are a power of two (`kernels.fetch.hot_set`)."""
HOT_ENTRY_BYTES = 8
"""What the hot set remembers of each of its rows."""
SEGMENT_TOKENS, SEGMENT_BUFFERS = 16384, 3
"""Staging of histories during prefill (`engine.history`)."""
STEPS_IN_FLIGHT = 2
"""Asynchronous scheduling: a recurrent state is given back only when the step that read it has ended (`engine.admission`)."""
STATE_BYTES = {"auto": 4, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Term:
    """One summand, limit or figure."""

    name: str
    value: float
    formula: str
    field: FieldPath | None = None
    """The key that changes it most directly."""
    unit: str = "B"

    @property
    def text(self) -> str:
        """The value for people, alike in every locale."""
        if self.unit == "B":
            return gib(self.value) if self.value >= 2**28 else f"{self.value / 2**20:.1f} MiB"
        return f"{self.value:,.0f} {self.unit}" if self.value >= 100 else f"{self.value:.3g} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "formula": self.formula, "key": ".".join(self.field or ())}


@dataclass(frozen=True)
class Budget:
    """What a profile comes to."""

    host: tuple[Term, ...]
    host_limit: Term
    card: tuple[Term, ...] = ()
    """Of one card; empty on a CPU. The order is that in which room is given: what can be made smaller comes last."""
    card_limit: Term | None = None


@dataclass(frozen=True)
class PoolSize:
    """The row pool in blocks. Block 0 is vLLM's null block and holds no tokens."""

    block_bytes: int
    """Rows of one block over all layers and KV heads."""
    num_blocks: int

    @property
    def tokens(self) -> int:
        return max(0, self.num_blocks - 1) * BLOCK_TOKENS

    @property
    def bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def pool_size(profile: Profile, shape: Shape) -> PoolSize:
    """How many whole blocks `kv.pool` holds."""
    layout = profile.layout(shape)
    block_bytes = BLOCK_TOKENS * layout.num_kv_heads * layout.row_bytes * profile.attention_layers(shape)
    return PoolSize(block_bytes, profile.kv.pool // block_bytes)


def plan(profile: Profile, shape: Shape) -> Budget:
    """All the memory; whether it fits is for `fit.check_budget` to say."""
    pool, hardware, share = pool_size(profile, shape), profile.hardware, profile.memory.gpu_memory_utilization
    host_limit = Term("memory of the machine", hardware.ram, "hardware.ram", ("hardware", "ram"))
    if hardware.device == "cpu":
        return Budget(_present(_cpu_terms(profile, shape, pool)), host_limit)
    formula = f"hardware.vram {gib(hardware.vram)} x memory.gpu_memory_utilization {share:g}"
    return Budget(
        host=_present(_host_terms(profile, shape, pool)),
        host_limit=host_limit,
        card=_present(_card_terms(profile, shape, pool)),
        card_limit=Term("memory of a card", hardware.vram * share, formula, ("memory", "gpu_memory_utilization")),
    )


def state_bytes(profile: Profile, shape: Shape) -> float:
    """One recurrent state over all layers on one card. vLLM pads the layers to groups as large as the attention layers' group."""
    if not shape.recurrent_layers:
        return 0
    group = profile.attention_layers(shape)
    padded = -(-shape.recurrent_layers // group) * group / shape.recurrent_layers
    return shape.recurrent_state * STATE_BYTES[profile.recurrent.state_dtype] / 4 * padded / profile.parallel.tensor


def states_per_request(profile: Profile) -> int:
    """States that a running request holds at its peak: one to go on from, one per draft, and those of steps in flight."""
    aligned = profile.scheduler.prefix_caching and profile.recurrent.cache_mode == "align"
    return 1 + profile.speculation.tokens + (STEPS_IN_FLIGHT if aligned else 0)


def hot_rows(profile: Profile, shape: Shape) -> int:
    """Rows that `kv.hot` comes to: whole sets, and a power of two of them."""
    capacity = profile.kv.hot // profile.layout(shape).row_bytes
    return HOT_WAYS << ((capacity // HOT_WAYS).bit_length() - 1) if capacity >= HOT_WAYS else 0


def _present(terms: Iterator[Term]) -> tuple[Term, ...]:
    return tuple(term for term in terms if term.value)


def _host_terms(profile: Profile, shape: Shape, pool: PoolSize) -> Iterator[Term]:
    yield _headroom(profile)
    if profile.kv.placement == "host":
        yield _rows(profile, shape, pool)


def _cpu_terms(profile: Profile, shape: Shape, pool: PoolSize) -> Iterator[Term]:
    yield Term("weights", profile.model.weights, "model.weights", ("model", "weights"))
    yield Term("vLLM's own cache", profile.memory.device_pool or 0, "memory.device_pool", ("memory", "device_pool"))
    yield _headroom(profile)
    yield from _sketch(profile, shape, pool)
    yield _rows(profile, shape, pool)


def _headroom(profile: Profile) -> Term:
    return Term("headroom", profile.kv.headroom, "kv.headroom: processes, page cache", ("kv", "headroom"))


def _card_terms(profile: Profile, shape: Shape, pool: PoolSize) -> Iterator[Term]:
    tensor, layout, kv = profile.parallel.tensor, profile.layout(shape), profile.kv
    heads, seqs = layout.num_kv_heads // tensor, profile.scheduler.max_num_seqs
    per_hot_row = layout.row_bytes + HOT_ENTRY_BYTES
    yield Term("weights", profile.model.weights / tensor, f"model.weights {gib(profile.model.weights)} / {tensor}", ("model", "weights"))
    yield Term("activations", profile.memory.activations, "memory.activations, a planning figure", ("memory", "activations"))
    yield Term(
        "staged histories",
        SEGMENT_BUFFERS * SEGMENT_TOKENS * heads * layout.head_dim * 2 * 2,
        f"{SEGMENT_BUFFERS} x {SEGMENT_TOKENS:,} tokens x {heads} KV heads x {layout.head_dim} x 2 B x K and V",
    )
    if kv.placement == "gpu":
        yield Term("rows", pool.bytes / tensor, f"{_rows(profile, shape, pool).formula} / {tensor}", ("kv", "pool"))
    yield from _sketch(profile, shape, pool)
    yield _states(profile, shape)
    if kv.placement == "host":
        capacity, rows = profile.selection.policy().capacity, hot_rows(profile, shape)
        formula = f"{seqs} requests x {heads} KV heads x {capacity:,} rows x ({layout.row_bytes} + {HOT_ENTRY_BYTES}) B"
        yield Term("selected rows", seqs * heads * capacity * per_hot_row, formula, ("scheduler", "max_num_seqs"))
        formula = f"{rows:,} rows, a power of two in kv.hot {gib(kv.hot)}, x ({layout.row_bytes} + {HOT_ENTRY_BYTES}) B"
        yield Term("hot set", rows * per_hot_row, formula, ("kv", "hot"))


def _rows(profile: Profile, shape: Shape, pool: PoolSize) -> Term:
    layout, layers = profile.layout(shape), profile.attention_layers(shape)
    where = f"{pool.num_blocks:,} blocks x {BLOCK_TOKENS} tokens x {layout.num_kv_heads} KV heads x {layers} layers"
    return Term("rows", pool.bytes, f"{where} x {layout.row_bytes} B of {profile.kv.dtype}", ("kv", "pool"))


def _sketch(profile: Profile, shape: Shape, pool: PoolSize) -> Iterator[Term]:
    """What lies on the compute device for every token of the pool: on one card, or in the memory of a CPU."""
    layout, layers = profile.layout(shape), profile.attention_layers(shape)
    heads, per_code = layout.num_kv_heads // profile.parallel.tensor, layout.code_bytes + SKETCH_SCALE_BYTES
    rows = pool.num_blocks * BLOCK_TOKENS * heads * layers
    where = f"{pool.num_blocks:,} blocks x {BLOCK_TOKENS} tokens x {heads} KV heads x {layers} layers"
    formula = f"{where} x {per_code} B (rank {layout.sketch_rank} x {layout.sketch_bits} bit + {SKETCH_SCALE_BYTES} B)"
    yield Term("sketch", rows * per_code, formula, ("kv", "pool"))
    if layout.has_scales:
        yield Term("row scales", rows * SCALES_BYTES, f"{where} x {SCALES_BYTES} B", ("kv", "pool"))


def _states(profile: Profile, shape: Shape) -> Term:
    """vLLM's own pool: what is set aside for it, or what the running requests need."""
    if profile.memory.device_pool is not None:
        return Term("vLLM's own cache", profile.memory.device_pool, "memory.device_pool", ("memory", "device_pool"))
    one, each, seqs = state_bytes(profile, shape), states_per_request(profile), profile.scheduler.max_num_seqs
    formula = f"{seqs} requests x {each} states x {one / 2**20:.1f} MiB"
    return Term("recurrent states", one * each * seqs, formula, ("scheduler", "max_num_seqs"))
