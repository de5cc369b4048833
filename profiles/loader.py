"""From a profile's name or file to a checked `Profile`: `extends`, `--set`, and where each value came from."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .document import MAX_BYTES, Node, Origin, Problem, parse, parse_value
from .env import cache_dir
from .errors import SparsekvError
from .fields import FieldPath, path_fields
from .fit import check_budget
from .messages import explain
from .relations import check_relations
from .schema import Profile

SUFFIX = ".yaml"
SHIPPED_FOLDER = "profiles/"
"""How the place of a shipped file is shown; a user's path that starts so is shown with `./` before it."""


class ProfileError(SparsekvError):
    """A profile that cannot be used, with every problem found."""

    def __init__(self, name: str, problems: Sequence[Problem], inherited_by: str = "") -> None:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        fields = [p.field for p in problems if p.field and p.field != "extends"]
        section = (fields[0].rpartition(".")[0] or fields[0]) if fields else None
        super().__init__(
            f"profile `{name}` has {count}",
            details=tuple(_aligned(problems, inherited_by)),
            hint=f"`sparsekv profiles schema --field {section}` lists what may stand there" if section else None,
        )
        self.problems = tuple(problems)


@dataclass(frozen=True)
class LoadedProfile:
    """A profile and its history."""

    name: str
    profile: Profile
    origins: Mapping[FieldPath, Origin]
    """Where each value was stated; defaults are missing here."""
    sources: tuple[str, ...]
    """The files it is made of, the most general first."""

    def origin(self, *path: str) -> str:
        return str(self.origins.get(path, "default"))


def shipped_names() -> list[str]:
    """Profiles that ship with sparsekv. Files whose name starts with `_` are only there to be extended."""
    names = (entry.name for entry in resources.files("sparsekv.profiles").iterdir())
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and not name.startswith("_"))


def load_profile(reference: str, overrides: Iterable[str] = ()) -> LoadedProfile:
    """Loads a shipped profile by name, or a file by path, and applies `path=value` overrides.

    Raises:
        SparsekvError: there is no such profile.
        ProfileError: with all problems of the files and overrides.
    """
    problems: list[Problem] = []
    sources: list[str] = []
    file = _locate(reference, None)
    tree = _merged(file, (), problems, sources)
    for override in overrides:
        tree = _with_override(tree, override, problems)
    own = file.source
    if tree is None:
        raise ProfileError(file.name, problems, own)
    tree = _expand_paths(_without_nulls(tree), problems)
    profile = _validate(tree, problems)
    if problems or profile is None:
        raise ProfileError(file.name, sorted(problems, key=lambda p: (p.origin.source != own, p.origin)), own)
    origins = {path: node.origin for path, node in tree.walk() if path and not isinstance(node.value, dict)}
    return LoadedProfile(file.name, profile, origins, tuple(sources))


def profile_text(reference: str) -> str:
    """The file of a shipped profile, or of a path, as it is written.

    Raises:
        SparsekvError: there is no such profile.
    """
    return _locate(reference, None).text


# ---- files


@dataclass(frozen=True)
class _File:
    name: str
    source: str
    """As shown in messages."""
    text: str
    path: Path | None
    """None for a shipped file."""

    @property
    def identity(self) -> object:
        """Equal for two spellings of one file, and never for a shipped and a user's file of one name."""
        return self.path.resolve() if self.path else self.name


def _locate(reference: str, relative_to: _File | None) -> _File:
    if "/" in reference or reference.endswith((".yaml", ".yml")):
        path = Path(reference).expanduser()
        if relative_to is not None and relative_to.path is not None:
            path = relative_to.path.parent / path
        source = f"./{path}" if str(path).startswith(SHIPPED_FOLDER) else str(path)
        return _File(path.stem, source, _read(path, reference), path.absolute())
    entry = resources.files("sparsekv.profiles") / f"{reference}{SUFFIX}"
    if re.fullmatch(r"[\w.-]+", reference) and entry.is_file():
        return _File(reference, f"{SHIPPED_FOLDER}{reference}{SUFFIX}", entry.read_text(encoding="utf-8"), None)
    close = difflib.get_close_matches(reference, shipped_names(), 1, 0.5)
    raise SparsekvError(
        f"no profile named `{reference}`",
        hint=f"did you mean `{close[0]}`?" if close else f"shipped profiles: {', '.join(shipped_names())}; a file is given by its path",
    )


def _read(path: Path, reference: str) -> str:
    try:
        if path.exists() and not path.is_file():
            reason = "not a file"
        elif path.stat().st_size > MAX_BYTES:
            reason = f"larger than {MAX_BYTES >> 10} KiB"
        else:
            return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    raise SparsekvError(f"cannot read profile {reference}: {reason}", hint="`sparsekv profiles list` shows the shipped ones")


def _merged(file: _File, below: tuple[_File, ...], problems: list[Problem], sources: list[str]) -> Node | None:
    """The file over its parents."""
    tree, found = parse(file.text, file.source)
    problems.extend(found)
    parents = _parents(tree, problems)
    result: Node | None = None
    for parent in parents:
        try:
            base = _locate(str(parent.value), file)
        except SparsekvError as error:
            problems.append(Problem(parent.origin, "extends", error.message))
            continue
        chain = (*below, file)
        if base.identity in [member.identity for member in chain]:
            circle = " -> ".join(member.source for member in (*chain, base))
            problems.append(Problem(parent.origin, "extends", f"goes in a circle: {circle}"))
            continue
        merged = _merged(base, chain, problems, sources)
        result = overlay(result, merged)
    if file.source not in sources:
        sources.append(file.source)
    return overlay(result, tree)


