"""A connector for the simulation: some requests find tokens of their prompts in a tier that takes a while to load from."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.request import Request


class SimulatedLoads(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of an asynchronous load. The virtual engine says when one is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: dict[str, int] = {}
        """Leading prompt tokens the tier holds, by request."""
        self.started: list[str] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        block = self._vllm_config.cache_config.block_size
        held = min(self.held.get(request.request_id, 0), request.num_tokens - 1) // block * block
        return max(held - num_computed_tokens, 0), held > num_computed_tokens

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.held.pop(request.request_id)
            self.started.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _Nothing()

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class _Nothing(KVConnectorMetadata):
    """There is no worker to tell."""
