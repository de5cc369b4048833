"""stage: rows of a token range back to plain keys and values."""

import pytest
import torch

from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.rows import dequantise_rows, quantise_rows
from sparsekv.kernels.stage import kernel, stage_reference


@pytest.fixture
def stage(backend):
    return stage_reference if backend == "reference" else kernel.stage


@pytest.mark.parametrize("row_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 256), (127, 129), (250, 300), (5, 5)])
def test_range(stage, device, row_format, dim, start, end):
    generator = torch.Generator().manual_seed(dim + start)
    layout = KVLayout(6, 2, dim, row_format, sketch_rank=32)
    blocks, used = 7, 3
    key, value = (torch.randn(2, 128 * used, 2, dim, generator=generator).bfloat16() * 3 for _ in range(2))
    table = torch.randperm(blocks, generator=generator)[: 2 * used].view(2, used)
    rows = torch.full(layout.rows_shape(blocks), 0xFF, dtype=torch.uint8)
    row_scales = torch.full(layout.row_scales_shape(blocks), torch.nan) if layout.has_scales else None
    for request in range(2):
        tokens, scales = quantise_rows(key[request], value[request], layout)
        for i, block in enumerate(table[request].tolist()):
            rows[block] = tokens[i * 128 : (i + 1) * 128].transpose(0, 1)
            if row_scales is not None:
                row_scales[block] = scales[i * 128 : (i + 1) * 128].transpose(0, 1)
    key_out, value_out = (torch.full((end - start + 3, 2, dim), torch.nan, dtype=torch.bfloat16, device=device) for _ in range(2))
    row_scales = None if row_scales is None else row_scales.to(device)
    stage(rows.to(device), row_scales, table.int().to(device), 1, start, end, layout, key_out, value_out)
    expected = dequantise_rows(*quantise_rows(key[1, start:end], value[1, start:end], layout), layout)
    for got, want in zip((key_out, value_out), expected, strict=True):
        torch.testing.assert_close(got[: end - start].cpu().float(), want.bfloat16().float(), rtol=1e-2, atol=1e-2)
        assert got[end - start :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("row_format", ["bf16", "int8", "int4"])
def test_pinned_pool_beyond_two_gib(row_format):
    """Reads only the blocks of the request, from host memory in place."""
    layout = KVLayout(24, 4, 256, row_format, sketch_rank=128)
    blocks = 5 * 2**29 // (4 * 128 * layout.row_bytes) + 1
    rows = torch.full(layout.rows_shape(blocks), 0xFF, dtype=torch.uint8, pin_memory=True)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1280, 4, 256, generator=generator).bfloat16() for _ in range(2))
    table = torch.tensor([[0] * 10, list(range(blocks - 10, blocks))], dtype=torch.int32)
    stored, scales = quantise_rows(key, value, layout)
    row_scales = torch.full(layout.row_scales_shape(blocks), torch.nan, device="cuda") if layout.has_scales else None
    if row_scales is not None:
        row_scales[-10:] = scales.view(10, 128, 4, 2).transpose(1, 2).cuda()
    rows[-10:] = stored.view(10, 128, 4, -1).transpose(1, 2)
    key_out, value_out = (torch.full((1200, 4, 256), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    kernel.stage(rows, row_scales, table.cuda(), 1, 37, 1237, layout, key_out, value_out)
    expected = dequantise_rows(stored[37:1237], None if scales is None else scales[37:1237], layout)
    for got, want in zip((key_out, value_out), expected, strict=True):
        torch.testing.assert_close(got.cpu().float(), want.bfloat16().float(), rtol=1e-2, atol=1e-2)
