"""What the user sees: results on stdout, everything else on stderr, colour only on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsekv.profiles.errors import SparsekvError

if TYPE_CHECKING:
    from rich.console import Console

_verbosity = 0
_color = True
_STYLES = {"error": "1;31", "warning": "1;33", "hint": "1;36"}


def configure(*, verbosity: int, color: bool) -> None:
    """-1 quiet, 0 normal, 1 and more verbose."""
    global _verbosity, _color
    _verbosity, _color = verbosity, color and "NO_COLOR" not in os.environ


def error(problem: SparsekvError) -> None:
    """The message, one line per problem, and what to do next."""
    _line("error", problem.message)
    for detail in problem.details:
        print(f"  {detail}", file=sys.stderr)
    if problem.hint:
        _line("hint", problem.hint)


def warn(message: str) -> None:
    _line("warning", message)


def note(message: str) -> None:
    """Progress and explanations; not for `--quiet`."""
    if _verbosity >= 0:
        print(message, file=sys.stderr)


def detail(message: str) -> None:
    """For `--verbose`."""
    if _verbosity > 0:
        print(message, file=sys.stderr)


def print_json(value: Mapping[str, Any]) -> None:
    """One object with a `schema_version`, and nothing else on stdout."""
    print(json.dumps(value, indent=2))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """A plain table on stdout; `right` names the columns of numbers. Piped, its lines are never folded."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    result = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index in right else "left", no_wrap=index == 0, overflow="fold")
    for row in rows:
        result.add_row(*row)
    out().print(result)


def out() -> Console:
    """rich on stdout; markup is off, since values may hold brackets."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 10_000
    return Console(no_color=not _color, highlight=False, markup=False, width=width, soft_wrap=False)


def _line(kind: str, message: str) -> None:
    colored = _color and sys.stderr.isatty()
    label = f"\x1b[{_STYLES[kind]}m{kind}\x1b[0m" if colored else kind
    print(f"{label}: {message}", file=sys.stderr)
