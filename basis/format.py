"""A basis is one safetensors file: three tensors per attention layer and one JSON header that says what they are for."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sparsekv.basis.header import (
    FORMAT,
    METADATA_KEY,
    BasisMetadata,
    LayerFit,
    Method,
    check_identity,
    parse_header,
    read_metadata,
)
from sparsekv.basis.identity import ConfigLike
from sparsekv.kernels.sketch import SketchBasis
from sparsekv.profiles.errors import SparsekvError

__all__ = ["Basis", "BasisMetadata", "LayerFit", "Method", "check_basis", "load_basis", "read_metadata", "save_basis", "write_atomically"]


@dataclass(frozen=True)
class Basis:
    """A loaded basis file."""

    metadata: BasisMetadata
    layers: Mapping[str, SketchBasis]
    """Float32 maps: `mean [Hkv, D]`, `key_map` and `query_map` `[Hkv, D, rank]`; the rank may differ between layers."""
    file_hash: str
    path: Path

    def layer(self, key: str, heads: slice = slice(None)) -> SketchBasis:
        """The sketch of one layer, or of the KV heads that one tensor-parallel rank holds."""
        whole = self.layers[key]
        return SketchBasis(mean=whole.mean[heads], key_map=whole.key_map[heads], query_map=whole.query_map[heads])


def save_basis(path: Path, metadata: BasisMetadata, layers: Mapping[str, SketchBasis]) -> str:
    """Writes the file atomically, maps as float16; returns its sha256.

    Raises:
        ValueError: the layers and the metadata do not describe the same thing (a programmer's mistake).
    """
    if list(metadata.layers) != list(layers):
        raise ValueError(f"metadata describes layers {list(metadata.layers)}, tensors are {list(layers)}")
    tensors: dict[str, torch.Tensor] = {}
    for key, sketch in layers.items():
        _check_shapes(key, sketch.mean, sketch.key_map, sketch.query_map, metadata)
        # A factor may move between the two maps of a head without changing a score; this one keeps float16 in range.
        size = sketch.key_map.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-30)
        for name, tensor in (("mean", sketch.mean), ("key_map", sketch.key_map / size), ("query_map", sketch.query_map * size)):
            half = tensor.to(device="cpu", dtype=torch.float16).contiguous()
            if not torch.isfinite(half).all():
                raise ValueError(f"layer {key}: {name} does not fit float16")
            tensors[f"layers.{key}.{name}"] = half
    header = {"format": FORMAT, **asdict(metadata)}
    data = save(tensors, metadata={METADATA_KEY: json.dumps(header, sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def load_basis(path: Path) -> Basis:
    """Reads and checks a basis file; tensors come as float32 on the CPU.

    Raises:
        SparsekvError: as `read_metadata`, or tensors that do not fit the header.
    """
    layers: dict[str, SketchBasis] = {}
    with _open(path) as file:
        metadata = parse_header(path, file.metadata())
        names = set(file.keys())
        for key in metadata.layers:
            parts = [f"layers.{key}.{part}" for part in ("mean", "key_map", "query_map")]
            if missing := [name for name in parts if name not in names]:
                raise SparsekvError(f"{path}: tensor `{missing[0]}` is missing", hint="fit the basis again with `sparsekv refit-basis`")
            mean, key_map, query_map = (file.get_tensor(name).float() for name in parts)
            try:
                _check_shapes(key, mean, key_map, query_map, metadata)
            except ValueError as error:
                raise SparsekvError(f"{path}: {error}", hint="fit the basis again with `sparsekv refit-basis`") from None
            layers[key] = SketchBasis(mean=mean, key_map=key_map, query_map=query_map)
    return Basis(metadata, layers, hashlib.sha256(path.read_bytes()).hexdigest(), path)


def check_basis(
    basis: Basis | BasisMetadata, config: Mapping[str, Any] | ConfigLike, weights_fingerprint: str = "", source: str = "basis"
) -> list[str]:
    """`header.check_identity` for a loaded basis as well."""
    if isinstance(basis, Basis):
        return check_identity(basis.metadata, config, weights_fingerprint, str(basis.path))
    return check_identity(basis, config, weights_fingerprint, source)


def write_atomically(path: Path, data: bytes) -> None:
    """The file is there whole or not at all, also after a power cut."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _open(path: Path) -> Any:
    if not path.is_file():
        raise SparsekvError(f"no basis file at: {path}", hint="fit one with `sparsekv refit-basis`, or correct the path")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise SparsekvError(f"{path} is not a safetensors file: {error}", hint="fit the basis again with `sparsekv refit-basis`") from None


def _check_shapes(key: str, mean: torch.Tensor, key_map: torch.Tensor, query_map: torch.Tensor, metadata: BasisMetadata) -> None:
    heads, dim, rank = metadata.model.num_kv_heads, metadata.model.head_dim, metadata.layers[key].rank
    if rank < 1 or rank > dim or rank * metadata.bits % 8:
        raise ValueError(f"layer {key}: rank {rank} is not within 1..{dim} in whole bytes of {metadata.bits}-bit codes")
    for name, tensor, shape in (
        ("mean", mean, (heads, dim)),
        ("key_map", key_map, (heads, dim, rank)),
        ("query_map", query_map, (heads, dim, rank)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"layer {key}: {name} is {list(tensor.shape)}, expected {list(shape)}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"layer {key}: {name} holds NaN or infinity")
