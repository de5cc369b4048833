"""Working out what an application would do, in memory: which patches fit, and every file's content afterwards."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from sparsekv.profiles.errors import SparsekvError

from .hunks import HunkError, patch_file, reversed_diff
from .record import Found, Record, compare, is_overwritten, original
from .series import Patch, Series
from .tree import FileState, VllmTree


@dataclass
class PatchPlan:
    """How one patch fits: `problems` names each file and hunk that does not; `present` if the tree has the change already."""

    patch: Patch
    present: bool = False
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """The tree before any patch of ours (`base`) and with all of them (`result`), by path; None where there is no file."""

    series: Series
    base: dict[str, FileState | None]
    result: dict[str, bytes | None]
    patches: list[PatchPlan]

    @property
    def problems(self) -> list[str]:
        return [f"{plan.patch.name}: {problem}" for plan in self.patches for problem in plan.problems]


def base_files(tree: VllmTree, record: Record | None) -> dict[str, FileState | None]:
    """The recorded files as they were before the patches.

    Raises:
        SparsekvError: some were changed after the patches were applied, so that neither state can be told from the other.
    """
    if record is None:
        return {}
    found = compare(tree, record)
    if is_overwritten(record, found):
        # What a reinstalled vLLM brought counts; of the patches only files that they created may have stayed behind.
        leftover = {f.path for f in record.files if f.before is None and found[f.path] is Found.PATCHED}
        return {f.path: None if f.path in leftover else tree.state(f.path) for f in record.files}
    changed = [path for path, state in found.items() if state is Found.OTHER]
    if changed:
        raise SparsekvError(
            f"{len(changed)} patched file(s) were changed after the patches were applied; nothing was changed",
            details=tuple(str(tree.root / path) for path in changed),
            hint="undo those changes, or reinstall vLLM and run this again",
        )
    return {f.path: original(tree, f) for f in record.files}


def plan_apply(tree: VllmTree, series: Series, record: Record | None) -> Plan:
    """Applies a series in memory to the tree without our patches, going on after a patch that does not fit.

    Raises:
        SparsekvError: the tree's recorded files were changed, or the series does not lead to the hashes of its manifest.
    """
    base = base_files(tree, record)
    files: dict[str, bytes | None] = {path: state.content if state else None for path, state in base.items()}
    plans = []
    for patch in series.patches:
        for diff in patch.files:
            if diff.path not in base:
                base[diff.path] = tree.state(diff.path)
                files[diff.path] = _content(base[diff.path])
        plan, changed = _plan_patch(patch, files)
        files.update(changed)
        plans.append(plan)
    return Plan(series, base, files, plans)


def _plan_patch(patch: Patch, files: dict[str, bytes | None]) -> tuple[PatchPlan, dict[str, bytes | None]]:
    plan = PatchPlan(patch)
    changed: dict[str, bytes | None] = {}
    for diff in patch.files:
        content, target = files[diff.path], patch.target(diff.path)
        known = _sha256(content) == target.before
        try:
            patched = patch_file(content, diff, known=known)
        except HunkError as error:
            plan.problems.append(f"{diff.path}: {error}")
            continue
        if known and _sha256(patched.content) != target.after:
            raise SparsekvError(f"{patch.entry.file}: {diff.path} does not come out as its manifest states; the series is damaged")
        if diff.path.endswith(".py") and patched.content is not None:
            try:
                compile(patched.content, diff.path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                plan.problems.append(f"{diff.path}: does not compile with the patch: {error}")
        changed[diff.path] = patched.content
        plan.offsets[diff.path] = patched.offsets
    if plan.problems and _is_present(patch, files):
        return PatchPlan(patch, present=True), {}
    return plan, {} if plan.problems else changed


def _is_present(patch: Patch, files: dict[str, bytes | None]) -> bool:
    """Whether the tree has the whole change already, from another series or a later vLLM: it can be taken back exactly."""
    try:
        for diff in patch.files:
            content = files[diff.path]
            patch_file(content, reversed_diff(diff), known=_sha256(content) == patch.target(diff.path).after)
    except HunkError:
        return False
    return True


def new_state(content: bytes | None, before: FileState | None) -> FileState | None:
    """A file to be written: mode as before, and a time that no cached bytecode of the old file carries."""
    if content is None:
        return None
    later = before.mtime_ns + 10**9 if before else 0
    return FileState(content, before.mode if before else 0o644, max(time.time_ns(), later))


def _content(state: FileState | None) -> bytes | None:
    return state.content if state else None


def _sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()
