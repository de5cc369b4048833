"""Exchanging files of a tree in one atomic step, together with the record of what is applied.

A tree has no operation that replaces several files at once, so they are led through one link:

1. A new generation folder gets the record, the originals and the new files; the present one gets copies of the old files.
2. Each file is replaced by a link into `current/staged/`. `current` still points to the old copies: nothing has changed.
3. `current` is replaced by a link to the new generation. This single rename is the exchange.
4. `settle` puts the real files in the place of their links, and deletes the other generation.

A process killed at any point leaves a tree that reads as the old one (before 3) or the new one (after); `settle` ends either.
No file is ever written in place, so hard links of other environments keep their content.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from sparsekv.profiles.errors import ExitCode, SparsekvError

from .record import STATE_DIR, Record, read_record
from .tree import FileState, VllmTree


def swap(tree: VllmTree, files: Mapping[str, FileState | None], record: Record | None, originals: Mapping[str, bytes]) -> None:
    """Puts `files` (None deletes) and the record in place of what is there, all or nothing.

    Args:
        tree: has been settled.
        files: the new state of every file that changes.
        record: what is applied from now on; None if nothing. The folders that it needs are filled in here.
        originals: the content of each recorded file before the patches.

    Raises:
        SparsekvError: the tree cannot be written; it is as before.
    """
    before = read_record(tree)
    try:
        _exchange(tree, before, files, record, originals)
    except OSError as error:
        with suppress(OSError):
            _settle(tree)
        raise SparsekvError(
            f"{error.filename or tree.root}: cannot write: {error.strerror}; nothing was changed",
            hint=f"run it as the owner of {tree.root}, or on a copy of the environment that can be written",
            exit_code=ExitCode.ENVIRONMENT,
        ) from None
    settle(tree)


def _exchange(
    tree: VllmTree,
    before: Record | None,
    files: Mapping[str, FileState | None],
    record: Record | None,
    originals: Mapping[str, bytes],
) -> None:
    state = tree.root / STATE_DIR
    current = state / "current"
    now = {path: tree.state(path) for path in files}
    missing = {parent.as_posix() for path in files for parent in PurePosixPath(path).parents if not (tree.root / parent).exists()}
    made = tuple(sorted(missing.union(before.made_folders if before else ())))
    owner = tree.root.stat()

    state.mkdir(exist_ok=True)
    number = int(os.readlink(current)) if current.is_symlink() else 0
    old, new = state / str(number), state / str(number + 1)
    for folder, content in ((old, now), (new, files)):
        (folder / "staged").mkdir(parents=True)
        for path, file in content.items():
            if file is not None:
                _write(folder / "staged" / path, file)
        links = {path: file.link if file else None for path, file in content.items()}
        (folder / "swap.json").write_text(json.dumps({"links": links, "made": made}))
    for path, data in originals.items():
        _write(new / "originals" / path, FileState(data, 0o644, 0))
    if record is not None:
        (new / "record.json").write_text(record.model_copy(update={"made_folders": made}).model_dump_json(indent=1) + "\n")
    if os.geteuid() == 0:  # root works in a user's environment: leave nothing there that the user cannot remove
        for walked, folders, names in os.walk(state):
            for name in (".", *folders, *names):
                os.lchown(os.path.join(walked, name), owner.st_uid, owner.st_gid)
    if not current.is_symlink():
        _link(current, old.name)
    _sync(state)

    for parent in sorted(missing):
        (tree.root / parent).mkdir()
    for path in files:
        full = tree.root / path
        _link(full, os.path.relpath(current / "staged" / path, full.parent))
        _remove_bytecode(full)
    _link(current, new.name)
    _sync(state)


def interrupted(tree: VllmTree) -> bool:
    """Whether a swap was cut short. The tree reads as what its record says all the same; `settle` tidies it up."""
    state = tree.root / STATE_DIR
    if not state.is_dir():
        return False
    current = state / "current"
    if not current.is_symlink() or not (current / "record.json").is_file():
        return True
    return (current / "swap.json").exists() or any(item.name not in ("current", os.readlink(current)) for item in state.iterdir())


def settle(tree: VllmTree) -> None:
    """Ends a swap, whole or cut short, on the side where `current` points; does nothing if there is none.

    Raises:
        SparsekvError: the tree cannot be written; it reads as its record says, through links that are still there.
    """
    try:
        _settle(tree)
    except OSError as error:
        raise SparsekvError(
            f"{error.filename or tree.root}: cannot write: {error.strerror}; the files read as they should, but a run is not tidied up",
            hint=f"run `sparsekv patch apply` or `revert` again as the owner of {tree.root}",
            exit_code=ExitCode.ENVIRONMENT,
        ) from None


def _settle(tree: VllmTree) -> None:
    state = tree.root / STATE_DIR
    if not state.is_dir():
        return
    current = state / "current"
    plan_file = current / "swap.json"
    if plan_file.is_file():
        plan = json.loads(plan_file.read_text())
        for path, link in plan["links"].items():
            full, staged = tree.root / path, current / "staged" / path
            if full.is_symlink() and f"{STATE_DIR}/current/staged/" in os.readlink(full):
                if not staged.exists():
                    full.unlink()
                elif link is not None:
                    _link(full, link)
                else:
                    os.replace(staged, full)
            _beside(full).unlink(missing_ok=True)
            _remove_bytecode(full)
        for folder in reversed(plan["made"]):
            for empty in (tree.root / folder / "__pycache__", tree.root / folder):
                with suppress(OSError):
                    empty.rmdir()
    keep = os.readlink(current) if (current / "record.json").is_file() else None
    for item in state.iterdir():
        if item.name != keep and item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
    if keep is None:
        shutil.rmtree(state)
        return
    shutil.rmtree(current / "staged", ignore_errors=True)
    plan_file.unlink(missing_ok=True)
    for item in state.iterdir():
        if item.name not in ("current", keep):
            item.unlink()


def _write(path: Path, file: FileState) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.write(file.content)
        out.flush()
        os.fsync(out.fileno())
    path.chmod(file.mode)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))


def _link(path: Path, text: str) -> None:
    """Makes `path` a link, whatever it was."""
    beside = _beside(path)
    beside.unlink(missing_ok=True)
    beside.symlink_to(text)
    os.replace(beside, path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.sparsekv")


def _remove_bytecode(path: Path) -> None:
    if path.suffix == ".py":
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
