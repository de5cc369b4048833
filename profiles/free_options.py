"""What a user may add to the command beside the profile's keys, and what not: nothing that undoes a check, no secrets."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import SparsekvError

ANSWERED_FOR = {
    "--host": "use `--host`, or server.host",
    "--port": "use `--port`, or server.port",
    "--uds": "sparsekv listens on a port",
    "--model": "set model.path",
    "--config": "vLLM's own configuration file would be a second profile; use keys of the profile",
    "--api-key": "a key on the command line is seen by every user of the machine; use `--api-key-file`",
    "--hf-token": "a token on the command line is seen by every user of the machine, and no hub is asked",
    "--trust-remote-code": "nothing in a model's folder is executed",
    "--scheduler-cls": "sparsekv brings its own",
    "--kv-transfer-config": "sparsekv brings its own",
    "--kv-cache-dtype": "set kv.dtype",
    "--block-size": "it is fixed by the row pool",
    "--headless": "one machine, one server",
    "--grpc": "sparsekv serves HTTP",
}
"""Options of vLLM that are set by a key of the profile or not at all, and what to do instead."""


def option_name(word: str) -> str | None:
    """The long option that a word of a command line states, in vLLM's spelling; None for a value.

    vLLM takes `--max_model_len` for `--max-model-len`, and `--compilation-config.mode` as a key of the option's JSON.
    """
    if not word.startswith("--"):
        return None
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def refuse_answered_for(words: Sequence[str]) -> None:
    """Refuses arguments after `--` that sparsekv answers for.

    Raises:
        SparsekvError: with all of them.
    """
    found = dict.fromkeys(name for word in words if (name := option_name(word)) in ANSWERED_FOR)
    if found:
        names = [name for name in found if name]
        raise SparsekvError(
            f"not possible after `--`: {', '.join(names)}",
            details=tuple(f"{name}: {ANSWERED_FOR[name]}" for name in names),
        )
