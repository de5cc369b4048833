"""`sparsekv profiles`: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from sparsekv.profiles.loader import shipped_names

Run = Callable[..., Any]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(run: Run) -> Cli:
    """Exit status, stdout and stderr of `sparsekv profiles ARGUMENTS`."""
    return lambda *arguments: astuple(run("profiles", *arguments))


def test_list(cli: Cli) -> None:
    status, out, err = cli("list")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[2:]] == shipped_names()
    profiles = {row["name"]: row for row in json.loads(cli("list", "--json")[1])["profiles"]}
    assert list(profiles) == shipped_names()
    assert profiles["dual3090"]["machine"] == "2 x GeForce RTX 3090"
    assert profiles["dual3090"]["context"] == 262144
    assert profiles["dual3090"]["source"] == "computed"


def test_show_prints_the_file(cli: Cli) -> None:
    out = cli("show", "dual3090")[1]
    assert out.startswith("# yaml-language-server")
    assert "extends: _qwen3.8-27b" in out


def test_show_resolved_with_origins(cli: Cli) -> None:
    lines = cli("show", "dual3090", "--origins", "--set", "kv.pool=40GiB")[1].splitlines()
    assert any(line.startswith("  pool: 40GiB ") and line.endswith("# --set kv.pool") for line in lines)
    assert any(line.startswith("  max_model_len: 262144") and "# profiles/_qwen3.8-27b.yaml:" in line for line in lines)
    assert any(line.startswith("  port: 8000") and line.endswith("# default") for line in lines)
    shown = json.loads(cli("show", "dual3090", "--json")[1])
    assert shown["profile"]["kv"]["pool"] == "69GiB"
    assert shown["origins"]["kv.pool"].startswith("profiles/dual3090.yaml:")


def test_diff(cli: Cli) -> None:
    rows = json.loads(cli("diff", "dual3090", "cpu-demo", "--json")[1])["differences"]
    assert {"key": "kv.dtype", "left": "int8", "right": "bf16"} in rows
    assert not [row for row in rows if row["left"] == row["right"]]
    assert "kv.dtype" in cli("diff", "dual3090", "cpu-demo")[1]
    assert cli("diff", "dual3090", "dual3090") == (0, "", "no difference\n")


def test_budget(cli: Cli) -> None:
    out = cli("budget", "dual3090")[1]
    assert "recurrent states" in out
    assert "4 KV heads x 17 layers x 512 B of int8" in out
    terms = json.loads(cli("budget", "dual3090", "--json")[1])["terms"]
    assert {term["unit"] for term in terms} >= {"B", "tok/s", "s", "tokens"}


def test_validate_checks_all_and_says_all(cli: Cli, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("extends: dual3090\nkv:\n  dtyp: int4\n  pool: 69G\n")
    missing = str(tmp_path / "missing.yaml")
    assert cli("validate", "dual3090", str(broken), missing, "cpu-demo") == (
        2,
        "dual3090: valid\ncpu-demo: valid\n",
        "error: profile `broken` has 2 problems\n"
        f"  {broken}:3:3  kv.dtyp  unknown key; did you mean `dtype`?\n"
        f"  {broken}:4:3  kv.pool  unit `G` is ambiguous; write GB or GiB\n"
        "hint: `sparsekv profiles schema --field kv` lists what may stand there\n"
        f"error: cannot read profile {missing}: No such file or directory\n"
        "hint: `sparsekv profiles list` shows the shipped ones\n",
    )
    status, out, err = cli("validate", "--json", "dual3090", str(broken))
    assert (status, err) == (2, "")
    assert [(row["valid"], len(row["problems"])) for row in json.loads(out)["profiles"]] == [(True, 0), (False, 2)]


def test_copy_never_overwrites(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "dual3090.yaml"
    assert cli("copy", "dual3090", str(tmp_path))[0] == 0
    schema = Path(target.read_text().splitlines()[0].partition("$schema=")[2])
    assert schema.is_file()
    assert cli("validate", str(target))[0] == 0
    target.write_text("mine")
    status, _, err = cli("copy", "dual3090", str(target))
    assert status == 2
    assert "is already there" in err
    assert target.read_text() == "mine"
    assert "did you mean `dual3090`?" in cli("copy", "dual3091", str(tmp_path / "x.yaml"))[2]
    assert "not a shipped profile" in cli("copy", str(target), str(tmp_path / "x.yaml"))[2]
    assert "cannot write" in cli("copy", "dual3090", str(tmp_path / "no" / "folder.yaml"))[2]


def test_schema(cli: Cli) -> None:
    assert json.loads(cli("schema")[1])["title"] == "sparsekv hardware profile"
    out = cli("schema", "--field", "kv.pool")[1]
    assert "size, such as 64GiB" in out
    assert "required" in out
    [key] = json.loads(cli("schema", "--field", "sketch.bits", "--json")[1])["keys"]
    assert key == {"field": "sketch.bits", "type": "4 | 8", "default": "4", "meaning": "bits per dimension"}
    status, _, err = cli("schema", "--field", "kv.pol")
    assert status == 2
    assert "did you mean `kv.pool`?" in err


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['sparsekv', 'profiles', 'budget', 'dual3090']\n"
        "from sparsekv_cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'vllm', 'transformers', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=60)
