"""How a tree stands to the patches, without changing it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from sparsekv.profiles.errors import SparsekvError

from .foreign import foreign_series
from .operations import select_series
from .plan import plan_apply
from .record import Found, compare, is_overwritten, read_record
from .series import Series
from .swap import interrupted
from .tree import VllmTree, installed_trees


class State(enum.StrEnum):
    """One patch in one tree."""

    APPLIED = "applied"
    CLEAN = "clean"
    """Not applied; it would apply."""
    PRESENT = "present"
    """The tree has the change from elsewhere."""
    OUTDATED = "outdated"
    """Applied in another version of the patch."""
    RETIRED = "retired"
    """Applied, and no longer part of the series."""
    DRIFTED = "drifted"
    """It does not fit, or its file was changed after it was applied."""
    NOT_APPLICABLE = "n/a"
    """No series covers this vLLM."""


@dataclass(frozen=True)
class PatchStatus:
    name: str
    state: State
    title: str
    without_it: str
    detail: str = ""

    @property
    def in_effect(self) -> bool:
        return self.state in (State.APPLIED, State.PRESENT, State.OUTDATED)


@dataclass(frozen=True)
class Status:
    """A tree's patches in the series' order, and what else there is to know of it."""

    tree: VllmTree
    series: str | None
    applied_at: str | None
    patches: tuple[PatchStatus, ...]
    notes: tuple[str, ...]
    foreign: dict[str, list[str]]

    def to_json(self) -> dict[str, object]:
        return {
            "schema_version": 1,
            "vllm": str(self.tree.version) if self.tree.version else None,
            "root": str(self.tree.root),
            "series": self.series,
            "applied_at": self.applied_at,
            "patches": [{"name": p.name, "state": p.state.value, "title": p.title, "detail": p.detail} for p in self.patches],
            "notes": list(self.notes),
            "foreign": self.foreign,
        }


def status(tree: VllmTree, among: Iterable[Series]) -> Status:
    """Compares tree, record and series. Never fails for what it finds in the tree, short of an unreadable record."""
    among = tuple(among)
    record = read_record(tree)
    installed = installed_trees()
    notes = [f"another vLLM is on Python's path: {other.root} ({other.version})" for other in installed if other.root != tree.root]
    if tree not in installed:
        notes = []
    if interrupted(tree):
        now = "patched" if record else "not patched"
        notes.append(f"a run was interrupted; the tree reads as {now}; `sparsekv patch apply` or `revert` tidies it up")
    found = compare(tree, record) if record else {}
    live = record
    if record and is_overwritten(record, found):
        notes.append(f"vLLM was reinstalled after {record.series} was applied on {record.applied_at}: nothing is applied")
        live = None
    foreign = foreign_series(tree)
    notes += [f"{name} is applied as well: {', '.join(patches)}" for name, patches in foreign.items()]

    applied = {patch.name: patch.sha256 for patch in live.patches} if live else {}
    changed = [path for path, state in found.items() if state is not Found.PATCHED] if live else []
    try:
        series = select_series(tree, record, among)
    except SparsekvError as error:
        notes.append(error.message)
        entries = [patch.entry for series in among for patch in series.patches]
        unusable = tuple(PatchStatus(e.file.removesuffix(".patch"), State.NOT_APPLICABLE, e.title, e.without_it) for e in entries)
        return Status(tree, None, live.applied_at if live else None, unusable, tuple(notes), foreign)

    readable = Found.OTHER not in found.values() or live is None
    fits = {plan.patch.name: plan for plan in plan_apply(tree, series, record).patches} if readable else {}
    rows = []
    for patch in series.patches:
        plan = fits.get(patch.name)
        mine = [path for path in changed if path in {file.path for file in patch.files}]
        detail = ""
        if mine:
            state, detail = State.DRIFTED, f"changed since: {', '.join(mine)}"
        elif patch.name in applied:
            state = State.APPLIED if applied[patch.name] == patch.sha256 else State.OUTDATED
        elif plan is None:
            state, detail = State.DRIFTED, "another patched file was changed"
        elif plan.problems:
            state, detail = State.DRIFTED, "; ".join(plan.problems)
        elif plan.present:
            state = State.PRESENT
        else:
            state = State.CLEAN
            moved = [f"{path} {offset:+d}" for path, offsets in plan.offsets.items() for offset in offsets if offset]
            detail = f"at an offset: {', '.join(moved)}" if moved else ""
        rows.append(PatchStatus(patch.name, state, patch.entry.title, patch.entry.without_it, detail))
    known = {patch.name for patch in series.patches}
    rows += [PatchStatus(name, State.RETIRED, "no longer in the series", "") for name in applied if name not in known]
    return Status(tree, series.name, live.applied_at if live else None, tuple(rows), tuple(notes), foreign)
