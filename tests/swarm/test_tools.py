from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsekv.bench.swarm.repository import Repository
from sparsekv.bench.swarm.tools import MAX_LINES, MAX_LISTED, MAX_MATCHES, SCHEMAS, Tools


@pytest.fixture
def tools() -> Tools:
    files = {"a/one.py": ["def one():", "    return two()"], "a/b/two.py": ["def two():", "    return 2"], "c.py": ["x"] * 1000}
    return Tools(Repository(Path("/code"), files, {"big.bin": "binary"}))


def run(tools: Tools, name: str, **arguments: Any) -> str:
    return tools.run(name, json.dumps(arguments))


def test_the_three_tools(tools: Tools) -> None:
    assert run(tools, "list_files", folder="a/") == "a/one.py (2 lines)\na/b/two.py (2 lines)"
    assert run(tools, "list_files").count("\n") == 2
    assert run(tools, "read_file", path="a/one.py", first_line=2) == "a/one.py, lines 2-2:\n    return two()"
    assert run(tools, "search", text="two()") == "a/one.py:2: return two()\na/b/two.py:1: def two():"
    assert run(tools, "search", text="two()", folder="a/b") == "a/b/two.py:1: def two():"


def test_long_results_are_cut(tools: Tools) -> None:
    assert run(tools, "read_file", path="c.py").count("\n") == MAX_LINES
    assert run(tools, "search", text="x").count("\n") == MAX_MATCHES
    many = Tools(Repository(Path("/code"), {f"{i:04}": ["x"] for i in range(999)}))
    assert many.list_files().endswith(f"… and {999 - MAX_LISTED} more: name a folder")


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("rm", "{}", "there is no tool"),
        ("read_file", "{nonsense", "not a JSON object"),
        ("read_file", "[1]", "not a JSON object"),
        ("read_file", "{}", "read_file takes path"),
        ("read_file", '{"path": "a/one.py", "mode": "w"}', "read_file takes path"),
        ("read_file", '{"path": 7}', "no file"),
        ("read_file", '{"path": "big.bin"}', "binary"),
        ("read_file", '{"path": "c.py", "first_line": "3"}', "whole numbers"),
        ("read_file", '{"path": "c.py", "first_line": 2000}', "has 1000 lines"),
        ("search", '{"text": " "}', "must not be empty"),
        ("search", '{"text": "x", "folder": []}', "must not be empty"),
        ("list_files", '{"folder": {}}', "folder is a text"),
        ("list_files", '{"folder": "zzz"}', "no folder"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(tools: Tools, name: str, arguments: str, says: str) -> None:
    answer = tools.run(name, arguments)
    assert answer.startswith("error:")
    assert says in answer


def test_every_schema_is_a_tool(tools: Tools) -> None:
    for schema in SCHEMAS:
        function = schema["function"]
        assert tools.knows(function["name"], "{}")
        assert set(function["parameters"]["required"]) <= function["parameters"]["properties"].keys()
