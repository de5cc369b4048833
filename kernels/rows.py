"""The formats of a full row, `[K | scale | V | scale]` of one (token, KV head), in plain PyTorch.

int8 and int4 are vLLM 0.31's per-token-head formats, byte for byte: `v1/attention/ops/triton_reshape_and_cache_flash.py`
(`_reshape_cache_per_token_head`) and `v1/attention/ops/int4_per_token_head.py` (`reshape_and_cache_int4`).
"""

from __future__ import annotations

from functools import cache

import torch

from .layout import SCALE_BYTES, KVLayout

MIN_SCALE = 1e-6
"""vLLM's floor of every scale."""


def quantise_rows(key: torch.Tensor, value: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Keys and values `[..., D]` to rows `[..., row_bytes]` uint8."""
    halves = [_quantise_half(x, layout) for x in (key, value)]
    return torch.cat(halves, dim=-1)


def dequantise_rows(rows: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., row_bytes]` uint8 to keys and values `[..., D]` float32, in the model's own space (int4: rotated back)."""
    key, value = decode_rows(rows, layout)
    if layout.row_format == "int4":
        key, value = unrotate(key), unrotate(value)
    return key, value


def decode_rows(rows: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dequantise_rows`, but int4 keys and values stay in the rotated space in which they are stored."""
    half = layout.value_offset
    return _decode_half(rows[..., :half], layout), _decode_half(rows[..., half:], layout)


def _quantise_half(x: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    match layout.row_format:
        case "bf16":
            return x.to(torch.bfloat16).contiguous().view(torch.uint8)
        case "int8":
            x = x.float()
            scale = (x.abs().amax(dim=-1, keepdim=True) / 127.0).clamp_min(MIN_SCALE)
            codes = _round_half_away(x * (1.0 / scale)).clamp(-128, 127).to(torch.int8).view(torch.uint8)
        case "int4":
            x = rotate(x.float()).to(x.dtype).float()  # vLLM rounds the rotated values to the model's dtype
            low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
            scale = ((high - low) / 15.0).clamp_min(MIN_SCALE)
            zero_point = _round_half_away(-low / scale).clamp(0, 15)
            codes = _round_half_away(x * (1.0 / scale) + zero_point).clamp(0, 15).to(torch.uint8)
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
            scale = ((scale.view(torch.int32) & -16) | zero_point.to(torch.int32)).view(torch.float32)
    return torch.cat((codes, scale.view(torch.uint8)), dim=-1)


def _decode_half(half: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    if layout.row_format == "bf16":
        return half.contiguous().view(torch.bfloat16).float()
    codes, scale_bytes = half[..., :-SCALE_BYTES], half[..., -SCALE_BYTES:].contiguous()
    scale = scale_bytes.view(torch.float32)
    if layout.row_format == "int8":
        return codes.contiguous().view(torch.int8).float() * scale
    zero_point = (scale_bytes.view(torch.int32) & 0xF).float()
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return (nibbles.float() - zero_point) * scale


def rotate(x: torch.Tensor) -> torch.Tensor:
    """vLLM's `single_rht`: random signs, then the unnormalised Hadamard transform of the last dimension."""
    return hadamard(x * rotation_signs(x.shape[-1]).to(x.device))


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """Inverse of `rotate`."""
    return hadamard(x) * (rotation_signs(x.shape[-1]).to(x.device) / x.shape[-1])


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform (Sylvester order) of the last dimension, a power of two."""
    dim, shape = x.shape[-1], x.shape
    if dim & (dim - 1):
        raise ValueError(f"int4 rows need a head_dim that is a power of two, got {dim}")
    width = 1
    while width < dim:
        pairs = x.reshape(*shape[:-1], dim // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2).reshape(shape)
        width *= 2
    return x


@cache
def rotation_signs(dim: int) -> torch.Tensor:
    """vLLM's fixed ±1 signs `[dim]` float32 on the CPU (`_get_rht_signs(dim, 0)`)."""
    generator = torch.Generator(device="cpu").manual_seed(0x9E3779B9)
    return 2.0 * torch.bernoulli(torch.full((dim,), 0.5, device="cpu"), generator=generator) - 1.0


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.trunc(torch.where(x >= 0, x + 0.5, x - 0.5))
