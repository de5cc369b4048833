"""A process killed at any step of a run leaves the old tree or the new one, and status says which."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsekv.patches.operations import apply, revert
from sparsekv.patches.record import read_record
from sparsekv.patches.series import Series
from sparsekv.patches.status import status
from sparsekv.patches.swap import interrupted
from sparsekv.patches.tree import VllmTree
from sparsekv.profiles.errors import SparsekvError

Make = Callable[..., Any]

BODY = b"".join(b"x%d = %d\n" % (i, i) for i in range(40))
A, B, NEW, GONE = "v1/core/a.py", "v1/b.py", "v1/fresh/deep/new.py", "v1/gone.txt"
FILES = {A: BODY, B: b"y = 1\n", GONE: b"bye\n"}
DONE = {A: BODY + b"tail = 1\n", B: b"y = 2\n", NEW: b"fresh = True\n", GONE: None}
OLD = {path: FILES.get(path) for path in DONE}
MUTATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.chmod", "os.utime", "shutil.rmtree", "os.chown"}


def kill_at(step: int, action: Callable[[], object]) -> bool:
    """Runs `action` in a child that kills itself right before its `step`-th change of the file system; whether it got to the end."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if event in MUTATIONS or writes:
                seen += 1
                if seen == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(hook)
            action()
            code = 0
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended == 0


def read(tree: VllmTree) -> dict[str, bytes | None]:
    """What a reader of the tree sees, through whatever links there are."""
    found: dict[str, bytes | None] = {}
    for path in DONE:
        try:
            found[path] = (tree.root / path).read_bytes()
        except FileNotFoundError:
            found[path] = None
    return found


@pytest.fixture
def memory() -> Iterator[Path]:
    """Hundreds of trees are made and deleted here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def series(make_series: Make) -> Series:
    return make_series(
        {
            "0001-first": {A: (BODY, DONE[A]), NEW: (None, DONE[NEW])},
            "0002-second": {B: (FILES[B], DONE[B]), GONE: (FILES[GONE], None)},
        }
    )


def test_apply(make_tree: Make, memory: Path, series: Series, snapshot: Make) -> None:
    outcomes = []
    for step in range(1, 400):
        tree = make_tree(FILES, base=memory)
        before = snapshot(tree.root)
        ended = kill_at(step, lambda tree=tree: apply(tree, [series]))
        seen = read(tree)
        assert seen in (OLD, DONE), step
        assert (read_record(tree) is not None) == (seen == DONE), step
        rows = {patch.state.value for patch in status(tree, [series]).patches}
        assert rows == {"applied" if seen == DONE else "clean"}, step
        outcomes.append(seen == DONE)
        if step % 2:
            apply(tree, [series])
            assert read(tree) == DONE, step
            assert not interrupted(tree), step
            assert not [path for path in tree.root.rglob("*") if path.is_symlink() and path.name != "current"], step
        revert(tree)
        assert snapshot(tree.root) == before, step
        if ended:
            break
    assert outcomes == sorted(outcomes)  # one point where the old tree becomes the new one
    assert outcomes.count(False) > 20
    assert outcomes.count(True) > 10


def test_revert(make_tree: Make, memory: Path, series: Series, snapshot: Make) -> None:
    outcomes = []
    for step in range(1, 400):
        tree = make_tree(FILES, base=memory)
        before = snapshot(tree.root)
        apply(tree, [series])
        ended = kill_at(step, lambda tree=tree: revert(tree))
        seen = read(tree)
        assert seen in (OLD, DONE), step
        assert (read_record(tree) is not None) == (seen == DONE), step
        rows = {patch.state.value for patch in status(tree, [series]).patches}
        assert rows == {"applied" if seen == DONE else "clean"}, step
        if seen == OLD and not ended:
            assert interrupted(tree)
            assert any("interrupted; the tree reads as not patched" in note for note in status(tree, [series]).notes)
        outcomes.append(seen == OLD)
        revert(tree)
        assert snapshot(tree.root) == before, step
        if ended:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) > 10


def test_killed_again_while_tidying_up(make_tree: Make, memory: Path, series: Series, snapshot: Make) -> None:
    for first in range(5, 200, 9):
        for second in range(1, 30, 4):
            tree = make_tree(FILES, base=memory)
            before = snapshot(tree.root)
            if kill_at(first, lambda tree=tree: apply(tree, [series])):
                return
            kill_at(second, lambda tree=tree: revert(tree))
            assert read(tree) in (OLD, DONE)
            revert(tree)
            assert snapshot(tree.root) == before, (first, second)


def test_tidying_up_fails(make_tree: Make, memory: Path, series: Series, snapshot: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the exchange: the tree is the new one, the error says so, and the next run ends it."""
    tree = make_tree(FILES, base=memory)
    before = snapshot(tree.root)
    with monkeypatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system", "x")

        patch.setattr("shutil.rmtree", refuse)
        with pytest.raises(SparsekvError, match="read as they should"):
            apply(tree, [series])
    assert read(tree) == DONE
    assert interrupted(tree)
    revert(tree)
    assert snapshot(tree.root) == before


def test_disk_full(make_tree: Make, memory: Path, series: Series, snapshot: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error instead of a kill: the tree is put back within the same run."""
    real = os.replace
    for step in range(1, 6):
        tree = make_tree(FILES, base=memory)
        before = snapshot(tree.root)
        calls = 0

        def replace(source: object, target: object) -> None:
            nonlocal calls
            calls += 1
            if calls == step:  # noqa: B023
                raise OSError(28, "No space left on device", str(target))
            real(source, target)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            with pytest.raises(SparsekvError, match="No space left on device; nothing was changed"):
                apply(tree, [series])
        assert snapshot(tree.root) == before, step
