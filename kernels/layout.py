"""How one attention layer's KV cache lies in memory, shared by every op and by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RowFormat = Literal["bf16", "int8", "int4"]

SCALE_BYTES = 4
"""One float32 scale behind K and one behind V in the quantised row formats."""


@dataclass(frozen=True)
class KVLayout:
    """Shapes and byte sizes of the host rows and the sketch of one attention layer on one rank.

    A *row* is one (token, KV head): `[K | scale | V | scale]` in vLLM 0.31's per-token-head formats
    (`v1/attention/backends/triton_attn.py` `customize_spec`), or plain `[K | V]` in bf16.
    Rows lie `[num_blocks, num_kv_heads, block_size, row_bytes]`: the rows of neighbouring tokens of one head
    are adjacent, so a run of selected tokens is one contiguous read over the bus.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    row_format: RowFormat
    sketch_rank: int
    sketch_bits: Literal[4, 8] = 4
    block_size: int = 128

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def value_offset(self) -> int:
        """Byte offset of V inside a row (the K scale, if any, lies just before it)."""
        match self.row_format:
            case "bf16":
                return 2 * self.head_dim
            case "int8":
                return self.head_dim + SCALE_BYTES
            case "int4":
                return self.head_dim // 2 + SCALE_BYTES

    @property
    def row_bytes(self) -> int:
        return 2 * self.value_offset

    @property
    def code_bytes(self) -> int:
        """Bytes of one sketch code: 4-bit codes pack dimension 2j in the low and 2j+1 in the high nibble of byte j."""
        return self.sketch_rank * self.sketch_bits // 8

    def rows_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        return num_blocks, self.num_kv_heads, self.block_size, self.row_bytes

    def codes_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        return num_blocks, self.num_kv_heads, self.block_size, self.code_bytes

    def scales_shape(self, num_blocks: int) -> tuple[int, int, int]:
        return num_blocks, self.num_kv_heads, self.block_size
