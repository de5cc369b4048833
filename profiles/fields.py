"""Every key a profile may hold: its path, its type in words, its default and what it means."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .errors import SparsekvError
from .schema import FilePath, Profile

FieldPath = tuple[str, ...]


@dataclass(frozen=True)
class Key:
    """One key, as the reference shows it."""

    field: str
    """Its path with dots."""
    type: str
    default: str
    """`required` where there is none; empty for a section."""
    meaning: str


def schema_fields(model: type[BaseModel] = Profile, prefix: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldInfo]]:
    """All sections and keys, each section before its keys."""
    for name, field in model.model_fields.items():
        yield (*prefix, name), field
        if section := _section(field):
            yield from schema_fields(section, (*prefix, name))


def path_fields() -> Iterator[FieldPath]:
    """The keys that hold a path."""
    for path, field in schema_fields():
        marks = [*field.metadata, *(mark for option in get_args(field.annotation) for mark in getattr(option, "__metadata__", ()))]
        if any(isinstance(mark, FilePath) for mark in marks):
            yield path


def describe(field: str) -> list[Key]:
    """A key, or a section with all its keys.

    Raises:
        SparsekvError: there is no such key.
    """
    schema = Profile.model_json_schema(mode="serialization")
    chosen = [path for path, _ in schema_fields() if ".".join(path) == field or ".".join(path).startswith(f"{field}.")]
    if not chosen:
        close = difflib.get_close_matches(field, [".".join(path) for path, _ in schema_fields()], 1, 0.6)
        raise SparsekvError(
            f"no profile has a key `{field}`",
            hint=f"did you mean `{close[0]}`?" if close else "`sparsekv profiles schema --field kv` shows a section",
        )
    return [_key(schema, path) for path in chosen]


def _section(field: FieldInfo) -> type[BaseModel] | None:
    for option in (field.annotation, *get_args(field.annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _key(schema: dict[str, Any], path: FieldPath) -> Key:
    parent, node = schema, schema
    for name in path:
        parent, node = node, _resolved(schema, node["properties"][name])
    required = path[-1] in parent.get("required", ())
    stated = parent["properties"][path[-1]]
    meaning = stated.get("description") or node.get("description", "")
    if "properties" in node:
        return Key(".".join(path), "section", "", meaning)
    return Key(".".join(path), _type(node), "required" if required else _default(stated.get("default")), meaning)


def _resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Follows a reference, and takes the section of an optional one."""
    for option in (node, *node.get("anyOf", ())):
        if reference := option.get("$ref"):
            section: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]]
            return section
    return node


_UNITS = {"GiB": "size, such as 64GiB", "GB/s": "rate, such as 12.5GB/s", "W$": "power, such as 250W"}


def _type(node: dict[str, Any]) -> str:
    if options := node.get("anyOf"):
        return "on or off" if {"type": "boolean"} in options else " or ".join(_type(o) for o in options if o.get("type") != "null")
    if "enum" in node:
        return " | ".join(map(str, node["enum"]))
    if pattern := node.get("pattern"):
        return next((text for mark, text in _UNITS.items() if mark in pattern), f"text of the form {pattern}")
    match node.get("type"):
        case "array":
            return "[lowest, highest]"
        case "object":
            return "map of names to values"
        case "string":
            return "text"
    bounds = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<="}
    return " ".join([node.get("type", "value"), *(f"{sign} {node[bound]:g}" for bound, sign in bounds.items() if bound in node)])


def _default(value: object) -> str:
    match value:
        case None:
            return "unset"
        case bool():
            return "on" if value else "off"
        case {}:
            return "empty"
    return str(value)
