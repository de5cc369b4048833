"""The profile's figures of the model are the model's."""

from __future__ import annotations

from sparsekv.profiles.model_shape import shape_problems

from ..check import Check, Findings, error, ok, skip, unknown
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    profile, config = machine.profile, machine.model_config
    if profile is None or config is None:
        yield skip("no profile, or no config.json to compare it with")
        return
    stated, length = profile.model.shape, profile.model.max_model_len
    try:
        problems = shape_problems(stated, config) if stated else []
        longest = int((config.get("text_config") or config).get("max_position_embeddings") or length)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        yield unknown(f"config.json lacks what the comparison needs: {problem}")
        return
    if problems:
        remedy = "correct model.shape, or leave it out: it is read from config.json"
        yield error("the profile describes another model", *problems, remedy=remedy)
    if length > longest:
        yield error(f"model.max_model_len is {length:,}, the model was made for {longest:,}", remedy=f"--set model.max_model_len={longest}")
    if not problems and length <= longest:
        yield ok(f"context {length:,} of {longest:,}" + (", and the profile's figures are the model's" if stated else ""))


CHECK = Check("model.shape", "Model", "the profile's shape and context against config.json", _run)
