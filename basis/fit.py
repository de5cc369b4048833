"""From second moments to the maps of a sketch.

`kq`, the default, minimises the error of the scores (KQ-SVD, arXiv 2512.05916): with Ck the covariance of the keys and Cq the
second moment of the queries of a KV head's group, the best rank-r factors of QKᵀ come from one SVD,

    Cq^1/2 Ck^1/2 = L S Rᵀ        query_map = Cq^-1/2 L S^1/2        key_map = Ck^-1/2 R S^1/2        (first r columns)

The singular values are shared equally between the maps. Any split gives the same scores in exact arithmetic; this one loses
least when codes have one scale per token, since a coordinate that matters more then spans more of the integer range.
`pca` keeps the keys' own principal directions and is there to be compared with.
Both subtract the mean key: a constant added to all scores of a query changes no softmax.
"""

from __future__ import annotations

import torch

from sparsekv.basis.format import Method
from sparsekv.basis.stats import LayerStats
from sparsekv.kernels.sketch import SketchBasis

RIDGE = 1e-4
"""Added to both moments, relative to their largest eigenvalue: directions never seen must not be blown up."""


def fit(stats: LayerStats, method: Method, rank: int) -> SketchBasis:
    """Fits one layer; columns come in falling order of importance, so a prefix of a code is a coarser code."""
    match method:
        case "kq":
            query_map, key_map = _fit_kq(stats)
        case "pca":
            query_map = key_map = torch.linalg.eigh(stats.key_covariance()).eigenvectors.flip(-1)
    # Decompositions leave the sign of a direction open. Fixed here, so that the same text gives the same file.
    largest = key_map.abs().argmax(dim=-2, keepdim=True)
    sign = key_map.gather(-2, largest).sign()
    return SketchBasis(
        mean=stats.key_mean().float(),
        key_map=(key_map * sign)[..., :rank].float().contiguous(),
        query_map=(query_map * sign)[..., :rank].float().contiguous(),
    )


def truncate(sketch: SketchBasis, rank: int) -> SketchBasis:
    """The same basis with fewer dimensions."""
    return SketchBasis(
        mean=sketch.mean, key_map=sketch.key_map[..., :rank].contiguous(), query_map=sketch.query_map[..., :rank].contiguous()
    )


def random_basis(like: SketchBasis, seed: int) -> SketchBasis:
    """Control: random orthonormal directions, per head."""
    generator = torch.Generator().manual_seed(seed)
    heads, dim, rank = like.key_map.shape
    directions = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q[..., :rank].contiguous()
    return SketchBasis(mean=like.mean, key_map=directions, query_map=directions)


def transposed_basis(like: SketchBasis) -> SketchBasis:
    """Control: the numbers of each map read in the wrong order, `[rank, D]` taken for `[D, rank]`."""

    def misread(maps: torch.Tensor) -> torch.Tensor:
        return maps.mT.contiguous().view(maps.shape)

    return SketchBasis(mean=like.mean, key_map=misread(like.key_map), query_map=misread(like.query_map))


def _fit_kq(stats: LayerStats) -> tuple[torch.Tensor, torch.Tensor]:
    keys, queries = _ridged(stats.key_covariance()), _ridged(stats.query_moment())
    left, singular, right = torch.linalg.svd(_power(queries, 0.5) @ _power(keys, 0.5))
    share = singular.sqrt().unsqueeze(-2)
    return _power(queries, -0.5) @ (left * share), _power(keys, -0.5) @ (right.mT * share)


def _ridged(moment: torch.Tensor) -> torch.Tensor:
    top = torch.linalg.eigvalsh(moment)[..., -1].clamp_min(1e-12)
    return moment + RIDGE * top[..., None, None] * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)


def _power(moment: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * values.clamp_min(1e-30).pow(exponent).unsqueeze(-2)) @ vectors.mT
