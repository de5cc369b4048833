"""Will it fit, and how fast can the bus let it be: every figure with its formula and the numbers put in."""

from __future__ import annotations

from dataclasses import dataclass

from .relations import BLOCK_TOKENS
from .schema import Profile, Shape
from .units import gib


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


def row_formula(profile: Profile, shape: Shape) -> str:
    """Bytes of one token, in words and numbers."""
    layout, layers = profile.layout(shape), profile.attention_layers(shape)
    per_token = layers * layout.num_kv_heads * layout.row_bytes
    return f"{layers} layers x {layout.num_kv_heads} KV heads x {layout.row_bytes} B per {profile.kv.dtype} row = {per_token:,} B per token"


def host_memory_problem(profile: Profile, shape: Shape, available: int, source: str) -> str | None:
    """One sentence with the arithmetic where the host pool does not fit the memory that is free."""
    if profile.kv.placement != "host":
        return None
    pool = pool_size(profile, shape)
    sketch = sketch_bytes(profile, shape, pool) if profile.hardware.device == "cpu" else 0
    needed = pool.bytes + sketch + profile.kv.headroom
    if needed <= available:
        return None
    parts = [f"pool {gib(pool.bytes)} ({pool.tokens:,} tokens, {row_formula(profile, shape)})"]
    if sketch:
        parts.append(f"sketch {gib(sketch)}")
    parts.append(f"headroom {gib(profile.kv.headroom)}")
    return f"{' + '.join(parts)} = {gib(needed)} of host memory, but {gib(available)} is free ({source})"


def sketch_bytes(profile: Profile, shape: Shape, pool: PoolSize) -> int:
    """Codes and their float16 scales, over all ranks."""
    layout = profile.layout(shape)
    return pool.num_blocks * BLOCK_TOKENS * layout.num_kv_heads * profile.attention_layers(shape) * (layout.code_bytes + 2)
