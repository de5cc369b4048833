"""A series: the patches for one range of vLLM versions, from a folder with a manifest and numbered diffs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsekv.profiles.errors import ExitCode, SparsekvError

from .unified_diff import FileDiff, parse


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Target(_Strict):
    """One file of vLLM that a patch changes; a hash is null where the file does not exist."""

    path: str
    before: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    after: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")


class Seam(_Strict):
    """How a running vLLM shows that the patch is there: `function`'s code uses the name `uses`."""

    function: str
    uses: str


class PatchEntry(_Strict):
    """The manifest's account of one patch."""

    file: str = Field(pattern=r"^\d{4}-[a-z0-9-]+\.patch$")
    title: str
    why: str
    upstream: str
    retires_when: str
    without_it: str
    seam: Seam | None = None
    targets: tuple[Target, ...] = Field(min_length=1)


class _Manifest(_Strict):
    vllm: str
    cut_from: str
    patches: tuple[PatchEntry, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Patch:
    """One patch of a series: what the manifest says of it, and its diff."""

    entry: PatchEntry
    sha256: str
    files: tuple[FileDiff, ...]

    @property
    def name(self) -> str:
        return self.entry.file.removesuffix(".patch")

    def target(self, path: str) -> Target:
        return next(target for target in self.entry.targets if target.path == path)


@dataclass(frozen=True)
class Series:
    """Patches in the order in which they apply to any vLLM within `vllm`."""

    name: str
    vllm: SpecifierSet
    cut_from: Version
    patches: tuple[Patch, ...]

    def covers(self, version: Version) -> bool:
        """Local suffixes (`+cu130`) do not matter, and release candidates count as their release."""
        return self.vllm.contains(version.public, prereleases=True)


def load_series(folder: Traversable) -> Series:
    """Reads a series and checks that manifest, folder and diffs agree.

    Raises:
        SparsekvError: they do not, or a diff is malformed. All of a manifest's problems are named at once.
    """
    name = f"{folder.name}/manifest.yaml"
    try:
        manifest = _Manifest.model_validate(yaml.safe_load(folder.joinpath("manifest.yaml").read_text("utf-8")))
        covered = SpecifierSet(manifest.vllm)
    except (OSError, yaml.YAMLError, InvalidSpecifier) as error:
        raise SparsekvError(f"{name}: {error}") from None
    except ValidationError as error:
        problems = tuple(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise SparsekvError(f"{name}: {len(problems)} problems", details=problems) from None

    listed = [entry.file for entry in manifest.patches]
    present = sorted(item.name for item in folder.iterdir() if item.name.endswith(".patch"))
    if sorted(listed) != present:
        raise SparsekvError(f"{name}: lists {listed}, the folder holds {present}")
    patches = []
    latest: dict[str, str | None] = {}
    for entry in manifest.patches:
        text = folder.joinpath(entry.file).read_bytes()
        patch = Patch(entry, hashlib.sha256(text).hexdigest(), parse(text, f"{folder.name}/{entry.file}"))
        paths, targets = [file.path for file in patch.files], [target.path for target in entry.targets]
        if paths != targets:
            raise SparsekvError(f"{name}: {entry.file} changes {paths}, its `targets` are {targets}")
        for target in entry.targets:
            if latest.get(target.path, target.before) != target.before:
                raise SparsekvError(f"{name}: {entry.file}: `before` of {target.path} is not what the patch before it left")
            latest[target.path] = target.after
        patches.append(patch)
    return Series(folder.name, covered, Version(manifest.cut_from), tuple(patches))


def bundled_series() -> tuple[Series, ...]:
    """Every series of this package."""
    package = resources.files("sparsekv.patches")
    return tuple(load_series(item) for item in sorted(package.iterdir(), key=lambda i: i.name) if item.name.startswith("vllm-"))


def series_for(version: Version, among: Iterable[Series]) -> Series:
    """The series that covers a version.

    Raises:
        SparsekvError: none does; the message names what is covered.
    """
    among = tuple(among)
    for series in among:
        if series.covers(version):
            return series
    ranges = " or ".join(str(series.vllm) for series in among)
    raise SparsekvError(
        f"there are no patches for vLLM {version}: they cover vLLM {ranges}",
        hint="the plug-in works without patches; `sparsekv doctor` says whether it supports this vLLM",
        exit_code=ExitCode.ENVIRONMENT,
    )
