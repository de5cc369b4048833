"""Row formats: what vLLM writes, read back."""

import pytest
import torch

from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.rows import decode_rows, dequantise_rows, hadamard, quantise_rows, rotate, unrotate

FORMATS = ("bf16", "int8", "int4")


def layout_of(row_format: str, dim: int) -> KVLayout:
    return KVLayout(num_q_heads=6, num_kv_heads=2, head_dim=dim, row_format=row_format, sketch_rank=dim // 2)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("row_format", FORMATS)
def test_round_trip(row_format: str, dim: int) -> None:
    torch.manual_seed(dim)
    layout = layout_of(row_format, dim)
    key, value = (torch.randn(37, 2, dim, dtype=torch.bfloat16) * 3 for _ in range(2))
    rows, scales = quantise_rows(key, value, layout)
    assert (scales is None) == (not layout.has_scales)
    assert rows.shape == (37, 2, layout.row_bytes)
    assert rows.dtype == torch.uint8
    tolerance = {"bf16": 0.0, "int8": 0.012, "int4": 0.13}[row_format]
    for got, want in zip(dequantise_rows(rows, scales, layout), (key, value), strict=True):
        error = (got - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt()
        assert error <= tolerance


@pytest.mark.parametrize("row_format", ["int8", "int4"])
def test_one_scale_for_k_and_one_for_v(row_format: str) -> None:
    layout = layout_of(row_format, 64)
    key, value = torch.full((1, 2, 64), 2.54), torch.full((1, 2, 64), -1.27)
    _, scales = quantise_rows(key, value, layout)
    assert scales.shape == (1, 2, 2)
    if row_format == "int8":
        torch.testing.assert_close(scales, torch.tensor([0.02, 0.01]).expand(1, 2, 2))
    else:
        largest = rotate(key).abs().amax()
        assert bool((scales[..., 0] <= 2 * largest / 15).all())


@pytest.mark.parametrize("row_format", ["int8", "int4"])
def test_zeros_and_outliers(row_format: str) -> None:
    layout = layout_of(row_format, 64)
    key = torch.zeros(3, 2, 64)
    value = torch.zeros(3, 2, 64)
    value[1, 0, 5] = 1e4
    value[2] = -7.5
    rows, scales = quantise_rows(key, value, layout)
    got_key, got_value = dequantise_rows(rows, scales, layout)
    assert got_key.abs().max() < 1e-4
    assert torch.isfinite(got_value).all()
    assert (got_value - value).abs().amax() <= 1e4 * 0.15


def test_rotation_is_vllms() -> None:
    int4 = pytest.importorskip("vllm.v1.attention.ops.int4_per_token_head")
    torch.manual_seed(0)
    for dim in (64, 128, 256):
        x = torch.randn(5, 3, dim)
        torch.testing.assert_close(rotate(x), int4.single_rht(x), rtol=0, atol=0)
        torch.testing.assert_close(unrotate(rotate(x)), x, rtol=1e-5, atol=1e-5)


def test_decoded_int4_rows_stay_rotated() -> None:
    torch.manual_seed(1)
    layout = layout_of("int4", 64)
    key = torch.randn(9, 2, 64)
    rows, scales = quantise_rows(key, key, layout)
    rotated, _ = decode_rows(rows, scales, layout)
    torch.testing.assert_close(rotated, rotate(key), rtol=0, atol=float(rotate(key).abs().max()) / 10)


def test_hadamard_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        hadamard(torch.zeros(2, 96))
