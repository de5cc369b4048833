"""One YAML text as a tree that remembers where each value stands. Stricter than YAML: what can be misread is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 12

Scalar = str | int | float | bool | None


@dataclass(frozen=True, order=True)
class Origin:
    """Where a value was written: a file and its line and column, from 1; or line 0 for a command-line option."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Node:
    """A scalar, a list of nodes, or a map of nodes."""

    value: Scalar | list[Node] | dict[str, Node]
    origin: Origin

    def plain(self) -> object:
        """The value without its origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
        """This node and all below it, with their paths."""
        yield path, self
        if isinstance(self.value, dict):
            for key, child in self.value.items():
                yield from child.walk((*path, key))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    origin: Origin
    field: str
    message: str


class _Loader(yaml.SafeLoader):
    """Only `true` and `false` are booleans and only decimals are numbers: YAML 1.1 reads `no` as false, `1:30` as 90, `010` as 8."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"~|null|", "~n"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", "-+0123456789"),
):
    _initials = [*_first, ""] if _tag == "null" else [*_first]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _initials)


def parse(text: str, source: str) -> tuple[Node | None, list[Problem]]:
    """Parses one document whose top is a map; on a problem of syntax there is no tree."""
    top = Origin(source, 1, 1)
    if len(text.encode()) > MAX_BYTES:
        return None, [Problem(top, "", f"larger than {MAX_BYTES >> 10} KiB; this is no profile")]
    try:
        if problem := _refused_event(text, source):
            return None, [problem]
        tree = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = _place(source, error.problem_mark or error.context_mark)
        return None, [Problem(where, "", f"not valid YAML: {_syntax_message(text, where, error)}")]
    except yaml.YAMLError as error:
        return None, [Problem(top, "", f"not valid YAML: {' '.join(str(error).split())}")]
    if tree is None:
        return None, [Problem(top, "", "the file is empty")]
    if not isinstance(tree, yaml.MappingNode):
        return None, [Problem(top, "", "expected a map of sections at the top")]
    problems: list[Problem] = []
    return _convert(tree, source, (), problems), problems


def parse_value(text: str, source: str) -> Node:
    """Parses the right side of `--set path=value`; maps and lists in flow style are allowed. Raises ValueError."""
    wrapped, problems = parse(f"value: {text}", source)
    if problems or wrapped is None or not isinstance(wrapped.value, dict) or set(wrapped.value) != {"value"}:
        raise ValueError(f"`{text}` is not a YAML value" + (f": {problems[0].message}" if problems else ""))
    return _relocated(wrapped.value["value"], Origin(source))


def _place(source: str, mark: Any) -> Origin:
    """A `yaml.Mark`, which counts from 0; the top where there is none."""
    return Origin(source, mark.line + 1, mark.column + 1) if mark else Origin(source, 1, 1)


def _relocated(node: Node, origin: Origin) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _relocated(child, origin) for key, child in node.value.items()}, origin)
    if isinstance(node.value, list):
        return Node([_relocated(child, origin) for child in node.value], origin)
    return Node(node.value, origin)


def _refused_event(text: str, source: str) -> Problem | None:
    """Looks at the event stream, which needs no recursion, before anything is built from it."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        here = _place(source, event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            return Problem(here, "", "anchors and aliases are not supported; use `extends`")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag not in (None, "!"):
            return Problem(here, "", f"tags are not supported: {event.tag}")
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                return Problem(here, "", "a profile is one document; a second one starts here")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                return Problem(here, "", f"nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return None


def _syntax_message(text: str, where: Origin, error: yaml.MarkedYAMLError) -> str:
    line = text.splitlines()[where.line - 1] if where.line <= len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "the line is indented with a tab; use spaces"
    return " ".join((error.problem or str(error)).split())


def _convert(node: yaml.Node, source: str, path: tuple[str, ...], problems: list[Problem]) -> Node:
    origin = _place(source, node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(child, source, path, problems) for child in node.value], origin)
    if isinstance(node, yaml.MappingNode):
        return Node(_convert_map(node, source, path, problems), origin)
    assert isinstance(node, yaml.ScalarNode)
    return Node(_scalar(node), origin)


def _convert_map(node: yaml.MappingNode, source: str, path: tuple[str, ...], problems: list[Problem]) -> dict[str, Node]:
    result: dict[str, Node] = {}
    for key_node, value_node in node.value:
        here = _place(source, key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem(here, ".".join(path), "a key must be a plain word"))
            continue
        key: str = key_node.value
        if key in result:
            problems.append(Problem(here, ".".join((*path, key)), f"duplicate key; first written in line {result[key].origin.line}"))
            continue
        child = _convert(value_node, source, (*path, key), problems)
        # A message about the key and one about its value point to the same place: the key.
        result[key] = Node(child.value, here)
    return result


def _scalar(node: yaml.ScalarNode) -> Scalar:
    text: str = node.value
    kind = node.tag.rpartition(":")[2]
    if kind == "bool":
        return text == "true"
    if kind == "null":
        return None
    if kind == "int" and len(text) < 20:
        return int(text)
    if kind == "float":
        return float(text)
    return text
