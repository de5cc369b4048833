"""The spec an attention layer declares, and what vLLM makes of it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from sparsekv.engine.config import BLOCK_SIZE
from sparsekv.engine.spec import SparseKVSpec, to_host_spec
from vllm.v1.kv_cache_interface import FullAttentionSpec

STATE_PAGES = [0, 1, 2047, 2048, 2049, 3_207_168, 3_351_000]


def stock(block_size: int = BLOCK_SIZE) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)


@pytest.mark.parametrize("state_page", STATE_PAGES)
def test_the_virtual_page_holds_one_state_in_one_block(state_page: int) -> None:
    page = to_host_spec(stock(), 10, state_page).page_size_bytes
    assert page >= max(state_page, 1)
    assert page - state_page <= 16 * BLOCK_SIZE  # and wastes little


@pytest.mark.parametrize("state_page", STATE_PAGES)
def test_the_page_grows_with_the_block_alone(state_page: int) -> None:
    """vLLM sizes blocks from the page of a one-token spec; a page fixed per block would come out 128 times too large."""
    assert to_host_spec(stock(1), 10, state_page).page_size_bytes * BLOCK_SIZE == to_host_spec(stock(), 10, state_page).page_size_bytes


def test_the_shape_of_the_layer_is_kept() -> None:
    spec = to_host_spec(stock(), 10, 0)
    assert (spec.num_kv_heads, spec.head_size, spec.block_size, spec.host_num_blocks) == (4, 256, BLOCK_SIZE, 10)


def test_layers_merge_only_if_they_agree() -> None:
    a, b = to_host_spec(stock(), 10, 0), to_host_spec(stock(), 11, 0)
    assert SparseKVSpec.merge([a, a]) == a
    with pytest.raises(AssertionError):
        SparseKVSpec.merge([a, b])
    with pytest.raises(AssertionError):
        SparseKVSpec.merge([a, stock()])  # type: ignore[list-item]
