"""A loaded profile written out again: every value, defaults included, with where it was stated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from .fields import FieldPath
from .loader import LoadedProfile


@dataclass(frozen=True)
class Value:
    """One key with its value as YAML, and where it was stated."""

    path: FieldPath
    text: str
    origin: str

    @property
    def field(self) -> str:
        return ".".join(self.path)


def values(loaded: LoadedProfile) -> list[Value]:
    """All keys in the schema's order; sections and empty maps are left out."""
    return list(_values(loaded, loaded.profile.model_dump(mode="json"), ()))


def resolved_text(loaded: LoadedProfile, *, origins: bool = False) -> str:
    """YAML that loads as the same profile by itself; with `origins`, each value's place in a comment."""
    lines: list[tuple[str, str]] = []
    open_sections: FieldPath = ()
    for value in values(loaded):
        if value.text == "null":
            continue
        *sections, key = value.path
        for depth, name in enumerate(sections):
            if open_sections[: depth + 1] != value.path[: depth + 1]:
                lines.append((f"{'  ' * depth}{_yaml(name)}:", ""))
        open_sections = tuple(sections)
        lines.append((f"{'  ' * len(sections)}{_yaml(key)}: {value.text}", value.origin))
    width = min(max(len(text) for text, _ in lines), 60)
    return "".join(f"{text:{width}}  # {origin}\n" if origins and origin else f"{text}\n" for text, origin in lines)


def differences(left: LoadedProfile, right: LoadedProfile) -> list[tuple[str, str, str]]:
    """(key, left value, right value) where two resolved profiles differ; a key that one lacks is `-` there."""
    a, b = ({value.field: value.text for value in values(loaded)} for loaded in (left, right))
    return [(field, a.get(field, "-"), b.get(field, "-")) for field in dict.fromkeys([*a, *b]) if a.get(field) != b.get(field)]


def _values(loaded: LoadedProfile, node: Any, path: FieldPath) -> Iterator[Value]:
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _values(loaded, child, (*path, key))
    else:
        yield Value(path, _yaml(node), loaded.origin(*path))


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True).removesuffix("\n").removesuffix("\n...")
