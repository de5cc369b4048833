"""The profile's parsers of thinking and tool calls are ones that this vLLM has."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from ..check import Check, Findings, error, ok, skip, unknown
from ..machine import Machine

REGISTRIES = {
    "tool_parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),
}


def _run(machine: Machine) -> Findings:
    profile, tree = machine.profile, machine.vllm
    if profile is None or tree is None:
        yield skip("no profile, or no vLLM")
        return
    fine = []
    for field, (path, table) in REGISTRIES.items():
        name = getattr(profile.server, field)
        if name is None:
            continue
        known = _keys(tree.root / path, table)
        if known is None:
            yield unknown(f"this vLLM's list of parsers is not where 0.31 has it: server.{field} was not checked")
        elif name not in known:
            close = difflib.get_close_matches(name, known, 1)
            yield error(
                f"vLLM {tree.version} has no {field} `{name}`",
                remedy=f"set server.{field}: {close[0]}" if close else f"one of {', '.join(sorted(known))}",
            )
        else:
            fine.append(name)
    yield ok(f"known to this vLLM: {', '.join(fine)}") if fine else skip("the profile sets no parser")


def _keys(path: Path, table: str) -> set[str] | None:
    try:
        module = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == table
            and isinstance(node.value, ast.Dict)
        ):
            return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return None


CHECK = Check("model.parsers", "Model", "whether vLLM knows the profile's parsers", _run)
