"""The tokenizer is whole and can write a chat: a server without a template fails on its first chat request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..check import Check, Findings, error, ok, skip, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    folder, profile = machine.model_folder, machine.profile
    if folder is None or profile is None or not folder.is_dir():
        yield skip("no model to look at")
        return
    tokenizer = _json(folder / "tokenizer.json")
    fine = True
    if tokenizer is None and not (folder / "tokenizer.model").is_file():
        yield error("tokenizer.json is missing or damaged", str(folder), remedy="copy it from the model this one was made from")
        return
    words = {token.get("content") for token in (tokenizer or {}).get("added_tokens", []) if isinstance(token, dict)}
    if tokenizer is not None and not tokenizer.get("model", {}).get("vocab"):
        fine = False
        yield error("tokenizer.json has an empty vocabulary", remedy="copy it from the model this one was made from")
    template, source = _template(folder, profile.model.chat_template)
    if not template.strip():
        yield error(
            f"there is no chat template ({source})",
            cause="a base model, or a conversion that left it out; each chat request would fail",
            remedy="set model.chat_template to a Jinja file of the model's family",
        )
        return
    if "<think>" in template and words and "<think>" not in words:
        fine = False
        yield error(
            "the template writes <think>, which the tokenizer does not know", cause="tokenizer and template are of different models"
        )
    server = profile.server
    if "<think>" in template and server.reasoning_parser is None:
        fine = False
        yield warn("the model thinks, and server.reasoning_parser is not set: thinking ends up in the answer")
    if "tools" in template and server.tool_parser is None:
        fine = False
        yield warn(
            "the template knows tools, and server.tool_parser is not set: requests that leave the choice of a tool to the model get 400"
        )
    if server.tool_parser and "tools" not in template:
        fine = False
        yield warn(f"server.tool_parser is {server.tool_parser}, but the template does not mention tools", source)
    if fine:
        yield ok(f"tokenizer and chat template ({source})")


def _template(folder: Path, chosen: str | None) -> tuple[str, str]:
    """The template's text and where it stands."""
    for path in [Path(chosen)] if chosen else [folder / "chat_template.jinja"]:
        try:
            return path.read_text("utf-8"), path.name
        except (OSError, UnicodeDecodeError):
            if chosen:
                return "", f"{chosen} cannot be read"
    value = (_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    return (value, "tokenizer_config.json") if isinstance(value, str) else ("", "neither chat_template.jinja nor tokenizer_config.json")


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


CHECK = Check("model.tokenizer", "Model", "tokenizer, chat template, and what they need of the server's parsers", _run)
