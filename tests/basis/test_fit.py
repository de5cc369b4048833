from __future__ import annotations

import pytest
import torch

from sparsekv.basis.fit import fit, random_basis, transposed_basis, truncate
from sparsekv.basis.recall import SINKS, WINDOW, Attention, captured_mass, measure, oracle, recency, select, sketched
from sparsekv.basis.stats import LayerStats, StatsObserver, pack, unpack


def anisotropic(tokens: int, heads: int, dim: int, seed: int, directions: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dim, generator=generator) @ directions


def sample(tokens: int = 3000, q_heads: int = 6, kv_heads: int = 2, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys that vary along different directions, as real ones do; keys have a large mean."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(0.3, -1.5, dim)
    q_axes, k_axes = (torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q for _ in range(2))
    query = anisotropic(tokens, q_heads, dim, 1, torch.diag(spread) @ q_axes)
    key = anisotropic(tokens, kv_heads, dim, 2, torch.diag(spread.flip(0) * 2) @ k_axes) + 5
    return query, key


def score_error(query: torch.Tensor, key: torch.Tensor, method: str, rank: int) -> float:
    stats = LayerStats.empty(key.shape[1], key.shape[2])
    stats.add(query, key)
    sketch = fit(stats, method, rank)  # type: ignore[arg-type]
    tokens, kv_heads, dim = key.shape
    grouped = query.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
    centred = key.transpose(0, 1) - sketch.mean.unsqueeze(1)
    error = grouped @ centred.mT - (grouped @ sketch.query_map) @ (centred @ sketch.key_map).mT
    return error.pow(2).mean().item()


def test_streamed_moments_equal_whole_ones() -> None:
    query, key = sample(tokens=1001)
    observer = StatsObserver()
    for start in range(0, 1001, 333):
        observer("3", query[start : start + 333], key[start : start + 333])
    stats = unpack(pack(observer.layers))["3"]
    assert stats.count == 1001
    centred = (key - key.mean(0)).double()
    assert torch.allclose(stats.key_covariance(), torch.einsum("thd,the->hde", centred, centred) / 1001, atol=1e-4)
    grouped = query.view(1001, 2, 3, 16).double()
    assert torch.allclose(stats.query_moment(), torch.einsum("thgd,thge->hde", grouped, grouped) / 1001, atol=1e-4)


@pytest.mark.parametrize("rank", [2, 4, 8, 12])
def test_kq_is_optimal_for_scores(rank: int) -> None:
    """No basis of equal rank has a smaller score error: not PCA, not random, not KQ itself disturbed."""
    query, key = sample()
    best = score_error(query, key, "kq", rank)
    assert best < score_error(query, key, "pca", rank)
    # The truncated SVD of the whole score matrix bounds every factorisation from below.
    for head in range(2):
        centred = (key[:, head] - key[:, head].mean(0)).double()
        scores = query.view(-1, 2, 3, 16)[:, head].flatten(0, 1).double()
        singular = torch.linalg.svdvals(torch.linalg.qr(scores).R @ torch.linalg.qr(centred).R.mT)
        bound = singular[rank:].pow(2).sum() / (3000 * 9000)
        if head == 0:
            total = bound
    assert best >= 0.9 * (total + bound).item() / 2
    assert best <= 1.1 * (total + bound).item() / 2


def test_full_rank_is_exact_and_prefixes_are_coarser_codes() -> None:
    query, key = sample()
    errors = [score_error(query, key, "kq", rank) for rank in (2, 6, 10, 14, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 * errors[0]
    stats = LayerStats.empty(2, 16)
    stats.add(query, key)
    assert torch.equal(truncate(fit(stats, "kq", 16), 5).key_map, fit(stats, "kq", 5).key_map)


def test_degenerate_statistics_stay_finite() -> None:
    stats = LayerStats.empty(2, 16)
    stats.add(torch.zeros(50, 6, 16), torch.ones(50, 2, 16))  # constant keys, no queries
    for method in ("kq", "pca"):
        sketch = fit(stats, method, 16)  # type: ignore[arg-type]
        assert all(torch.isfinite(part).all() for part in (sketch.mean, sketch.key_map, sketch.query_map))
    huge = torch.full((50, 2, 16), 65504.0)
    huge[:, :, 3] *= torch.linspace(-1, 1, 50)[:, None]
    stats.add(torch.randn(50, 6, 16), huge)
    assert torch.isfinite(fit(stats, "kq", 8).key_map).all()


def attention(tokens: int = 600, queries: int = 20) -> Attention:
    query, key = sample(tokens)
    positions = torch.arange(tokens - queries, tokens)
    grouped = query[positions].view(queries, 2, 3, 16).permute(1, 2, 0, 3).contiguous()
    return Attention(grouped, key.transpose(0, 1).contiguous(), positions)


def test_selection_keeps_sinks_and_window_and_never_looks_ahead() -> None:
    there = attention()
    chosen = select(there.sketch_weights(random_basis(fitted(there), 0), 4).mean(dim=1), there.positions, 100)
    assert chosen.shape == (2, 20, 100)
    for head in range(2):
        for index, position in enumerate(there.positions.tolist()):
            tokens = set(chosen[head, index].tolist())
            assert len(tokens) == 100
            assert max(tokens) <= position
            assert set(range(SINKS)) | set(range(position - WINDOW + 1, position + 1)) <= tokens


def fitted(there: Attention) -> object:
    stats = LayerStats.empty(2, 16)
    stats.add(there.query.permute(2, 0, 1, 3).flatten(1, 2), there.key.transpose(0, 1)[: there.query.shape[2]])
    stats.add(*sample(2000))
    return fit(stats, "kq", 8)


def test_mass_lies_between_controls_and_oracle() -> None:
    there = attention()
    own = fitted(there)
    scorers = {"oracle": oracle, "kq": sketched(own, 4), "kq8": sketched(own, 8), "random": sketched(random_basis(own, 1), 4)}
    scorers |= {"recency": recency, "transposed": sketched(transposed_basis(own), 4)}
    budgets = (60, 200, 600, 9000)
    mass = {name: value.mean(dim=(1, 2)) for name, value in measure(there, scorers, budgets).items()}
    for name, value in mass.items():
        assert (value[1:] >= value[:-1] - 1e-6).all(), name
        assert torch.allclose(value[2:], torch.ones(2), atol=1e-5), name  # everything selected
        assert (value <= mass["oracle"] + 1e-6).all(), name
    assert mass["kq"][0] > max(mass["random"][0], mass["recency"][0], mass["transposed"][0])
    assert mass["kq8"][0] >= mass["kq"][0] - 1e-3


def test_captured_mass_counts_what_is_selected() -> None:
    weights = torch.tensor([[[[0.0] * 50]]]).expand(1, 2, 1, 50).clone()
    weights[..., 10] = 0.75
    weights[..., 2] = 0.25
    estimate = torch.zeros(1, 1, 50)
    estimate[..., 10] = 0.1
    mass = captured_mass(weights, estimate, torch.tensor([49]), [SINKS + WINDOW, SINKS + WINDOW + 1])
    assert mass.shape == (2, 1, 2, 1)
    assert mass.flatten().tolist() == [0.25, 0.25, 1.0, 1.0]
