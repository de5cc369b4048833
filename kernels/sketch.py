"""The key sketch: a small code per (token, KV head) from which attention scores are estimated, and what is chosen by it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .layout import KVLayout

FP16_MAX = 65504.0


@dataclass(frozen=True, eq=False)
class Sketch:
    """One attention layer's codes, on the compute device, indexed by the same block ids as the rows.

    `codes` `[num_blocks, Hkv, B, code_bytes]` uint8: 4-bit codes are two's-complement nibbles, dimension 2j in the low and
    2j + 1 in the high nibble of byte j; 8-bit codes are int8. `scales` `[num_blocks, Hkv, B]` float16.
    """

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, eq=False)
class SketchBasis:
    """Frozen maps of one attention layer: `score(q, k) = (q @ query_map) . ((k - mean) @ key_map)`.

    `mean` `[Hkv, D]`, `key_map` and `query_map` `[Hkv, D, rank]`, all float32 (KQ-SVD, arXiv 2512.05916).
    """

    mean: torch.Tensor
    key_map: torch.Tensor
    query_map: torch.Tensor

    @cached_property
    def projected_mean(self) -> torch.Tensor:
        """`mean @ key_map` `[Hkv, rank]` float32."""
        return torch.einsum("hd,hdr->hr", self.mean.double(), self.key_map.double()).float()

    @cached_property
    def query_scales(self) -> torch.Tensor:
        """`[Hkv, rank]` float32: `query_map` is `query_codes * query_scales` to within half a step."""
        return (self.query_map.abs().amax(dim=1) / 127.0).clamp_min(1e-30)

    @cached_property
    def query_codes(self) -> torch.Tensor:
        """`query_map` as int8 with one scale per column, `[Hkv, D, rank]`.

        Integer maps make the projected query exact on every device, whatever the order of summation; their error is a
        twentieth of that of the 4-bit key codes.
        """
        return torch.round(self.query_map / self.query_scales[:, None, :]).to(torch.int8).contiguous()

    def to(self, device: torch.device | str) -> SketchBasis:
        return SketchBasis(self.mean.to(device), self.key_map.to(device), self.query_map.to(device))


@dataclass(frozen=True, eq=False)
class Selection:
    """The tokens each (request, KV head) reads in this step.

    `indices` `[R, Hkv, K]` int32: ascending token indices, then −1; `counts` `[R, Hkv]` int32; `mass` `[R, Hkv]` float32:
    the share of attention that the sketch expects in the set, tokens added as runs not counted.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    mass: torch.Tensor


def encode_keys(key: torch.Tensor, basis: SketchBasis, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Projects and quantises keys `[T, Hkv, D]`; returns codes `[T, Hkv, code_bytes]` uint8 and scales `[T, Hkv]` float16.

    Symmetric, one scale per (token, head) = largest magnitude / 7 (4-bit) or / 127 (8-bit), rounded to float16 first.
    """
    projected = torch.einsum("thd,hdr->thr", key.float(), basis.key_map) - basis.projected_mean
    top = 7 if layout.sketch_bits == 4 else 127
    scales = (projected.abs().amax(dim=-1) / top).clamp_max(FP16_MAX).half()
    step = scales.float()[..., None]
    codes = torch.where(step > 0, torch.round(projected / step), 0.0).clamp(-top, top).to(torch.int8)
    if layout.sketch_bits == 8:
        return codes.view(torch.uint8), scales
    nibbles = codes.view(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales


def decode_codes(codes: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Codes `[..., code_bytes]` uint8 to integers `[..., rank]` int8."""
    signed = codes.view(torch.int8)
    if layout.sketch_bits == 8:
        return signed
    return torch.stack(((signed << 4) >> 4, signed >> 4), dim=-1).flatten(-2)
