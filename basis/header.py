"""The header of a basis file: what it is for, and whether that is the served model. Read without torch, before a server starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparsekv.basis.identity import ConfigLike, ModelIdentity, model_identity
from sparsekv.profiles.errors import SparsekvError

FORMAT = "sparsekv-basis/1"
METADATA_KEY = "sparsekv_basis"
"""The header has this one key: safetensors orders several keys at random, and equal inputs must give equal files."""

MAX_HEADER = 16 * 2**20

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


def read_metadata(path: Path) -> BasisMetadata:
    """Reads the header alone.

    Raises:
        SparsekvError: no such file, not a safetensors file, cut short, or not a basis.
    """
    return parse_header(path, _read_header(path))


def check_identity(
    metadata: BasisMetadata, config: Mapping[str, Any] | ConfigLike, weights_fingerprint: str = "", source: str = "basis"
) -> list[str]:
    """Refuses a basis of another model; `config` is the served model's (a dict or a transformers config).

    Returns warnings: other weights of the same architecture do not make a basis invalid (quantised and tuned
    checkpoints share one), but its measured recall no longer speaks for them.

    Raises:
        SparsekvError: the models differ in layers, heads, head size or position encoding; one line names each difference.
    """
    model = model_identity(config, weights_fingerprint)
    hint = "give the basis of this model, or fit one with `sparsekv refit-basis --model MODEL`"
    if differences := metadata.model.differences(model):
        raise SparsekvError(f"{source} was fitted on another model: {'; '.join(differences)}", hint=hint)
    if missing := [key for key in model.attention_layers if key not in metadata.layers]:
        raise SparsekvError(f"{source} has no sketch for attention layers: {', '.join(missing)}", hint=hint)
    fitted = metadata.model.weights_fingerprint
    if fitted and weights_fingerprint and fitted != weights_fingerprint:
        return [f"{source} was fitted on other weights of this architecture; `sparsekv validate recall` tells whether it still holds"]
    return []


def _read_header(path: Path) -> Mapping[str, str] | None:
    """The metadata of a safetensors file: 8 bytes of length, then JSON, then data that must be as long as the JSON says."""
    if not path.is_file():
        raise SparsekvError(f"no basis file at: {path}", hint="fit one with `sparsekv refit-basis`, or correct the path")
    hint = "fit the basis again with `sparsekv refit-basis`"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size):
                raise ValueError("it does not begin with a header")
            header = json.loads(file.read(length))
        facts = header.pop("__metadata__", None)
        expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != expected:
            raise ValueError(f"{size:,} bytes, should have {expected:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SparsekvError(f"{path} is not a safetensors file: {error}", hint=hint) from None
    return facts if isinstance(facts, dict) else None


def parse_header(path: Path, header: Mapping[str, str] | None) -> BasisMetadata:
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
