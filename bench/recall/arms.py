"""The arms of a recall run: one profile, changed in the few settings that tell an arm from the others."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.profiles.errors import SparsekvError


@dataclass(frozen=True)
class Arm:
    name: str
    about: str
    settings: tuple[str, ...]
    """As `--set` takes them; `{max_model_len}` stands for the profile's."""
    reference: str | None = None
    """The arm it is compared with."""

    def of(self, max_model_len: int) -> list[str]:
        return [setting.format(max_model_len=max_model_len) for setting in self.settings]


WHOLE = "selection.dense_below={max_model_len}"
"""Every context is read whole."""
PLAIN = "speculation.method=none"

ARMS = {
    arm.name: arm
    for arm in (
        Arm("dense-bf16", "every row, in bf16", (WHOLE, PLAIN, "kv.dtype=bf16")),
        Arm("dense-int8", "every row, in int8", (WHOLE, PLAIN, "kv.dtype=int8"), "dense-bf16"),
        Arm("dense-int4", "every row, in int4", (WHOLE, PLAIN, "kv.dtype=int4"), "dense-bf16"),
        Arm("dense", "every row, as the profile stores them", (WHOLE, PLAIN)),
        Arm("sparse", "as the profile says", (), "dense"),
        Arm("sparse-plain", "as the profile says, without speculation", (PLAIN,), "dense"),
        Arm("sparse-ngram", "as the profile says, drafts from the text", ("speculation.method=ngram", "speculation.tokens=3"), "dense"),
    )
}


def arms_of(names: list[str]) -> list[Arm]:
    """The named arms, in the order of the table, each one's reference included.

    Raises:
        SparsekvError: no such arm.
    """
    if unknown := [name for name in names if name not in ARMS]:
        raise SparsekvError(f"no such arm: {', '.join(unknown)}", hint=f"choose from: {', '.join(ARMS)}")
    wanted = set(names) | {reference for name in names if (reference := ARMS[name].reference)}
    return [arm for name, arm in ARMS.items() if name in wanted]
