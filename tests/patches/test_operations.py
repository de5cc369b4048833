"""Applying to a tree and taking it back: all or nothing, exact, and by the record."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sparsekv.patches.operations import apply, revert, verify
from sparsekv.patches.record import STATE_DIR, read_record
from sparsekv.patches.series import Series
from sparsekv.patches.status import State, status
from sparsekv.patches.swap import interrupted
from sparsekv.patches.tree import VllmTree
from sparsekv.profiles.errors import ExitCode, SparsekvError

Make = Callable[..., Any]

BODY = b"".join(b"x%d = %d\n" % (i, i) for i in range(40))
ONE = BODY.replace(b"x5 = 5\n", b"x5 = 50\n")
TWO = ONE.replace(b"x30 = 30\n", b"x30 = 300\nx301 = 1\n")
A, B, NEW, GONE = "v1/core/a.py", "v1/b.py", "v1/fresh/deep/new.py", "v1/gone.txt"
FILES = {A: BODY, B: b"y = 1\n", GONE: b"bye\n", "v1/other.py": b"z = 1\n"}
PATCHES = {
    "0001-first": {A: (BODY, ONE)},
    "0002-second": {A: (ONE, TWO), B: (b"y = 1\n", b"y = 2\n")},
    "0003-third": {NEW: (None, b"fresh = True\n"), GONE: (b"bye\n", None)},
}
DONE = {A: TWO, B: b"y = 2\n", NEW: b"fresh = True\n", GONE: None}


def contents(tree: VllmTree) -> dict[str, bytes | None]:
    return {path: state.content if (state := tree.state(path)) else None for path in (A, B, NEW, GONE)}


def states(tree: VllmTree, series: Series) -> dict[str, str]:
    return {patch.name: patch.state.value for patch in status(tree, [series]).patches}


def test_apply_again_revert_again(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    (tree.root / (A + ".orig")).write_text("somebody's backup")
    before = snapshot(tree.root)
    assert states(tree, series) == dict.fromkeys(PATCHES, "clean")

    assert sorted(apply(tree, [series], dry_run=True).changed) == sorted(DONE)
    assert snapshot(tree.root) == before
    assert set(apply(tree, [series]).changed) == set(DONE)
    assert contents(tree) == DONE
    assert states(tree, series) == dict.fromkeys(PATCHES, "applied")
    assert verify(tree, [series]) == []

    after = snapshot(tree.root)
    assert apply(tree, [series]).changed == ()
    assert snapshot(tree.root) == after

    assert set(revert(tree)) == set(DONE)
    assert snapshot(tree.root) == before
    assert revert(tree) == ()
    assert verify(tree, [series]) == ["no patches are applied"]
    apply(tree, [series])
    assert contents(tree) == DONE
    leftovers = [path.name for path in tree.root.rglob("*") if path.name.endswith((".rej", ".sparsekv")) or ".orig" in path.name]
    assert leftovers == ["a.py.orig"]


def test_one_misfit_stops_all_and_every_misfit_is_named(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    tree = make_tree(FILES | {A: BODY.replace(b"x31 = 31\n", b"x31 = 31\n\n"), GONE: b"still needed\n"})
    before = snapshot(tree.root)
    series = make_series(PATCHES)
    with pytest.raises(SparsekvError) as raised:
        apply(tree, [series])
    assert raised.value.exit_code is ExitCode.ENVIRONMENT
    assert len(raised.value.details) == 2
    assert "0002-second: v1/core/a.py: hunk 1" in raised.value.details[0]
    assert "0003-third: v1/gone.txt" in raised.value.details[1]
    assert snapshot(tree.root) == before
    assert states(tree, series) == {"0001-first": "clean", "0002-second": "drifted", "0003-third": "drifted"}


def test_a_result_that_does_not_compile_is_refused(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    tree = make_tree(FILES | {B: b"def f(:\n    y = 1\n    return y\n"})
    before = snapshot(tree.root)
    with pytest.raises(SparsekvError) as raised:
        apply(tree, [make_series({"0001-x": {B: (b"y = 1\n", b"y = (\n")}})])
    assert "hunk 1" in raised.value.details[0]
    tree = make_tree({B: b"y = 1\n"})
    with pytest.raises(SparsekvError) as raised:
        apply(tree, [make_series({"0001-x": {B: (b"y = 1\n", b"y = (\n")}})])
    assert "does not compile" in raised.value.details[0]
    assert contents(tree)[B] == b"y = 1\n"
    assert before


def test_offset_on_a_tree_that_others_patched(make_tree: Make, make_series: Make) -> None:
    tree, series = make_tree(FILES | {A: b"extra = 1\n" * 9 + BODY}), make_series(PATCHES)
    rows = {patch.name: patch.detail for patch in status(tree, [series]).patches}
    assert rows["0001-first"] == f"at an offset: {A} +9"
    apply(tree, [series])
    assert contents(tree)[A] == b"extra = 1\n" * 9 + TWO
    revert(tree)
    assert contents(tree)[A] == b"extra = 1\n" * 9 + BODY


def test_a_change_that_is_there_already_is_left_alone(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    tree, series = make_tree(FILES | {A: ONE}), make_series(PATCHES)
    before = snapshot(tree.root)
    assert states(tree, series)["0001-first"] == "present"
    apply(tree, [series])
    assert contents(tree) == DONE
    assert states(tree, series) == {"0001-first": "present", "0002-second": "applied", "0003-third": "applied"}
    assert verify(tree, [series]) == []
    revert(tree)
    assert snapshot(tree.root) == before


def test_series_changed_between_releases(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    """Revert and apply go by what was really applied, not by the list of today."""
    tree, first = make_tree(FILES), make_series(PATCHES)
    before = snapshot(tree.root)
    four = ONE.replace(b"x39 = 39\n", b"x39 = 390\n")
    second = make_series(
        {
            "0001-first": PATCHES["0001-first"],
            "0003-renamed": PATCHES["0003-third"],
            "0004-new": {A: (ONE, four)},
        }
    )
    apply(tree, [first])
    assert states(tree, second) == {
        "0001-first": "applied",
        "0003-renamed": "clean",
        "0004-new": "clean",
        "0002-second": "retired",
        "0003-third": "retired",
    }
    assert len(verify(tree, [second])) == 1
    apply(tree, [second])
    assert contents(tree) == {A: four, B: b"y = 1\n", NEW: b"fresh = True\n", GONE: None}
    assert states(tree, second) == dict.fromkeys(("0001-first", "0003-renamed", "0004-new"), "applied")
    assert tree.state(B).mtime_ns == before[B][2]
    revert(tree)
    assert snapshot(tree.root) == before

    apply(tree, [first])
    revert(tree)
    assert snapshot(tree.root) == before


def test_changed_since(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    apply(tree, [series])
    (tree.root / B).write_bytes(b"y = 3\n")
    mixed = snapshot(tree.root)
    for action in (lambda: revert(tree), lambda: apply(tree, [series])):
        with pytest.raises(SparsekvError, match="changed after") as raised:
            action()
        assert raised.value.details == (str(tree.root / B),)
    assert snapshot(tree.root) == mixed
    assert states(tree, series) == {"0001-first": "applied", "0002-second": "drifted", "0003-third": "applied"}
    assert verify(tree, [series]) == [f"{B} was changed after the patches were applied"]


@pytest.mark.parametrize("version", ["0.31.0", "0.31.1", "0.32.0"])
def test_reinstalled_underneath(make_tree: Make, make_series: Make, snapshot: Make, version: str) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    apply(tree, [series])
    # An installer writes its own files; what the patches created stays, and so does the record.
    fresh = FILES | ({A: b"# another version\n" + BODY} if version != "0.31.0" else {})
    for path, content in fresh.items():
        (tree.root / path).write_bytes(content)
    (tree.root / "_version.py").write_text(f"__version__ = version = {version!r}\n")
    tree = VllmTree(tree.root)
    report = status(tree, [series])
    expected = State.NOT_APPLICABLE if version == "0.32.0" else State.CLEAN
    assert {patch.state for patch in report.patches} == {expected}
    assert any("was reinstalled" in note for note in report.notes)
    assert any("no patches are applied" in problem for problem in verify(tree, [series]))
    revert(tree)
    assert contents(tree) == {path: fresh.get(path) for path in (A, B, NEW, GONE)}
    assert not (tree.root / STATE_DIR).exists()
    if version != "0.32.0":
        apply(tree, [series])
        assert contents(tree)[NEW] == b"fresh = True\n"


def test_partly_restored(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    before = snapshot(tree.root)
    apply(tree, [series])
    (tree.root / B).write_bytes(FILES[B])
    assert states(tree, series)["0002-second"] == "drifted"
    assert apply(tree, [series]).changed == (B,)
    (tree.root / B).write_bytes(FILES[B])
    os.utime(tree.root / B, ns=(before[B][2], before[B][2]))
    revert(tree)
    assert snapshot(tree.root) == before


def test_hard_links_keep_their_content(make_tree: Make, make_series: Make, tmp_path: Path) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    for number, path in enumerate((A, B, GONE)):
        os.link(tree.root / path, tmp_path / str(number))
    apply(tree, [series])
    assert [(tmp_path / str(n)).read_bytes() for n in range(3)] == [BODY, b"y = 1\n", b"bye\n"]
    revert(tree)
    assert [(tmp_path / str(n)).stat().st_nlink for n in range(3)] == [1, 1, 1]


def test_links_to_a_cache(make_tree: Make, make_series: Make, tmp_path: Path, snapshot: Make) -> None:
    """Some installers link each file to their cache: the cache stays, and revert makes the links again."""
    tree, series = make_tree(FILES), make_series(PATCHES)
    cached = tmp_path / "cache"
    (cached / "v1/core").mkdir(parents=True)
    for path, target in ((A, cached / A), (B, Path("../../../b-cached"))):
        shutil.move(tree.root / path, (tree.root / path).parent / target)
        (tree.root / path).symlink_to(target)
    before = snapshot(tree.root)
    apply(tree, [series])
    assert contents(tree) == DONE
    assert not (tree.root / A).is_symlink()
    assert (cached / A).read_bytes() == BODY
    revert(tree)
    assert snapshot(tree.root) == before


def test_a_folder_that_leads_out_of_the_tree(make_tree: Make, make_series: Make, tmp_path: Path) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    shutil.move(tree.root / "v1/core", tmp_path / "elsewhere")
    (tree.root / "v1/core").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SparsekvError, match="link out of"):
        apply(tree, [series])
    assert (tmp_path / "elsewhere/a.py").read_bytes() == BODY


def test_stale_bytecode_is_removed(make_tree: Make, make_series: Make) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    for path in (A, B, "v1/other.py"):
        py_compile.compile(str(tree.root / path), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    apply(tree, [series])
    left = sorted(path.name.split(".")[0] for path in tree.root.rglob("*.pyc"))
    assert left == ["other"]
    run = [sys.executable, "-c", "import v1.b, v1.core.a; print(v1.b.y, v1.core.a.x30)"]
    assert subprocess.run(run, cwd=tree.root, capture_output=True, text=True).stdout == "2 300\n"
    revert(tree)
    assert subprocess.run(run, cwd=tree.root, capture_output=True, text=True).stdout == "1 30\n"


def test_read_only_tree(make_tree: Make, make_series: Make, snapshot: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    before = snapshot(tree.root)

    def refuse(path: Path, *args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(SparsekvError, match="Read-only file system; nothing was changed") as raised:
            apply(tree, [series])
    assert raised.value.exit_code is ExitCode.ENVIRONMENT
    assert snapshot(tree.root) == before
    assert states(tree, series) == dict.fromkeys(PATCHES, "clean")


def test_folder_of_another_user(make_tree: Make, make_series: Make, snapshot: Make) -> None:
    """A target's folder cannot be written although the package's own can: the run ends with the tree as it was."""
    series = make_series(PATCHES)
    with tempfile.TemporaryDirectory() as shared:
        tree = VllmTree(Path(shutil.copytree(make_tree(FILES).root, Path(shared, "vllm"))).resolve())
        before = snapshot(tree.root)
        Path(shared).chmod(0o755)
        (tree.root / "v1/core").chmod(0o555)
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                if os.getuid() == 0:
                    for path in (tree.root, tree.root / "v1"):
                        os.chown(path, 65534, -1)
                    os.setuid(65534)
                apply(tree, [series])
            except SparsekvError as error:
                code = 3 if "cannot write: Permission denied; nothing was changed" in error.message else 8
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        (tree.root / "v1/core").chmod(0o755)
        assert snapshot(tree.root) == before
        assert not interrupted(tree)


def test_damaged_record(make_tree: Make, make_series: Make) -> None:
    tree, series = make_tree(FILES), make_series(PATCHES)
    apply(tree, [series])
    saved = tree.root / STATE_DIR / "current/originals" / A
    saved.write_bytes(b"")
    with pytest.raises(SparsekvError, match="saved original was changed"):
        revert(tree)
    (tree.root / STATE_DIR / "current/record.json").write_text('{"schema_version": 2}')
    with pytest.raises(SparsekvError, match="record of applied patches is damaged"):
        read_record(tree)


def test_one_run_at_a_time(make_tree: Make, make_series: Make) -> None:
    import fcntl

    tree, series = make_tree(FILES), make_series(PATCHES)
    descriptor = os.open(tree.root, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(SparsekvError, match="another `sparsekv patch`"):
        apply(tree, [series])
    os.close(descriptor)
    apply(tree, [series])


STATEMENT = st.sampled_from([b"a = 1\n", b"b = 2\n", b"\n", b"# c\n", b"c = 3\r\n", b"    \n"])
SOURCE = st.lists(STATEMENT, max_size=25).map(b"".join)
TREE = st.dictionaries(st.sampled_from(["v1/a.py", "v1/b.py", "v1/d/c.py", "d.py"]), st.none() | SOURCE.filter(bool), min_size=1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(trees=st.lists(TREE, min_size=2, max_size=4), names=st.permutations(["v1/a.py", "v1/b.py", "v1/d/c.py", "d.py"]))
def test_apply_then_revert_is_the_identity(
    make_tree: Make, make_series: Make, snapshot: Make, trees: list[dict[str, bytes | None]], names: list[str]
) -> None:
    steps: list[dict[str, bytes | None]] = [dict(trees[0])]
    patches = {}
    for number, wanted in enumerate(trees[1:], 1):
        previous = steps[-1]
        changes = {path: (previous.get(path), wanted.get(path)) for path in names if previous.get(path) != wanted.get(path)}
        if changes:
            patches[f"{number:04}-step"] = changes
            steps.append(previous | dict(wanted) | {path: after for path, (_, after) in changes.items()})
    assume(patches)
    tree = make_tree(trees[0])
    before = snapshot(tree.root)
    series = make_series(patches)
    apply(tree, [series])
    last = steps[-1]
    assert {path: state and state.content for path in names if (state := tree.state(path)) or True} == {p: last.get(p) for p in names}
    assert interrupted(tree) is False
    revert(tree)
    assert snapshot(tree.root) == before
