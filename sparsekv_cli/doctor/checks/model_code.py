"""The model's folder brings no code that anybody might be talked into running."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip
from ..machine import Machine

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def _run(machine: Machine) -> Findings:
    folder, config = machine.model_folder, machine.model_config
    if folder is None or config is None:
        yield skip("no model to look at")
        return
    python = sorted(path.name for path in folder.glob("*.py"))
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if "auto_map" in config or python:
        yield info("the model's folder holds Python code; it is not run: the server starts with --no-trust-remote-code", *python[:5])
    if pickles:
        yield info(
            "the model's folder holds pickle files; they are not loaded where there are safetensors", *pickles[:5], remedy="delete them"
        )
    if not python and not pickles and "auto_map" not in config:
        yield ok("no code in the model's folder")


CHECK = Check("model.code", "Model", "code and pickle files in the model's folder", _run)
