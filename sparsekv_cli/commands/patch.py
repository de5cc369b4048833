"""`sparsekv patch`: the optional patches of an installed vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv_cli import console

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Patches for an installed vLLM: optional, all or none, and taken back byte for byte.",
    epilog="Examples:\n\n  sparsekv patch apply --dry-run\n\n  sparsekv patch revert --target /opt/venv/lib/python3.12/site-packages/vllm",
)

Target = Annotated[
    Path | None,
    typer.Option("--target", metavar="DIR", help="vLLM's package folder, or the folder that holds it (default: the one Python imports)."),
]


@app.command()
def status(
    target: Target = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Which patches are applied, which would apply, and what the plug-in does without them."""
    from sparsekv.patches.series import bundled_series
    from sparsekv.patches.status import State
    from sparsekv.patches.status import status as read_status
    from sparsekv.patches.tree import find_tree

    found = read_status(find_tree(target), bundled_series())
    if json:
        console.print_json(found.to_json())
        return
    version = f"vLLM {found.tree.version}" if found.tree.version else "vLLM, version unknown"
    console.note(f"{version} in {found.tree.root}")
    console.table(("patch", "state", "what it does"), [(p.name, p.state.value, p.title) for p in found.patches])
    for patch in found.patches:
        if patch.detail:
            console.note(f"{patch.name}: {patch.detail}")
    for note in found.notes:
        console.warn(note)
    for patch in found.patches:
        if not patch.in_effect and patch.state is not State.RETIRED:
            console.detail(f"without {patch.name}: {patch.without_it}")


@app.command()
def apply(
    target: Target = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Work everything out and show the diffstat; change nothing.")] = False,
) -> None:
    """Apply the series for this vLLM: all patches or none. Applying it again changes nothing."""
    from sparsekv.patches.operations import apply as apply_series
    from sparsekv.patches.series import bundled_series
    from sparsekv.patches.tree import find_tree

    tree = find_tree(target)
    outcome = apply_series(tree, bundled_series(), dry_run=dry_run)
    for plan in outcome.plan.patches:
        offsets = [f"{path} {offset:+d}" for path, found in plan.offsets.items() for offset in found if offset]
        note = " (already there)" if plan.present else f" (at an offset: {', '.join(offsets)})" if offsets else ""
        console.detail(f"{plan.patch.name}{note}")
    if not outcome.changed:
        console.note(f"nothing to do: {outcome.plan.series.name} is applied to {tree.root}")
        return
    diffs = [diff for plan in outcome.plan.patches if not plan.present for diff in plan.patch.files]
    for path in outcome.changed:
        added, removed = (sum(getattr(diff, side) for diff in diffs if diff.path == path) for side in ("added", "removed"))
        console.out().print(f"{path}  +{added} -{removed}" if added or removed else f"{path}  restored")
    if dry_run:
        console.note(f"{len(outcome.changed)} file(s) would change in {tree.root}; nothing was changed")
    else:
        console.note(f"applied {outcome.plan.series.name} to {tree.root}; restart any vLLM that runs from there")


@app.command()
def revert(target: Target = None) -> None:
    """Take all patches back: every file is again what it was, byte for byte."""
    from sparsekv.patches.operations import revert as revert_series
    from sparsekv.patches.tree import find_tree

    tree = find_tree(target)
    restored = revert_series(tree)
    for path in restored:
        console.out().print(path)
    if restored:
        console.note(f"restored {len(restored)} file(s) in {tree.root}; restart any vLLM that runs from there")
    else:
        console.note(f"nothing to do: no patches are applied to {tree.root}")


@app.command()
def verify(target: Target = None) -> None:
    """Check that the whole series is applied and that nobody changed its files since; exit status 1 if not."""
    from sparsekv.patches.operations import verify as verify_series
    from sparsekv.patches.series import bundled_series
    from sparsekv.patches.tree import find_tree
    from sparsekv.profiles.errors import ExitCode, SparsekvError

    tree = find_tree(target)
    problems = verify_series(tree, bundled_series())
    if problems:
        raise SparsekvError(
            f"the patches of {tree.root} are not in order",
            details=tuple(problems),
            hint="run `sparsekv patch apply`, or `sparsekv patch status` for more",
            exit_code=ExitCode.FAILED,
        )
    console.note(f"{tree.root}: the whole series is applied and untouched")
