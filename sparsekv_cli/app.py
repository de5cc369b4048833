"""The command line: which commands there are, and what happens when one fails. A command's file is imported when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from sparsekv.profiles.env import unknown_variables
from sparsekv.profiles.errors import ExitCode, SparsekvError

from . import __version__, console

# A file of `commands/` holds `app`, a `typer.Typer(add_completion=False)`: with one command it is that command, with
# several a group. Its top level imports typer and nothing heavy (no torch, no vllm, no rich); the work is imported in the function.
COMMANDS: dict[str, str | dict[str, str]] = {
    "serve": "serve",
    "profiles": "profiles",
    "patch": "patch",
    "doctor": "doctor",
    "refit-basis": "refit_basis",
    "basis": "basis",
    "bench": {"swarm": "bench_swarm", "replay": "bench_replay", "compare": "bench_compare"},
}
"""Command -> module of `sparsekv_cli.commands`, or, for a group whose commands are spread over files, the same once more."""

GROUP_HELP: dict[str, str] = {
    "bench": "Measure a server, and compare what was measured.",
}
"""One line for each group spread over files."""


class LazyGroup(typer.core.TyperGroup):
    """Finds its commands in `table` and imports one when it is asked for."""

    table: dict[str, str | dict[str, str]] = COMMANDS

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.table.get(cmd_name)
        if entry is None:
            self.commands = dict.fromkeys(self.table)  # type: ignore[arg-type]  # what "did you mean" searches
            return None
        if isinstance(entry, dict):
            group = type("Group", (LazyGroup,), {"table": entry})
            return group(name=cmd_name, help=GROUP_HELP[cmd_name], no_args_is_help=True)
        command = typer.main.get_command(importlib.import_module(f"{__package__}.commands.{entry}").app)
        command.name = cmd_name
        return command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sparsekv {__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback(
    epilog="Exit status: 0 done, 1 a check or gate failed, 2 wrong usage or configuration, 3 this machine cannot do it, "
    "130 interrupted. `serve` ends with vLLM's own status once vLLM runs."
)
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    color: Annotated[bool, typer.Option("--color/--no-color", help="Colours on a terminal; NO_COLOR does the same.")] = True,
) -> None:
    """Serve very long contexts with vLLM: the whole KV cache in system RAM, about one percent of it read per step."""
    console.configure(verbosity=-1 if quiet else verbose, color=color)
    for name in unknown_variables():
        console.warn(f"{name} is set, but sparsekv has no such variable")


def main() -> None:
    """Entry point: runs a command and turns what it raises into a message and an exit status."""
    debug = "--debug" in sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
    try:
        app()
    except SparsekvError as error:
        if debug:
            raise
        console.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    except Exception as error:
        if debug:
            raise
        console.error(SparsekvError(f"unexpected {type(error).__name__}: {error}", hint="this is a bug; `sparsekv --debug …` shows where"))
        sys.exit(ExitCode.INTERNAL)
