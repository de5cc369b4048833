"""Agent transcripts made from source files: the text a served agent's context mostly consists of."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

TOOLS = [
    {"name": "list_files", "description": "List the files of a folder.", "parameters": {"path": {"type": "string"}}},
    {"name": "read_file", "description": "Read lines of a file.", "parameters": {"path": {}, "start": {}, "end": {}}},
    {"name": "grep", "description": "Search the repository for a regular expression.", "parameters": {"pattern": {}, "path": {}}},
    {"name": "edit", "description": "Replace one piece of text in a file by another.", "parameters": {"path": {}, "old": {}, "new": {}}},
    {"name": "run_tests", "description": "Run the tests that match a name.", "parameters": {"match": {"type": "string"}}},
]

SYSTEM = (
    "You are a careful engineer working in a repository. Look before you change anything, quote code exactly, name files and "
    "lines, and say when you are not sure. Call one tool at a time, as JSON. Tools:\n" + "\n".join(json.dumps(tool) for tool in TOOLS)
)

QUESTIONS = [
    "Where is `{name}` defined and who calls it? Quote the code.",
    "A user reports that `{name}` behaves oddly on empty input. Find out whether that is so.",
    "Explain what `{name}` guarantees to its callers, and which line enforces it.",
    "Rename the local variable in `{name}` that is hardest to understand, and run the tests.",
    "Review `{name}` as if it came in a pull request. Be specific.",
    "Which exceptions can leave `{name}`? List them with the conditions.",
    "We want `{name}` to accept an iterator too. What would break?",
]

THOUGHTS = [
    "I will search for the definition first.",
    "The definition is in `{path}`; the lines around it should show the contract.",
    "That matches what the documentation says, but I want to see the callers before I conclude anything.",
    "There is an early return here that the question does not mention. Reading on.",
    "The tests pass. One thing is left to check: the behaviour at the boundary.",
]

ANSWERS = [
    "`{name}` is defined at `{path}:{line}`:\n\n```\n{code}\n```\n\n"
    "The check happens before any state is changed, so a failed call leaves nothing behind.",
    "I found it in `{path}` (line {line}). The relevant part:\n\n```\n{code}\n```\n\n"
    "So the report is right for empty input only; everything else goes through the second branch.",
    "Summary: `{path}:{line}` is the only definition. I changed nothing. "
    "If you want the stricter behaviour, the condition to tighten is in this block:\n\n```\n{code}\n```",
]

DEFINITION = re.compile(r"^\s*(?:async )?(?:def|class|fn|pub fn|func|export class) (\w{3,})", re.MULTILINE)

Message = dict[str, str]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _call(tool: str, thought: str, **arguments: object) -> Message:
    return _message("assistant", thought + "\n" + json.dumps({"tool": tool, "arguments": arguments}))


def transcript(files: Sequence[tuple[str, str]], rng: random.Random, turns: int = 4) -> list[Message]:
    """A conversation of user, assistant and tool messages about `(name, text)` source files."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}]
    for _ in range(turns):
        path, text = files[rng.randrange(len(files))]
        lines = text.splitlines()
        definitions = list(DEFINITION.finditer(text))
        name = rng.choice(definitions).group(1) if definitions else path.split(".")[0]
        at = next((i for i, line in enumerate(lines) if re.search(rf"\b{re.escape(name)}\b", line)), 0)
        start = max(0, at - rng.randrange(20))
        end = min(len(lines), at + rng.randrange(30, 160))
        facts = {"name": name, "path": path, "line": at + 1, "code": "\n".join(lines[at : at + rng.randrange(3, 12)])}

        messages.append(_message("user", rng.choice(QUESTIONS).format(**facts)))
        messages.append(_call("grep", rng.choice(THOUGHTS).format(**facts), pattern=rf"\b{name}\b", path="."))
        hits = [f"{path}:{i + 1}:{line}" for i, line in enumerate(lines) if name in line]
        messages.append(_message("tool", "\n".join(hits[:20]) or "no match"))
        messages.append(_call("read_file", rng.choice(THOUGHTS).format(**facts), path=path, start=start + 1, end=end))
        messages.append(_message("tool", "\n".join(f"{i + 1:5d}\t{lines[i]}" for i in range(start, end))))
        if rng.random() < 0.5:
            messages.append(_call("run_tests", rng.choice(THOUGHTS).format(**facts), match=name))
            count, seconds = rng.randrange(3, 90), rng.random() * 20
            messages.append(_message("tool", f"{'.' * min(count, 60)} [100%]\n{count} passed in {seconds:.2f}s"))
        messages.append(_message("assistant", rng.choice(ANSWERS).format(**facts)))
    return messages


def render(messages: Sequence[Message], tokenizer: object) -> str:
    """As the model's own chat template writes it, where that knows the roles; else as plain text."""
    if getattr(tokenizer, "chat_template", None):
        try:
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False))  # type: ignore[attr-defined]
        except Exception:  # templates refuse roles with errors of their own making
            renamed = [{**message, "role": "user" if message["role"] == "tool" else message["role"]} for message in messages]
            try:
                return str(tokenizer.apply_chat_template(renamed, tokenize=False))  # type: ignore[attr-defined]
            except Exception:
                pass
    return "\n\n".join(f"{message['role'].upper()}: {message['content']}" for message in messages)
