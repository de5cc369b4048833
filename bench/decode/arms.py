"""What is compared: the strongest vLLM configurations a user could pick instead, and sparsekv."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arm:
    """One engine configuration; `engine` holds keyword arguments of `vllm.LLM`."""

    name: str
    sparse: bool
    kv_dtype: str
    engine: dict[str, Any] = field(default_factory=dict)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("fa3-bf16", False, "bf16", {"attention_backend": "FLASH_ATTN"}),
        Arm("fa3-fp8", False, "fp8", {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"}),
        Arm("triton-int8", False, "int8", {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "int8_per_token_head"}),
        Arm("sparse-int8", True, "int8"),
        Arm("sparse-int4", True, "int4"),
    )
}


@dataclass(frozen=True)
class Case:
    """`requests` conversations of `context` tokens each, decoding together for `steps` steps."""

    requests: int
    context: int
    steps: int = 48

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.context}"