def _parents(tree: Node | None, problems: list[Problem]) -> list[Node]:
    if tree is None or not isinstance(tree.value, dict) or "extends" not in tree.value:
        return []
    node = tree.value.pop("extends")
    parents = node.value if isinstance(node.value, list) else [node]
    if all(isinstance(parent.value, str) and parent.value for parent in parents):
        return parents
    problems.append(Problem(node.origin, "extends", "expected the name or path of a profile, or a list of them"))
    return []


def overlay(base: Node | None, top: Node | None) -> Node | None:
    """Maps merge, everything else replaces."""
    if base is None or top is None:
        return base if top is None else top
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    merged = dict(base.value)
    for key, node in top.value.items():
        merged[key] = overlay(merged.get(key), node) or node
    return Node(merged, top.origin)


def _with_override(tree: Node | None, override: str, problems: list[Problem]) -> Node | None:
    path, separator, text = override.partition("=")
    origin = Origin(f"--set {path.strip()}")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        problems.append(Problem(origin, "", "expected `section.key=value`"))
        return tree
    try:
        node = parse_value(text, str(origin))
    except ValueError as error:
        problems.append(Problem(origin, path, str(error)))
        return tree
    for key in reversed(keys):
        node = Node({key: node}, origin)
    return overlay(tree, node)


def _without_nulls(node: Node) -> Node:
    """`null` takes back what a parent stated, which leaves the default."""
    if not isinstance(node.value, dict):
        return node
    return Node({key: _without_nulls(child) for key, child in node.value.items() if child.value is not None}, node.origin)


# ---- paths


def _expand_paths(tree: Node, problems: list[Problem]) -> Node:
    for path in path_fields():
        tree = _replace(tree, path, partial(_expanded, field=".".join(path), problems=problems))
    return tree


def _expanded(node: Node, field: str, problems: list[Problem]) -> Node:
    if not isinstance(node.value, str) or not node.value:
        return node
    if field == "sketch.basis" and re.fullmatch(r"[\w.-]+", node.value) and not node.value.endswith(".safetensors"):
        return Node(str(resources.files("sparsekv.basis") / "files" / f"{node.value}.safetensors"), node.origin)
    missing: list[str] = []

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        value = str(cache_dir()) if name == "SPARSEKV_CACHE" else os.environ.get(name)
        if not value:
            missing.append(name)
        return value or ""

    text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", variable, node.value)
    if missing:
        problems.append(Problem(node.origin, field, f"environment variable {missing[0]} is not set"))
        return node
    in_file = node.origin.line and not node.origin.source.startswith(SHIPPED_FOLDER)
    folder = Path(node.origin.source).absolute().parent if in_file else Path.cwd()
    return Node(os.path.normpath(folder / Path(text).expanduser()), node.origin)


def _replace(node: Node, path: FieldPath, change: Callable[[Node], Node]) -> Node:
    if not path:
        return change(node)
    if not isinstance(node.value, dict) or path[0] not in node.value:
        return node
    return Node({**node.value, path[0]: _replace(node.value[path[0]], path[1:], change)}, node.origin)


# ---- validation


def _validate(tree: Node, problems: list[Problem]) -> Profile | None:
    try:
        profile = Profile.model_validate(tree.plain())
    except ValidationError as error:
        problems.extend(_problem(tree, item) for item in error.errors())
        return None
    found = list(check_relations(profile))
    if not found and profile.model.shape is not None:
        found = list(check_budget(profile, profile.model.shape))
    problems.extend(Problem(_nearest(tree, path).origin, ".".join(path), message) for path, message in found)
    return profile


def _problem(tree: Node, error: Any) -> Problem:
    path: FieldPath = ()
    for part in map(str, error["loc"]):
        if error["type"] == "missing" or isinstance(_at(tree, (*path, part)), Node):
            path = (*path, part)
    field = ".".join(path)
    return Problem(_nearest(tree, path).origin, field, explain(path, error))


def _at(tree: Node, path: FieldPath) -> Node | None:
    node: Node | None = tree
    for key in path:
        node = node.value.get(key) if node is not None and isinstance(node.value, dict) else None
    return node


def _nearest(tree: Node, path: FieldPath) -> Node:
    for length in range(len(path), 0, -1):
        if (node := _at(tree, path[:length])) is not None:
            return node
    return tree


def _aligned(problems: Sequence[Problem], own: str) -> list[str]:
    places = [str(problem.origin) for problem in problems]
    place_width = max(map(len, places), default=0)
    field_width = max((len(problem.field) for problem in problems), default=0)
    lines = []
    for place, problem in zip(places, problems, strict=True):
        inherited = problem.origin.line and own and problem.origin.source != own
        note = f" (inherited by {own})" if inherited else ""
        lines.append(f"{place:{place_width}}  {problem.field:{field_width}}  {problem.message}{note}")
    return lines
