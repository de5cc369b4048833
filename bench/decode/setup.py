"""The files an arm needs: a model folder without weights, a basis, and a resolved profile."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sparsekv.basis.format import BasisMetadata, LayerFit, save_basis
from sparsekv.basis.identity import model_identity
from sparsekv.kernels.policy import SelectionPolicy
from sparsekv.kernels.sketch import SketchBasis


def cut_model(config: dict[str, Any], layers: int, folder: Path) -> dict[str, Any]:
    """Writes `config` cut to its first `layers` layers as a model folder; returns the cut configuration."""
    cut = dict(config, num_hidden_layers=layers)
    if "layer_types" in config:
        cut["layer_types"] = config["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cut, indent=1))
    return cut


def random_basis(config: dict[str, Any], rank: int, path: Path) -> None:
    """A basis for random weights: orthonormal columns, the same map for queries and keys. Good for speed only."""
    model = model_identity(config)
    generator = torch.Generator().manual_seed(0)
    keys = (*model.attention_layers, *(f"mtp.{i}" for i in range(config.get("mtp_num_hidden_layers", 0))))
    layers = {}
    for key in keys:
        maps = torch.linalg.qr(torch.randn(model.num_kv_heads, model.head_dim, model.head_dim, generator=generator))[0][..., :rank]
        layers[key] = SketchBasis(mean=torch.zeros(model.num_kv_heads, model.head_dim), key_map=maps, query_map=maps)
    metadata = BasisMetadata(model=model, method="pca", rank=rank, bits=4, layers={key: LayerFit(rank=rank) for key in keys})
    save_basis(path, metadata, layers)


def write_profile(
    path: Path, basis: Path, row_format: str, pool_tokens: int, hot_bytes: int, policy: SelectionPolicy, placement: str = "host"
) -> None:
    """The part of a resolved profile that the engine reads (`engine/config.py`)."""
    profile = {
        "kv": {"dtype": row_format, "pool_tokens": pool_tokens, "placement": placement, "hot_bytes": hot_bytes},
        "sketch": {"basis": str(basis)},
        "selection": asdict(policy),
    }
    path.write_text(json.dumps(profile, indent=1))
