"""merge: two attention results over disjoint tokens equal attention over their union."""

import pytest
import torch

from sparsekv.kernels.merge import kernel, merge_reference


@pytest.fixture
def merge(backend):
    return merge_reference if backend == "reference" else kernel.merge


def attention(query, key, value):
    """float64 attention of `[T, H, D]` queries over `[n, H, D]` keys: out and natural log-sum-exp."""
    scores = torch.einsum("thd,nhd->thn", query, key)
    return torch.einsum("thn,nhd->thd", scores.softmax(-1), value), torch.logsumexp(scores, -1)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 64), (5, 3, 128), (37, 6, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_union(merge, device, tokens, heads, dim, dtype):
    torch.manual_seed(tokens)
    query, key, value = (torch.randn(n, heads, dim, dtype=torch.float64) for n in (tokens, 70, 70))
    expected, expected_lse = attention(query, key, value)
    (out_a, lse_a), (out_b, lse_b) = attention(query, key[:23], value[:23]), attention(query, key[23:], value[23:])
    # One log-sum-exp head-major, as FlashAttention returns it.
    head_major = lse_b.float().t().contiguous().t()
    out, lse = merge(*(t.to(device) for t in (out_a.to(dtype), lse_a.float(), out_b.to(dtype), head_major)))
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.cpu().double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_empty_sides_are_ignored_whatever_they_hold(merge, device, empty):
    out_a = torch.full((3, 2, 64), torch.nan, device=device)
    out_b = torch.randn(3, 2, 64, device=device)
    lse_a = torch.full((3, 2), empty, device=device)
    lse_b = torch.randn(3, 2, device=device)
    lse_b[2] = -torch.inf
    out_b[2] = torch.nan
    for out, lse in (merge(out_a, lse_a, out_b, lse_b), merge(out_b, lse_b, out_a, lse_a)):
        torch.testing.assert_close(out[:2], out_b[:2])
        torch.testing.assert_close(lse[:2], lse_b[:2])
        assert (out[2] == 0).all()
        assert (lse[2] == -torch.inf).all()


def test_far_apart_and_large(merge, device):
    out_a, out_b = torch.ones(1, 1, 64, device=device), torch.full((1, 1, 64), 2.0, device=device)
    out, lse = merge(out_a, torch.tensor([[5e4]], device=device), out_b, torch.tensor([[-5e4]], device=device))
    assert (out == 1).all()
    assert lse.item() == 5e4


def test_no_tokens(merge, device):
    out, lse = merge(*(torch.empty(shape, device=device) for shape in ((0, 2, 64), (0, 2), (0, 2, 64), (0, 2))))
    assert out.shape == (0, 2, 64)
    assert lse.shape == (0, 2)
