"""What was really applied to a tree, kept inside it: the patches, and every original byte that a revert needs.

Layout of `.sparsekv-patches/` in vLLM's package folder: `current` is a link to one generation folder, which holds
`record.json`, `originals/PATH` and, during a swap, what `swap` stages there. There is nothing if nothing is applied.
"""

from __future__ import annotations

import enum
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sparsekv.profiles.errors import ExitCode, SparsekvError

from .tree import FileState, VllmTree

STATE_DIR = ".sparsekv-patches"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Saved(_Strict):
    """A file's identity; its content is in `originals/` if it is the one before the patches."""

    sha256: str
    mode: int
    mtime_ns: int
    link: str | None = None

    @classmethod
    def of(cls, state: FileState | None) -> Saved | None:
        if state is None:
            return None
        return cls(sha256=state.sha256, mode=state.mode, mtime_ns=state.mtime_ns, link=state.link)


class RecordedFile(_Strict):
    """A file that the patches changed; `before` is null if they created it, `after` if they deleted it."""

    path: str
    before: Saved | None
    after: str | None


class RecordedPatch(_Strict):
    name: str
    sha256: str


class Record(_Strict):
    """One application of a series."""

    schema_version: Literal[1] = 1
    series: str
    sparsekv: str
    vllm: str | None
    applied_at: str
    patches: tuple[RecordedPatch, ...]
    files: tuple[RecordedFile, ...]
    made_folders: tuple[str, ...] = ()
    """Folders that the patches' new files needed, outermost first."""


class Found(enum.Enum):
    """A recorded file as it is now."""

    ORIGINAL = "original"
    PATCHED = "patched"
    OTHER = "other"


def read_record(tree: VllmTree) -> Record | None:
    """The record in the tree; None if nothing is recorded.

    Raises:
        SparsekvError: it is damaged.
    """
    file = tree.root / STATE_DIR / "current" / "record.json"
    try:
        return Record.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise SparsekvError(
            f"{file}: the record of applied patches is damaged: {error}",
            hint=f"reinstall vLLM, then delete {tree.root / STATE_DIR}",
            exit_code=ExitCode.ENVIRONMENT,
        ) from None


def original(tree: VllmTree, file: RecordedFile) -> FileState | None:
    """A recorded file as it was before the patches.

    Raises:
        SparsekvError: the saved copy is missing or damaged.
    """
    if file.before is None:
        return None
    copy = tree.root / STATE_DIR / "current" / "originals" / file.path
    try:
        state = FileState(copy.read_bytes(), file.before.mode, file.before.mtime_ns, file.before.link)
    except OSError as error:
        raise SparsekvError(f"{copy}: {error.strerror}", hint="reinstall vLLM", exit_code=ExitCode.ENVIRONMENT) from None
    if state.sha256 != file.before.sha256:
        raise SparsekvError(f"{copy}: the saved original was changed", hint="reinstall vLLM", exit_code=ExitCode.ENVIRONMENT)
    return state


def compare(tree: VllmTree, record: Record) -> dict[str, Found]:
    """What each recorded file is now."""
    found = {}
    for file in record.files:
        now = tree.state(file.path)
        sha256 = now and now.sha256
        before = file.before and file.before.sha256
        found[file.path] = Found.PATCHED if sha256 == file.after else Found.ORIGINAL if sha256 == before else Found.OTHER
    return found


def is_overwritten(record: Record, found: dict[str, Found]) -> bool:
    """Whether vLLM was reinstalled over the patches: no file of its own is patched any more.

    An installer leaves files that the patches created, so those prove nothing.
    """
    own = [file for file in record.files if file.before is not None] or record.files
    return not any(found[file.path] is Found.PATCHED for file in own)
