"""The profile's figures of the model are the model's."""

from __future__ import annotations

from sparsekv.profiles.model_shape import shape_problems

from ..check import Check, Findings, error, ok, skip, unknown
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    profile, config = machine.profile, machine.model_config
    if profile is None or config is None or profile.model.shape is None:
        yield skip("no profile that states a shape, or no config.json to compare it with")
        return
    try:
        problems = shape_problems(profile.model.shape, config)
        longest = int((config.get("text_config") or config).get("max_position_embeddings") or 0)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        yield unknown(f"config.json lacks what the comparison needs: {problem}")
        return
    if problems:
        yield error("the profile describes another model", *problems, remedy="correct model.shape, or leave it out: it is read from config.json")
    if longest and profile.model.max_model_len > longest:
        yield error(
            f"model.max_model_len is {profile.model.max_model_len:,}, the model was made for {longest:,}",
            remedy=f"--set model.max_model_len={longest}",
        )
    if not problems and not (longest and profile.model.max_model_len > longest):
        yield ok("the profile's figures are the model's")


CHECK = Check("model.shape", "Model", "the profile's shape and context against config.json", _run)
