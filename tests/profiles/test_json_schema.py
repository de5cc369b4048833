"""The schema for editors: current, and of one mind with the loader."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jsonschema
import pytest
import yaml

from sparsekv.profiles.fields import describe, path_fields, schema_fields
from sparsekv.profiles.json_schema import FILE_NAME, profile_schema, schema_text

FOLDER = resources.files("sparsekv.profiles")
FILES = sorted(entry.name for entry in FOLDER.iterdir() if entry.name.endswith(".yaml"))


def errors(document: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(profile_schema())
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(document)]


def test_the_committed_schema_is_current() -> None:
    assert (FOLDER / FILE_NAME).read_text() == schema_text(), "run `sparsekv profiles schema > profiles/profile.schema.json`"


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(profile_schema())


@pytest.mark.parametrize("name", FILES)
def test_every_shipped_file_agrees(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text.startswith(f"# yaml-language-server: $schema={FILE_NAME}\n")
    document = yaml.safe_load(text)
    if name.startswith("_"):
        document["extends"] = "something"
    assert not errors(document)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"kv": {"dtyp": "int8"}}, "kv"),
        ({"kv": {"pool": "64G"}}, "kv.pool"),
        ({"kv": {"dtype": "fp8"}}, "kv.dtype"),
        ({"hardware": {"gpus": "two"}}, "hardware.gpus"),
        ({"model": {"shape": {"kv_heads": 0}}}, "model.shape"),
        ({"extra": 1}, ""),
        ({"extends": 3}, "extends"),
    ],
)
def test_mistakes_are_found(change: dict[str, Any], place: str) -> None:
    assert place in errors({"extends": "dual3090", **change})


def test_parts_and_takebacks_are_right() -> None:
    assert not errors({"extends": ["dual3090"], "kv": {"pool": "40GiB"}, "server": {"port": None}, "recurrent": None})
    assert errors({"description": "no machine, no model"}) == [""]


def test_every_key_is_explained() -> None:
    sections = [path[0] for path, _ in schema_fields() if len(path) == 1]
    keys = [key for section in sections for key in describe(section)]
    assert [key.field for key in keys] == [".".join(path) for path, _ in schema_fields()]
    assert all(key.type and key.meaning for key in keys)
    assert [key.field for key in describe("kv")][:2] == ["kv", "kv.placement"]
    assert set(path_fields()) == {("model", "path"), ("model", "chat_template"), ("sketch", "basis"), ("server", "api_key_file")}
