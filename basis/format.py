"""A basis is one safetensors file: three tensors per attention layer and one JSON header that says what they are for."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sparsekv.basis.identity import ConfigLike, ModelIdentity, model_identity
from sparsekv.kernels.sketch import SketchBasis
from sparsekv.profiles.errors import SparsekvError

FORMAT = "sparsekv-basis/1"
METADATA_KEY = "sparsekv_basis"
"""The header has this one key: safetensors orders several keys at random, and equal inputs must give equal files."""

Method = Literal["kq", "pca"]


@dataclass(frozen=True)
class LayerFit:
    """What one layer's sketch achieves on held-out text, and what it suggests."""

    rank: int
    recall_mean: tuple[float, ...] = ()
    """Attention mass captured at `BasisMetadata.recall_budget` tokens, mean over queries; one number per KV head."""
    recall_p10: tuple[float, ...] = ()
    budget: int = 0
    """Recommended tokens per (request, KV head); 0 where nothing was measured."""
    hot_slots: int = 0
    """Recommended hot rows per (request, KV head): the distinct tokens selected over 64 consecutive decode steps."""


@dataclass(frozen=True)
class BasisMetadata:
    """Everything in the header. No dates and no paths: the same inputs give the same bytes."""

    model: ModelIdentity
    method: Method
    rank: int
    bits: Literal[4, 8]
    layers: Mapping[str, LayerFit]
    """Keyed as `identity.layer_key` does, in model order."""
    calibration_hash: str = ""
    calibration_tokens: int = 0
    calibration_context: int = 0
    """Longest position the statistics have seen."""
    heldout_hash: str = ""
    recall_budget: int = 0
    """Tokens selected in the held-out measurement."""
    recall: Mapping[str, float] = field(default_factory=dict)
    """Held-out mass at `recall_budget`, mean over all layers and heads: `basis`, `oracle` and the controls."""


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


def read_metadata(path: Path) -> BasisMetadata:
    """Reads the header alone.

    Raises:
        SparsekvError: no such file, not a safetensors file, or not a basis.
    """
    with _open(path) as file:
        return _parse_header(path, file.metadata())


def load_basis(path: Path) -> Basis:
    """Reads and checks a basis file; tensors come as float32 on the CPU.

    Raises:
        SparsekvError: as `read_metadata`, or tensors that do not fit the header.
    """
    layers: dict[str, SketchBasis] = {}
    with _open(path) as file:
        metadata = _parse_header(path, file.metadata())
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
    """Refuses a basis of another model; `config` is the served model's (a dict or a transformers config).

    Returns warnings: other weights of the same architecture do not make a basis invalid (quantised and tuned
    checkpoints share one), but its measured recall no longer speaks for them.

    Raises:
        SparsekvError: the models differ in layers, heads, head size or position encoding; one line names each difference.
    """
    metadata = basis.metadata if isinstance(basis, Basis) else basis
    name = str(basis.path) if isinstance(basis, Basis) else source
    model = model_identity(config, weights_fingerprint)
    hint = "give the basis of this model, or fit one with `sparsekv refit-basis --model MODEL`"
    if differences := metadata.model.differences(model):
        raise SparsekvError(f"{name} was fitted on another model: {'; '.join(differences)}", hint=hint)
    if missing := [key for key in model.attention_layers if key not in metadata.layers]:
        raise SparsekvError(f"{name} has no sketch for attention layers: {', '.join(missing)}", hint=hint)
    fitted = metadata.model.weights_fingerprint
    if fitted and weights_fingerprint and fitted != weights_fingerprint:
        return [f"{name} was fitted on other weights of this architecture; `sparsekv validate recall` tells whether it still holds"]
    return []


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


def _parse_header(path: Path, header: Mapping[str, str] | None) -> BasisMetadata:
    hint = "fit one with `sparsekv refit-basis`"
    if not header or METADATA_KEY not in header:
        raise SparsekvError(f"{path} is a safetensors file but no basis", hint=hint)
    try:
        facts = json.loads(header[METADATA_KEY])
        if facts.pop("format") != FORMAT:
            raise SparsekvError(f"{path} is not in the format {FORMAT}", hint=hint)
        model = facts.pop("model")
        model["attention_layers"] = tuple(model["attention_layers"])
        fits = facts.pop("layers")
        order = sorted(fits, key=lambda key: (key.startswith("mtp."), int(key.removeprefix("mtp."))))
        layers = {key: LayerFit(**{k: tuple(v) if isinstance(v, list) else v for k, v in fits[key].items()}) for key in order}
        return BasisMetadata(model=ModelIdentity(**model), layers=layers, **facts)
    except (KeyError, TypeError, ValueError) as error:
        raise SparsekvError(f"{path} has a damaged header: {error}", hint=hint) from None


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
