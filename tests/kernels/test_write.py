"""write: rows and sketch of the step's tokens, nothing else touched."""

from dataclasses import replace

import pytest
import torch

from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.rows import quantise_rows
from sparsekv.kernels.sketch import Sketch, SketchBasis, decode_codes, encode_keys
from sparsekv.kernels.write import kernel, write, write_reference

LAYOUT = KVLayout(num_q_heads=6, num_kv_heads=2, head_dim=64, row_format="int8", sketch_rank=32)
BLOCKS = 5


def make_basis(layout: KVLayout, seed: int = 0) -> SketchBasis:
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.num_kv_heads, layout.head_dim, layout.sketch_rank)
    return SketchBasis(
        mean=torch.randn(shape[:2], generator=generator),
        key_map=torch.randn(shape, generator=generator) / 8,
        query_map=torch.randn(shape, generator=generator) / 8,
    )


def make_pool(layout: KVLayout, blocks: int = BLOCKS) -> tuple[torch.Tensor, torch.Tensor | None, Sketch]:
    row_scales = torch.full(layout.row_scales_shape(blocks), float("nan")) if layout.has_scales else None
    rows = torch.full(layout.rows_shape(blocks), 0xA5, dtype=torch.uint8)
    codes = torch.full(layout.codes_shape(blocks), 0xA5, dtype=torch.uint8)
    return rows, row_scales, Sketch(codes, torch.full(layout.scales_shape(blocks), float("nan"), dtype=torch.float16))


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_decode_to_the_projected_key(bits: int) -> None:
    torch.manual_seed(0)
    layout = replace(LAYOUT, sketch_bits=bits)
    basis = make_basis(layout)
    key = torch.randn(50, 2, 64)
    codes, scales = encode_keys(key, basis, layout)
    assert codes.shape == (50, 2, layout.code_bytes)
    want = torch.einsum("thd,hdr->thr", key - basis.mean, basis.key_map)
    error = (decode_codes(codes, layout).float() * scales.float()[..., None] - want).abs()
    assert bool((error <= 0.51 * scales.float()[..., None] + 1e-3 * want.abs().amax()).all())


def test_code_bytes_hold_even_dimensions_low() -> None:
    layout = replace(LAYOUT, sketch_rank=4)
    codes = torch.tensor([[0x7F, 0x80]], dtype=torch.uint8)
    assert decode_codes(codes, layout).tolist() == [[-1, 7, 0, -8]]


def test_a_key_at_the_mean_has_scale_zero_and_codes_zero() -> None:
    basis = make_basis(LAYOUT)
    basis = SketchBasis(torch.zeros_like(basis.mean), basis.key_map, basis.query_map)
    codes, scales = encode_keys(torch.zeros(3, 2, 64), basis, LAYOUT)
    assert not codes.any()
    assert not scales.any()


