"""The shape of a model as its `config.json` states it, in the terms of the memory arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .schema import Shape


def model_shape(config: Mapping[str, Any]) -> Shape:
    """Reads the text part of a `config.json`.

    Raises:
        KeyError, TypeError, ValueError: it lacks what a decoder's configuration has.
    """
    text = config.get("text_config")
    facts = text if isinstance(text, Mapping) else config
    heads = int(facts["num_attention_heads"])
    kinds = list(_layer_types(facts))
    attention, recurrent = kinds.count("full_attention"), kinds.count("linear_attention")
    return Shape(
        attention_layers=attention,
        draft_layers=int(facts.get("mtp_num_hidden_layers") or 0),
        query_heads=heads,
        kv_heads=int(facts.get("num_key_value_heads") or heads),
        head_dim=int(facts.get("head_dim") or int(facts["hidden_size"]) // heads),
        recurrent_layers=recurrent,
        recurrent_state=f"{recurrent * _state_bytes(facts)}B" if recurrent else "0B",  # type: ignore[arg-type]  # parsed by the schema
    )


def shape_problems(stated: Shape, config: Mapping[str, Any]) -> list[str]:
    """Where a profile's `model.shape` contradicts the model, as `model.shape.key is A, the model has B`."""
    found = model_shape(config)
    names = ("attention_layers", "query_heads", "kv_heads", "head_dim", "recurrent_layers")
    pairs = [(name, getattr(stated, name), getattr(found, name)) for name in names]
    return [f"model.shape.{name} is {ours}, the model has {theirs}" for name, ours, theirs in pairs if ours != theirs]


def _layer_types(facts: Mapping[str, Any]) -> Iterator[str]:
    if types := facts.get("layer_types"):
        return iter(types)
    layers, interval = int(facts["num_hidden_layers"]), int(facts.get("full_attention_interval") or 1)
    return ("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))


def _state_bytes(facts: Mapping[str, Any]) -> int:
    """One Gated DeltaNet layer: the state `[value heads, key dim, value dim]` and the convolution's last inputs, in float32."""
    key_heads, value_heads = int(facts["linear_num_key_heads"]), int(facts["linear_num_value_heads"])
    key_dim, value_dim = int(facts["linear_key_head_dim"]), int(facts["linear_value_head_dim"])
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return 4 * (value_heads * key_dim * value_dim + channels * (int(facts["linear_conv_kernel_dim"]) - 1))
