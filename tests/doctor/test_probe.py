"""The measurement on the cards: its inputs on the CPU, and the whole of it on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sparsekv.kernels.layout import KVLayout  # noqa: E402
from sparsekv_cli.doctor.gpus import query_gpus  # noqa: E402
from sparsekv_cli.doctor.host import Host  # noqa: E402
from sparsekv_cli.doctor.probe import run_probe  # noqa: E402
from sparsekv_cli.doctor.probe_main import _layout, gather  # noqa: E402


@pytest.mark.parametrize("row_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_row_size_has_a_layout(row_format: str, head_dim: int) -> None:
    layout = KVLayout(num_q_heads=8, num_kv_heads=4, head_dim=head_dim, row_format=row_format, sketch_rank=16)  # type: ignore[arg-type]
    assert _layout(layout.row_bytes, 4).row_bytes == layout.row_bytes


def test_no_layout_for_a_strange_size() -> None:
    with pytest.raises(ValueError, match="no row format"):
        _layout(7, 4)


@pytest.mark.parametrize("row_bytes", [264, 520, 1024])
def test_the_gather_brings_every_row(row_bytes: int) -> None:
    pool = torch.randint(0, 256, (64 * 2**20,), dtype=torch.uint8)
    run = gather(pool, row_bytes, "cpu", total=32 * 16)
    first, again = run(), run()
    assert first.shape == (8, 4, 16)
    assert bool((first >= 0).all())
    assert first.unique().numel() == 32 * 16
    assert again.shape == first.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    host = Host()
    found = query_gpus(host)
    assert found.trouble is None, found
    result = run_probe(host, found.gpus[:1], (264, 520, 1024))
    assert result.failure == "", result
    probed = result.cards[found.gpus[0].uuid]
    assert probed.problems == ()
    assert probed.pinned_bytes == 2 * 2**30
    assert probed.copy_rate is not None
    assert probed.copy_rate > 1e9
    assert probed.gather_rates is not None
    assert set(probed.gather_rates) == {264, 520, 1024}
    assert all(0 < rate < 1.3 * probed.copy_rate for rate in probed.gather_rates.values())
