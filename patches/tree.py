"""An installed vLLM: its folder, its version and the state of its files, found without importing it."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import importlib.util
import os
import stat
import sys
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sparsekv.profiles.errors import ExitCode, SparsekvError


@dataclass(frozen=True)
class FileState:
    """A file as it lies there: content, mode bits, time of change in ns, and its text if it is a symbolic link."""

    content: bytes
    mode: int
    mtime_ns: int
    link: str | None = None

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True)
class VllmTree:
    """The package folder of one vLLM."""

    root: Path

    @cached_property
    def version(self) -> Version | None:
        """The version that the files state, else that of the installer's metadata beside them, else None."""
        for read in (_version_in_file, _version_in_metadata):
            try:
                text = read(self)
                if text is not None:
                    return Version(text)
            except (OSError, SyntaxError, ValueError, InvalidVersion):
                continue
        return None

    @cached_property
    def dist_info(self) -> Path | None:
        """The installer's folder for this package, if it owns it."""
        for folder in sorted(self.root.parent.glob("vllm*.dist-info")):
            record = folder / "RECORD"
            if record.is_file() and f"{self.root.name}/__init__.py," in record.read_text("utf-8", "replace"):
                return folder
        return None

    def state(self, path: str) -> FileState | None:
        """A file of the tree; None if it does not exist.

        Raises:
            SparsekvError: the path leads out of the tree, or is not a file.
        """
        full = self.root / path
        if not full.parent.resolve().is_relative_to(self.root):
            raise SparsekvError(f"{full.parent} is a link out of {self.root}", exit_code=ExitCode.ENVIRONMENT)
        try:
            info = full.lstat()
            link = os.readlink(full) if stat.S_ISLNK(info.st_mode) else None
            if link is not None:
                info = full.stat()
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise SparsekvError(f"{full}: a folder on the way is a file", exit_code=ExitCode.ENVIRONMENT) from None
        if not stat.S_ISREG(info.st_mode):
            raise SparsekvError(f"{full} is not a file", exit_code=ExitCode.ENVIRONMENT)
        try:
            content = full.read_bytes()
        except OSError as error:
            raise SparsekvError(f"{full}: {error.strerror}", exit_code=ExitCode.ENVIRONMENT) from None
        return FileState(content, stat.S_IMODE(info.st_mode), info.st_mtime_ns, link)

    def differing_from_wheel(self) -> list[str] | None:
        """Source files that are not what the installer put there; None where it kept no list."""
        if self.dist_info is None:
            return None
        differing = []
        with (self.dist_info / "RECORD").open(newline="", encoding="utf-8") as lines:
            for row in csv.reader(lines):
                name, digest = (*row, "", "")[:2]
                if not name.startswith(f"{self.root.name}/") or not name.endswith(".py") or not digest.startswith("sha256="):
                    continue
                path = name.removeprefix(f"{self.root.name}/")
                try:
                    content = (self.root / path).read_bytes()
                except OSError:
                    differing.append(path)
                    continue
                if base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode() != digest.removeprefix("sha256="):
                    differing.append(path)
        return sorted(differing)


def find_tree(target: Path | None = None) -> VllmTree:
    """The vLLM to work on.

    Args:
        target: its package folder or the folder that holds it; by default the one that this Python would import.

    Raises:
        SparsekvError: there is none, or Python's path holds several and `target` does not choose.
    """
    if target is not None:
        for folder in (target, target / "vllm"):
            if _is_vllm(folder):
                return VllmTree(folder.resolve())
        raise SparsekvError(f"{target} is not a vLLM package folder: it has no `__init__.py` beside a `v1` folder")
    trees = installed_trees()
    if not trees:
        raise SparsekvError(
            "vLLM is not installed for this Python",
            hint="install it, or name its folder with `--target DIR`",
            exit_code=ExitCode.ENVIRONMENT,
        )
    if len(trees) > 1:
        raise SparsekvError(
            f"{len(trees)} vLLMs are on Python's path",
            details=tuple(f"{tree.root}  (version {tree.version or 'unknown'})" for tree in trees),
            hint="choose one with `--target DIR`",
        )
    return trees[0]


def installed_trees() -> list[VllmTree]:
    """Every vLLM on Python's path, the one that is imported first. The working directory does not count by itself."""
    cwd = Path.cwd().resolve()
    asked_for = {Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    found: dict[Path, VllmTree] = {}
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        if folder == cwd and folder not in asked_for and folder.name not in ("site-packages", "dist-packages"):
            continue
        if _is_vllm(folder / "vllm"):
            root = (folder / "vllm").resolve()
            found.setdefault(root, VllmTree(root))
    if not found:  # an editable install has its own finder
        spec = importlib.util.find_spec("vllm")
        if spec is not None and spec.origin is not None and _is_vllm(Path(spec.origin).parent):
            root = Path(spec.origin).parent.resolve()
            if root.parent != cwd or root.parent in asked_for:
                found[root] = VllmTree(root)
    return list(found.values())


def _is_vllm(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() and (folder / "v1").is_dir()


def _version_in_file(tree: VllmTree) -> str | None:
    module = ast.parse((tree.root / "_version.py").read_bytes())
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__version__" for t in node.targets):
            return str(ast.literal_eval(node.value))
    return None


def _version_in_metadata(tree: VllmTree) -> str | None:
    if tree.dist_info is None:
        return None
    with (tree.dist_info / "METADATA").open(encoding="utf-8") as file:
        return HeaderParser().parse(file, headersonly=True)["Version"]
