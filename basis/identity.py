"""Which model a basis belongs to: what must match for its projections to mean anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast


class ConfigLike(Protocol):
    """A transformers `PretrainedConfig`, or anything else that can become a `config.json` dict."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ModelIdentity:
    """The shape and position encoding of a model's attention: keys after RoPE depend on all of it.

    Weights are recognised by `weights_fingerprint` (norm weights, which quantised checkpoints of a model keep), "" if unknown.
    """

    model_type: str
    num_layers: int
    attention_layers: tuple[str, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    rope: Mapping[str, float | str | list[float]] = field(default_factory=dict)
    weights_fingerprint: str = ""

    @property
    def config_hash(self) -> str:
        """sha256 of every field but the fingerprint."""
        facts = {name: value for name, value in asdict(self).items() if name != "weights_fingerprint"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def differences(self, other: ModelIdentity) -> list[str]:
        """Fields in which two models differ, as `name a != b`, the fingerprint left out."""
        mine, theirs = asdict(self), asdict(other)
        names = [name for name in mine if name != "weights_fingerprint" and mine[name] != theirs[name]]
        return [f"{name.replace('_', ' ')} {_short(mine[name])} != {_short(theirs[name])}" for name in names]


def model_identity(config: Mapping[str, Any] | ConfigLike, weights_fingerprint: str = "") -> ModelIdentity:
    """Reads the identity from a `config.json` dict or a transformers config; of a multimodal model, its text part."""
    facts: dict[str, Any] = dict(config) if isinstance(config, Mapping) else cast(ConfigLike, config).to_dict()
    text = facts.get("text_config")
    if isinstance(text, Mapping):
        facts = dict(text)
    num_layers, num_q_heads = int(facts["num_hidden_layers"]), int(facts["num_attention_heads"])
    return ModelIdentity(
        model_type=str(facts.get("model_type", "")),
        num_layers=num_layers,
        attention_layers=attention_layers(facts),
        num_q_heads=num_q_heads,
        num_kv_heads=int(facts.get("num_key_value_heads") or num_q_heads),
        head_dim=int(facts.get("head_dim") or facts["hidden_size"] // num_q_heads),
        hidden_size=int(facts["hidden_size"]),
        rope=_rope(facts),
        weights_fingerprint=weights_fingerprint,
    )


def attention_layers(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the full-attention layers: the layer's index in the model, as text."""
    num_layers = int(facts["num_hidden_layers"])
    types = facts.get("layer_types")
    if not types and (interval := facts.get("full_attention_interval")):
        types = ["full_attention" if (i + 1) % int(interval) == 0 else "linear_attention" for i in range(num_layers)]
    return tuple(str(i) for i in range(num_layers) if not types or types[i] == "full_attention")


def layer_key(layer_name: str) -> str:
    """The basis key of a vLLM attention layer: `model.layers.3.self_attn.attn` -> `3`, `mtp.layers.0.…` -> `mtp.0`."""
    parts = layer_name.split(".")
    index = parts[parts.index("layers") + 1]
    return f"mtp.{index}" if "mtp" in parts[: parts.index("layers")] else str(int(index))


def _rope(facts: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings in one form: transformers 5 keeps them in `rope_parameters`, older files in three places."""
    rope = {**(facts.get("rope_scaling") or {}), **(facts.get("rope_parameters") or {})}
    full = rope.get("full_attention")
    if isinstance(full, Mapping):  # per layer type
        rope = dict(full)
    rope["rope_type"] = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope.setdefault("rope_theta", facts.get("rope_theta") or 10000.0)
    partial = rope.pop("partial_rotary_factor", None)
    rope["partial_rotary_factor"] = 1.0 if (value := partial or facts.get("partial_rotary_factor")) is None else value
    # JSON neither tells 10000 from 10000.0 apart nor keeps None; the hash must not either.
    return {key: _number(rope[key]) for key in sorted(rope) if rope[key] is not None}


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple):
        return value
    return [float(item) for item in value] if isinstance(value, list | tuple) else float(value)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"
