"""JSON Schema of a profile's file, for editors. `profile.schema.json` beside this file is its output, and a test compares the two."""

from __future__ import annotations

import json
from typing import Any

from .schema import Profile

FILE_NAME = "profile.schema.json"


def profile_schema() -> dict[str, Any]:
    """Schema of what one file may state. Less than a whole profile: the rest may come from the files it extends."""
    schema = Profile.model_json_schema(mode="serialization")
    required = schema.pop("required")
    for section in schema["$defs"].values():
        section.pop("required", None)
        section["type"] = ["object", "null"]
    for section in (schema, *schema["$defs"].values()):
        for key in section["properties"].values():
            key.pop("title", None)
            _allow_null(key)
    name = {"type": "string", "minLength": 1}
    schema["properties"] = {
        "extends": {
            "anyOf": [name, {"type": "array", "items": name}],
            "description": "profiles this one starts from: names of shipped ones, or paths; later ones win",
        },
        **schema["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "sparsekv hardware profile",
        "anyOf": [{"required": ["extends"]}, {"required": required}],
    }


def schema_text() -> str:
    return json.dumps(profile_schema(), indent=2) + "\n"


def _allow_null(key: dict[str, Any]) -> None:
    """`null` takes back what a parent states. A section's definition allows it itself."""
    if "enum" in key:
        key.pop("type", None)
        key["enum"] = [*key["enum"], None]
    elif "type" in key:
        key["type"] = [key["type"], "null"]
    elif "anyOf" in key and {"type": "null"} not in key["anyOf"]:
        key["anyOf"] = [*key["anyOf"], {"type": "null"}]
