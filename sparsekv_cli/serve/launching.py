"""The launch of one server: planned, explained, executed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from sparsekv.profiles.errors import ExitCode, SparsekvError
from sparsekv.profiles.launch import Launch, build_launch, engine_document
from sparsekv.profiles.loader import LoadedProfile

from ..doctor.machine import Machine
from .api_key import find_api_key
from .program import server_program
from .run_file import write_run_file


@dataclass(frozen=True)
class Plan:
    """A command, and the machine it was made for."""

    launch: Launch
    machine: Machine


def overrides(values: Mapping[str, object]) -> Iterator[str]:
    """Options of `serve` that are short for `--set`."""
    for key, value in values.items():
        if value is not None:
            yield f"{key}={json.dumps(value)}"


def plan(loaded: LoadedProfile, extra: tuple[str, ...] = ()) -> Plan:
    """Writes the resolved profile and builds the command. Nothing is checked but what the command needs.

    Raises:
        SparsekvError: no model shape to be had, no vLLM, or arguments that sparsekv answers for.
    """
    machine = Machine(loaded=loaded, measure=False, extra=extra)
    profile = loaded.profile
    if machine.shape is None:
        raise SparsekvError(
            f"the model's folder is not there, or its config.json cannot be read: {profile.model.path}",
            hint="correct model.path, or state model.shape to plan without the model",
        )
    path = write_run_file(loaded.name, engine_document(loaded, machine.shape))
    key = find_api_key(profile.server, machine.host.environ)
    gpus = machine.cards if profile.hardware.device == "cuda" else ()
    launch = build_launch(
        loaded,
        program=server_program(profile.model.path),
        profile_path=str(path),
        gpus=[gpu.uuid for gpu in gpus],
        api_key=(key.value, key.shell) if key else None,
        extra=extra,
    )
    return Plan(launch, machine)


def explanation(loaded: LoadedProfile, launch: Launch) -> list[tuple[str, str, str, str]]:
    """Option or variable, value, origin, reason: one row each."""
    rows = []
    for option in launch.options:
        rows.append((option.name, option.value or "", _origin(loaded, option.field), option.why))
    for variable in launch.variables:
        rows.append((variable.name, variable.shown, _origin(loaded, variable.field), variable.why))
    if launch.extra:
        rows.append((" ".join(launch.extra), "", "command line", "passed on as it is"))
    return rows


def execute(launch: Launch) -> NoReturn:
    """Becomes vLLM: signals and exit status are its own from here on.

    Raises:
        SparsekvError: the program cannot be executed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {name: value for name, value in os.environ.items() if name != "SPARSEKV_API_KEY"}
    try:
        os.execve(launch.argv[0], launch.argv, environment | {v.name: v.value for v in launch.variables})
    except OSError as error:
        raise SparsekvError(f"cannot start {launch.argv[0]}: {error.strerror}", exit_code=ExitCode.ENVIRONMENT) from None


def _origin(loaded: LoadedProfile, field: tuple[str, ...] | None) -> str:
    return "sparsekv" if field is None else loaded.origin(*field)
