"""One line about a profile, for lists."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .budget import pool_size
from .loader import LoadedProfile


@dataclass(frozen=True)
class Summary:
    name: str
    description: str
    machine: str
    model: str
    context: int
    """Longest request in tokens."""
    rows: str
    """Format of the rows and where they lie."""
    pool_tokens: int | None
    """Tokens of all conversations together; None where the model's shape is not stated."""
    decode_tokens_per_second: list[float] | None
    source: str | None
    """How that band was found."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        band = self.decode_tokens_per_second
        rate = "-" if not band else f"up to {band[1]:g}" if band[0] == band[1] else f"{band[0]:g}-{band[1]:g}"
        tokens = f"{self.pool_tokens:,}" if self.pool_tokens is not None else "-"
        return self.name, self.machine, self.model, f"{self.context:,}", self.rows, tokens, f"{rate} ({self.source})" if band else rate


def summarise(loaded: LoadedProfile) -> Summary:
    profile = loaded.profile
    hardware, shape, expected = profile.hardware, profile.model.shape, profile.expected
    return Summary(
        name=loaded.name,
        description=profile.description,
        machine="CPU" if hardware.device == "cpu" else f"{hardware.gpus} x {hardware.gpu}",
        model=profile.model.name,
        context=profile.model.max_model_len,
        rows=f"{profile.kv.dtype}, {profile.kv.placement}",
        pool_tokens=pool_size(profile, shape).tokens if shape else None,
        decode_tokens_per_second=expected.decode_tokens_per_second if expected else None,
        source=expected.source if expected else None,
    )
