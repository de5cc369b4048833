"""Apply, revert and verify: the three things that are done to a tree."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

from sparsekv.profiles.errors import ExitCode, SparsekvError

from .foreign import foreign_series
from .plan import Plan, base_files, new_state, plan_apply
from .record import Found, Record, RecordedFile, RecordedPatch, Saved, compare, is_overwritten, read_record
from .series import Series, series_for
from .swap import interrupted, settle, swap
from .tree import FileState, VllmTree


@dataclass(frozen=True)
class Outcome:
    """What `apply` found and did; `changed` lists the files that it wrote, or would write."""

    plan: Plan
    changed: tuple[str, ...]


def apply(tree: VllmTree, among: Iterable[Series], *, dry_run: bool = False) -> Outcome:
    """Brings a tree to its series: all patches or none. An older application of ours is replaced in the same step.

    Args:
        tree: the vLLM.
        among: the series to choose from by the tree's version.
        dry_run: work everything out, write nothing.

    Raises:
        SparsekvError: no series covers the version, a patch does not fit, or the tree cannot be read or written.
    """
    with _locked(tree):
        if not dry_run:
            settle(tree)
        record = read_record(tree)
        series = select_series(tree, record, among)
        plan = plan_apply(tree, series, record)
        if plan.problems:
            others = [f"{name} ({', '.join(patches)})" for name, patches in foreign_series(tree).items()]
            raise SparsekvError(
                f"{series.name} does not fit {tree.root}; nothing was changed",
                details=tuple(plan.problems) + tuple(f"also patched by {other}" for other in others),
                hint="the plug-in works without patches; for a clean start reinstall vLLM and run this again",
                exit_code=ExitCode.ENVIRONMENT,
            )
        patched = [path for path, content in plan.result.items() if content != _content(plan.base[path])]
        files: dict[str, FileState | None] = {}
        for path, content in plan.result.items():
            now = tree.state(path)
            if content != _content(now):
                files[path] = new_state(content, now) if path in patched else plan.base[path]
        new = _record(tree, plan, patched)
        unchanged = not files and (record and record.patches, record and record.files) == (new and new.patches, new and new.files)
        if not dry_run and not unchanged:
            swap(tree, files, new, {path: state.content for path in patched if (state := plan.base[path]) is not None})
        return Outcome(plan, tuple(files))


def revert(tree: VllmTree) -> tuple[str, ...]:
    """Restores every byte that the record says was changed, and forgets the record.

    Returns:
        the files restored; empty if nothing was applied.

    Raises:
        SparsekvError: a patched file was changed since, or the tree cannot be written.
    """
    with _locked(tree):
        settle(tree)
        record = read_record(tree)
        if record is None:
            return ()
        base = base_files(tree, record)
        files = {path: state for path, state in base.items() if _content(state) != _content(tree.state(path))}
        swap(tree, files, None, {})
        return tuple(files)


def verify(tree: VllmTree, among: Iterable[Series]) -> list[str]:
    """What is wrong with the patches of a tree; empty if the whole current series is applied and untouched."""
    record = read_record(tree)
    problems = []
    if interrupted(tree):
        problems.append(f"a run was interrupted; the tree reads as {'patched' if record else 'not patched'}")
    if record is None:
        return [*problems, "no patches are applied"]
    found = compare(tree, record)
    if is_overwritten(record, found):
        return [*problems, "no patches are applied: vLLM was reinstalled since"]
    problems += [f"{path} was changed after the patches were applied" for path, state in found.items() if state is not Found.PATCHED]
    series = select_series(tree, record, among)
    plan = plan_apply(tree, series, record) if Found.OTHER not in found.values() else None
    expected = tuple(RecordedPatch(name=p.patch.name, sha256=p.patch.sha256) for p in plan.patches if not p.present) if plan else None
    if expected is not None and record.patches != expected:
        problems.append(f"what is applied ({record.series}, by sparsekv {record.sparsekv}) is not this version's series")
    return problems


def select_series(tree: VllmTree, record: Record | None, among: Iterable[Series]) -> Series:
    """The series for a tree: by its version, or by its files' hashes where it does not state one.

    Raises:
        SparsekvError: there is none.
    """
    among = tuple(among)
    if tree.version is not None:
        return series_for(tree.version, among)
    for series in among:
        known = [{t.before, t.after} for patch in series.patches for t in patch.entry.targets]
        now = [(s := tree.state(t.path)) and s.sha256 for patch in series.patches for t in patch.entry.targets]
        if all(sha256 in hashes for sha256, hashes in zip(now, known, strict=True)) or (record and record.series == series.name):
            return series
    raise SparsekvError(
        f"{tree.root} does not state its version, and its files are of no vLLM that there are patches for",
        details=tuple(f"{series.name}: vLLM {series.vllm}" for series in among),
        exit_code=ExitCode.ENVIRONMENT,
    )


def _record(tree: VllmTree, plan: Plan, patched: list[str]) -> Record | None:
    if not patched:
        return None
    files = []
    for path in patched:
        after = new_state(plan.result[path], None)
        files.append(RecordedFile(path=path, before=Saved.of(plan.base[path]), after=after.sha256 if after else None))
    return Record(
        series=plan.series.name,
        sparsekv=metadata.version("sparsekv"),
        vllm=str(tree.version) if tree.version else None,
        applied_at=datetime.now(UTC).isoformat(timespec="seconds"),
        patches=tuple(RecordedPatch(name=p.patch.name, sha256=p.patch.sha256) for p in plan.patches if not p.present),
        files=tuple(files),
    )


def _content(state: FileState | None) -> bytes | None:
    return state.content if state else None


@contextmanager
def _locked(tree: VllmTree) -> Iterator[None]:
    """One run at a time per tree; the lock lies on the folder itself, so that it also works where nothing can be written."""
    descriptor = os.open(tree.root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SparsekvError(f"another `sparsekv patch` is at work on {tree.root}", hint="wait until it has ended") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)