@pytest.mark.parametrize("row_format", ["bf16", "int8", "int4"])
def test_only_the_given_slots_change(row_format: str) -> None:
    torch.manual_seed(1)
    layout = replace(LAYOUT, row_format=row_format)
    basis = make_basis(layout)
    rows, row_scales, sketch = make_pool(layout)
    key, value = torch.randn(7, 2, 64), torch.randn(7, 2, 64)
    slots = torch.tensor([3 * 128 + 127, -1, 0, 128, -1, 4 * 128 + 5, 129])
    write(key, value, slots, rows, row_scales, layout, sketch, basis)
    (want_rows, want_row_scales), (want_codes, want_scales) = quantise_rows(key, value, layout), encode_keys(key, basis, layout)
    flat_rows, flat_codes = rows.transpose(1, 2).flatten(0, 1), sketch.codes.transpose(1, 2).flatten(0, 1)
    flat_scales = sketch.scales.transpose(1, 2).flatten(0, 1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat_rows[slot], want_rows[token])
            if row_scales is not None:
                assert torch.equal(row_scales[slot // 128, :, slot % 128], want_row_scales[token])
            assert torch.equal(flat_codes[slot], want_codes[token])
            assert torch.equal(flat_scales[slot], want_scales[token])
    untouched = torch.ones(BLOCKS * 128, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert bool((flat_rows[untouched] == 0xA5).all())
    assert row_scales is None or int(row_scales.isnan().sum()) == 4 * int(untouched.sum())
    assert bool((flat_codes[untouched] == 0xA5).all())
    assert bool(flat_scales[untouched].isnan().all())


def test_quantised_rows_need_scales_and_bf16_has_none() -> None:
    rows, row_scales, _ = make_pool(LAYOUT)
    key, slots = torch.zeros(1, 2, 64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="int8 rows need scales"):
        write(key, key, slots, rows, None, LAYOUT)
    with pytest.raises(ValueError, match="bf16 rows have no scales"):
        write(key, key, slots, rows, row_scales, replace(LAYOUT, row_format="bf16"))


def test_no_tokens_and_only_padding() -> None:
    rows, row_scales, sketch = make_pool(LAYOUT)
    basis = make_basis(LAYOUT)
    write(torch.empty(0, 2, 64), torch.empty(0, 2, 64), torch.empty(0, dtype=torch.int64), rows, row_scales, LAYOUT, sketch, basis)
    write(torch.randn(2, 2, 64), torch.randn(2, 2, 64), torch.tensor([-1, -1]), rows, row_scales, LAYOUT, sketch, basis)
    assert bool((rows == 0xA5).all())


def test_a_sketch_needs_its_basis() -> None:
    rows, row_scales, sketch = make_pool(LAYOUT)
    with pytest.raises(ValueError, match="give both or neither"):
        write(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), torch.zeros(1, dtype=torch.int64), rows, row_scales, LAYOUT, sketch)


@pytest.mark.parametrize("row_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(("dim", "bits"), [(64, 4), (64, 8), (128, 4), (256, 4)])
def test_triton_writes_what_the_reference_writes(backend: str, device: str, row_format: str, dim: int, bits: int) -> None:
    torch.manual_seed(dim + bits)
    layout = KVLayout(6, 2, dim, row_format, 32, sketch_bits=bits)
    basis = make_basis(layout)
    # Slices of one fused projection. Float16 where values are computed on: the interpreter truncates to bf16 instead of rounding.
    qkv = torch.randn(37, 3, 2, dim).to(torch.bfloat16 if row_format == "bf16" else torch.float16)
    key, value = qkv[:, 0], qkv[:, 1]
    key[5], value[6] = 0, 3.0
    slots = torch.randperm(BLOCKS * 128)[:37]
    slots[3] = -1
    want, want_scales, want_sketch = make_pool(layout)
    write_reference(key, value, slots, want, want_scales, layout, want_sketch, basis)
    if backend == "reference":
        return
    rows, row_scales, sketch = make_pool(layout)
    row_scales = None if row_scales is None else row_scales.to(device)
    rows, sketch = rows.to(device), Sketch(sketch.codes.to(device), sketch.scales.to(device))
    qkv = qkv.to(device)
    kernel.write(qkv[:, 0], qkv[:, 1], slots.to(device), rows, row_scales, layout, sketch, basis.to(device))
    assert torch.equal(rows.cpu(), want)
    if row_scales is not None:
        assert torch.equal(row_scales.cpu().view(torch.int32), want_scales.view(torch.int32))
    # The projection sums in another order: a code may land on the other side of a rounding.
    got, expected = decode_codes(sketch.codes.cpu(), layout).int(), decode_codes(want_sketch.codes, layout).int()
    assert (got - expected).abs().max() <= 1
    assert (got != expected).float().mean() < 1e-3
    torch.testing.assert_close(sketch.scales.cpu(), want_sketch.scales, equal_nan=True, rtol=2e-3, atol=0)
