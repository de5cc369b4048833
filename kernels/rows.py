"""The formats of a full row, `[K | V]` of one (token, KV head), and of its two scales, in plain PyTorch.

int8 and int4 are vLLM 0.31's per-token-head formats, bit for bit: `v1/attention/ops/triton_reshape_and_cache_flash.py`
(`_reshape_cache_per_token_head`) and `v1/attention/ops/int4_per_token_head.py` (`reshape_and_cache_int4`). A scale is float32;
the lowest four bits of an int4 scale hold the zero point.
"""

from __future__ import annotations

from functools import cache

import torch

from .layout import KVLayout

MIN_SCALE = 1e-6
"""vLLM's floor of every scale."""


def quantise_rows(key: torch.Tensor, value: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values `[..., D]` to rows `[..., row_bytes]` uint8 and scales `[..., 2]` float32 (None in bf16)."""
    if not layout.has_scales:
        return torch.cat([x.to(torch.bfloat16).contiguous().view(torch.uint8) for x in (key, value)], dim=-1), None
    quantise = _quantise_int8 if layout.row_format == "int8" else _quantise_int4
    (key_codes, key_scale), (value_codes, value_scale) = quantise(key), quantise(value)
    return torch.cat((key_codes, value_codes), dim=-1), torch.cat((key_scale, value_scale), dim=-1)


def dequantise_rows(rows: torch.Tensor, scales: torch.Tensor | None, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and scales to keys and values `[..., D]` float32, in the model's own space (int4: rotated back)."""
    key, value = decode_rows(rows, scales, layout)
    if layout.row_format == "int4":
        key, value = unrotate(key), unrotate(value)
    return key, value


def decode_rows(rows: torch.Tensor, scales: torch.Tensor | None, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dequantise_rows`, but int4 keys and values stay in the rotated space in which they are stored."""
    key, value = rows[..., : layout.value_offset], rows[..., layout.value_offset :]
    if scales is None:
        return key.contiguous().view(torch.bfloat16).float(), value.contiguous().view(torch.bfloat16).float()
    decode = _decode_int8 if layout.row_format == "int8" else _decode_int4
    return decode(key, scales[..., :1]), decode(value, scales[..., 1:])


def _quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    scale = (x.abs().amax(dim=-1, keepdim=True) / 127.0).clamp_min(MIN_SCALE)
    return _round_half_away(x * (1.0 / scale)).clamp(-128, 127).to(torch.int8).view(torch.uint8), scale


def _quantise_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = rotate(x.float()).to(x.dtype).float()  # vLLM rounds the rotated values to the model's dtype
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    scale = ((high - low) / 15.0).clamp_min(MIN_SCALE)
    zero_point = _round_half_away(-low / scale).clamp(0, 15)
    codes = _round_half_away(x * (1.0 / scale) + zero_point).clamp(0, 15).to(torch.uint8)
    scale = ((scale.view(torch.int32) & -16) | zero_point.to(torch.int32)).view(torch.float32)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def _decode_int8(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.int8).float() * scale


def _decode_int4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    bits = scale.contiguous().view(torch.int32)
    nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    return (nibbles.float() - (bits & 0xF).float()) * (bits & -16).view(torch.float32)


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
