"""`sparsekv profiles`: look at hardware profiles, compare them, check them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv_cli import console

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Hardware profiles: what ships with sparsekv, what each comes to, whether yours is right.",
    epilog="Examples:\n\n  sparsekv profiles show dual3090 --resolved --origins\n\n  sparsekv profiles copy dual3090 mine.yaml\n\n"
    "  sparsekv profiles validate mine.yaml",
)

Name = Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a shipped profile, or path of a file.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command("list")
def list_profiles(json: Json = False) -> None:
    """The profiles that ship with sparsekv."""
    from sparsekv.profiles.loader import load_profile, shipped_names
    from sparsekv.profiles.summary import summarise

    summaries = [summarise(load_profile(name)) for name in shipped_names()]
    if json:
        console.print_json({"schema_version": 1, "profiles": [summary.to_json() for summary in summaries]})
        return
    columns = ("profile", "machine", "model", "context", "rows", "tokens in all", "tok/s")
    console.table(columns, [summary.cells() for summary in summaries], right=(3, 5))


@app.command()
def show(
    name: Name,
    settings: Settings = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="With what it extends and every default, as one file.")] = False,
    origins: Annotated[bool, typer.Option("--origins", help="With the place where each value is stated; implies --resolved.")] = False,
    json: Json = False,
) -> None:
    """Print one profile: as it is written, or as it comes out."""
    from sparsekv.profiles.loader import load_profile, profile_text
    from sparsekv.profiles.resolved import resolved_text

    if not (resolved or origins or settings or json):
        print(profile_text(name), end="")
        return
    loaded = load_profile(name, settings or ())
    if json:
        places = {".".join(path): str(origin) for path, origin in loaded.origins.items()}
        console.print_json({"schema_version": 1, "name": loaded.name, "profile": loaded.profile.model_dump(mode="json"), "origins": places})
    else:
        print(resolved_text(loaded, origins=origins), end="")


@app.command()
def budget(name: Name, settings: Settings = None, json: Json = False) -> None:
    """Memory, bus and time: what a profile comes to, each figure with its formula."""
    from sparsekv.profiles.loader import load_profile
    from sparsekv.profiles.statement import statement

    loaded = load_profile(name, settings or ())
    sections = statement(loaded)
    if json:
        rows = [{"section": title, **term.to_json()} for title, terms in sections.items() for term in terms]
        console.print_json({"schema_version": 1, "name": loaded.name, "terms": rows})
        return
    for title, terms in sections.items():
        console.table((title, "", "formula"), [(term.name, term.text, term.formula) for term in terms], right=(1,))
        print()


@app.command()
def diff(
    left: Name,
    right: Name,
    json: Json = False,
) -> None:
    """What differs between two profiles, defaults included."""
    from sparsekv.profiles.loader import load_profile
    from sparsekv.profiles.resolved import differences

    a, b = load_profile(left), load_profile(right)
    rows = differences(a, b)
    if json:
        console.print_json({"schema_version": 1, "differences": [dict(zip(("key", "left", "right"), row, strict=True)) for row in rows]})
    elif rows:
        console.table(("key", left, right), rows)
    else:
        console.note("no difference")


@app.command()
def validate(
    names: Annotated[list[str], typer.Argument(metavar="PROFILE…", help="Names or files; all are checked.")],
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Check profiles: every problem of each, with its place. Starts nothing and needs no GPU."""
    from sparsekv.profiles.errors import ExitCode, SparsekvError
    from sparsekv.profiles.loader import load_profile

    failures: dict[str, SparsekvError | None] = {}
    for name in names:
        try:
            load_profile(name, settings or ())
            failures[name] = None
        except SparsekvError as error:
            failures[name] = error
    if json:
        reports = [
            {"profile": name, "valid": failure is None, "problems": list(failure.details or (failure.message,)) if failure else []}
            for name, failure in failures.items()
        ]
        console.print_json({"schema_version": 1, "profiles": reports})
    else:
        for name, failure in failures.items():
            if failure:
                console.error(failure)
            else:
                print(f"{name}: valid")
    if any(failures.values()):
        raise typer.Exit(ExitCode.USAGE)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a shipped profile.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The new file, or a folder for it.")],
) -> None:
    """Copy a shipped profile to change it. An existing file is never overwritten."""
    from sparsekv.profiles.copying import copy_profile

    target = copy_profile(name, path)
    console.note(f"wrote {target}; `sparsekv profiles validate {target}` checks it, `sparsekv serve --profile {target}` serves it")


@app.command()
def schema(
    field: Annotated[str, typer.Option("--field", metavar="KEY", help="Explain one key or section, such as `kv.pool` or `kv`.")] = "",
    json: Json = False,
) -> None:
    """JSON Schema of a profile's file, for editors; with --field, what a key means."""
    if not field:
        from sparsekv.profiles.json_schema import schema_text

        print(schema_text(), end="")
        return
    from dataclasses import asdict

    from sparsekv.profiles.fields import describe

    keys = describe(field)
    if json:
        console.print_json({"schema_version": 1, "keys": [asdict(key) for key in keys]})
    else:
        console.table(("key", "value", "default", "meaning"), [(key.field, key.type, key.default, key.meaning) for key in keys])
