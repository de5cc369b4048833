"""Small vLLM trees and patch series made on the spot."""

from __future__ import annotations

import difflib
import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from sparsekv.patches.hunks import split_lines
from sparsekv.patches.series import Series, load_series
from sparsekv.patches.tree import VllmTree

Files = Mapping[str, bytes | None]


def _unified(path: str, before: bytes | None, after: bytes | None) -> bytes:
    """The diff between two contents as `diff -u` writes it."""
    sides = [split_lines(content or b"") for content in (before, after)]
    marked = [[line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in side] for side in sides]
    names = [b"/dev/null" if content is None else f"{p}/{path}".encode() for p, content in (("a", before), ("b", after))]
    return b"".join(difflib.diff_bytes(difflib.unified_diff, *marked, *names, lineterm=b"\n"))


@pytest.fixture(scope="session")
def unified() -> Callable[[str, bytes | None, bytes | None], bytes]:
    return _unified


@pytest.fixture(scope="session")
def snapshot() -> Callable[[Path], dict[str, tuple[object, ...]]]:
    return _snapshot


@pytest.fixture(scope="session")
def make_tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VllmTree]:
    """A vLLM package folder in a fresh directory, below `base` if given, with the given files."""

    def make(files: Files, *, version: str | None = "0.31.0", base: Path | None = None) -> VllmTree:
        folder = tmp_path_factory.mktemp("env") if base is None else Path(tempfile.mkdtemp(dir=base))
        root = folder / "site-packages" / "vllm"
        (root / "v1").mkdir(parents=True)
        (root / "__init__.py").write_text("")
        if version is not None:
            (root / "_version.py").write_text(f"__version__ = version = {version!r}\n")
        for path, content in files.items():
            if content is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content)
        return VllmTree(root.resolve())

    return make


@pytest.fixture(scope="session")
def make_series(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Series]:
    """A series from each patch's files before and after; the function's `files` gives its folder's content."""

    def files(patches: Mapping[str, Mapping[str, tuple[bytes | None, bytes | None]]], vllm: str = "==0.31.*") -> dict[str, bytes]:
        found, entries = {}, []
        for file, changes in patches.items():
            sha256 = [[None if side is None else hashlib.sha256(side).hexdigest() for side in sides] for sides in changes.values()]
            found[f"{file}.patch"] = b"What for.\n\n" + b"".join(_unified(p, *sides) for p, sides in changes.items())
            targets = [{"path": p, "before": b, "after": a} for p, (b, a) in zip(changes, sha256, strict=True)]
            reasons = dict.fromkeys(("title", "why", "upstream", "retires_when", "without_it"), "a test")
            entries.append({"file": f"{file}.patch", **reasons, "targets": targets})
        manifest = {"vllm": vllm, "cut_from": "0.31.0", "patches": entries}
        return found | {"manifest.yaml": yaml.safe_dump(manifest, sort_keys=False).encode()}

    def make(patches: Mapping[str, Mapping[str, tuple[bytes | None, bytes | None]]], *, vllm: str = "==0.31.*") -> Series:
        folder = tmp_path_factory.mktemp("series") / "vllm-test"
        folder.mkdir()
        for name, text in files(patches, vllm).items():
            (folder / name).write_bytes(text)
        return load_series(folder)

    make.files = files  # type: ignore[attr-defined]
    return make


def _snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Every file of a tree: content, mode, time of change, and of a link its text instead. Bytecode does not count."""
    found = {}
    for path in sorted(root.rglob("*")):
        if "__pycache__" not in path.parts:
            info = path.lstat()
            link = str(path.readlink()) if path.is_symlink() else None
            content = path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(root))] = (
                content,
                info.st_mode,
                info.st_mtime_ns if content is not None and not link else None,
                link,
            )
    return found


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk matters in a power cut, not here."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
