"""Pydantic's errors in the words of this project."""

from __future__ import annotations

import difflib
import re
from typing import Any

from .fields import FieldPath, schema_fields


def explain(path: FieldPath, error: Any) -> str:
    """What is wrong with the key at `path`, given one item of `pydantic.ValidationError.errors()`."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    shown = f'"{value}"' if isinstance(value, str) else "a map" if isinstance(value, dict) else f"{value}"
    match kind:
        case "extra_forbidden":
            similar = _similar_field(path)
            return f"unknown key; did you mean `{similar}`?" if similar else "unknown key"
        case "missing":
            return "required, and stated nowhere"
        case "literal_error":
            allowed = re.findall(r"'([^']*)'|(\d+)", context["expected"])
            options = [text or number for text, number in allowed]
            close = difflib.get_close_matches(str(value).lower(), options, 1, 0.6) or [o for o in options if str(value) and str(value) in o]
            return f"expected one of {', '.join(options)}; got {shown}" + (f"; did you mean `{close[0]}`?" if close else "")
        case "value_error":
            return str(context["error"])
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"expected a map of keys, got {shown}"
    expected = {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "string_type": "text",
        "bool_type": "true or false",
        "list_type": "a list",
        "greater_than": f"more than {context.get('gt')}",
        "greater_than_equal": f"at least {context.get('ge')}",
        "less_than_equal": f"at most {context.get('le')}",
        "string_too_short": "text that is not empty",
        "string_pattern_mismatch": f"text of the form {context.get('pattern')}",
        "too_short": f"{context.get('min_length')} values",
        "too_long": f"{context.get('max_length')} values",
    }.get(kind)
    return f"expected {expected}, got {shown}" if expected else f"{error['msg'][0].lower()}{error['msg'][1:]}, got {shown}"


def _similar_field(path: FieldPath) -> str | None:
    """The nearest name in the same section, else a key of another section that is called so."""
    fields = {".".join(known): known for known, _ in schema_fields()}
    siblings = [known[-1] for known in fields.values() if known[:-1] == path[:-1]]
    if close := difflib.get_close_matches(path[-1], siblings, 1, 0.6):
        return close[0]
    elsewhere = {known[-1]: dotted for dotted, known in fields.items()} | {dotted.replace(".", "_"): dotted for dotted in fields}
    close = difflib.get_close_matches(path[-1], elsewhere, 1, 0.75)
    return elsewhere[close[0]] if close else None
