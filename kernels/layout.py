"""How one attention layer's KV cache lies in memory, shared by every op and by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RowFormat = Literal["bf16", "int8", "int4"]

SCALES_BYTES = 8
"""Two float32 scales, of K and of V, for each quantised row."""


@dataclass(frozen=True)
class KVLayout:
    """Shapes and byte sizes of the host rows, their scales and the sketch of one attention layer on one rank.

    A *row* is `[K | V]` of one (token, KV head): bf16, or the codes of vLLM 0.31's per-token-head formats
    (`v1/attention/backends/triton_attn.py` `customize_spec`). vLLM keeps each scale behind its codes; here scales lie apart,
    on the compute device, so that a row is a whole number of the 128-byte lines in which the bus is read (head_dim 128 and up).
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
        """Byte offset of V inside a row."""
        match self.row_format:
            case "bf16":
                return 2 * self.head_dim
            case "int8":
                return self.head_dim
            case "int4":
                return self.head_dim // 2

    @property
    def row_bytes(self) -> int:
        return 2 * self.value_offset

    @property
    def has_scales(self) -> bool:
        return self.row_format != "bf16"

    @property
    def code_bytes(self) -> int:
        """Bytes of one sketch code: 4-bit codes pack dimension 2j in the low and 2j+1 in the high nibble of byte j."""
        return self.sketch_rank * self.sketch_bits // 8

    def rows_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        return num_blocks, self.num_kv_heads, self.block_size, self.row_bytes

    def row_scales_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Scale of K and scale of V of each row, float32."""
        return num_blocks, self.num_kv_heads, self.block_size, 2

    def codes_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        return num_blocks, self.num_kv_heads, self.block_size, self.code_bytes

    def scales_shape(self, num_blocks: int) -> tuple[int, int, int]:
        return num_blocks, self.num_kv_heads, self.block_size
