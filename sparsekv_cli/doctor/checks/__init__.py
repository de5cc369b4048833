"""Every check, in the order in which they run and are shown. A new one is a file here and a line below."""

from __future__ import annotations

from ..check import Check
from . import (
    gpu_display,
    gpu_driver,
    gpu_ecc,
    gpu_memory,
    gpu_mig,
    gpu_model,
    gpu_module,
    gpu_power,
    gpu_processes,
    gpu_xid,
    live_coverage,
    live_hot_hits,
    live_pool,
    live_preemptions,
    live_prefix_cache,
    live_server,
    live_speculation,
    live_waiting,
    memory_available,
    memory_hugepages,
    memory_numa,
    memory_pinned,
    memory_shm,
    memory_swap,
    model_basis,
    model_code,
    model_files,
    model_parsers,
    model_tokenizer,
    pcie_link,
    pcie_p2p,
    pcie_rates,
    server_exposure,
    server_port,
    software_cuda,
    software_environment,
    software_kernels_name,
    software_patches,
    software_plugin,
    software_versions,
    system_cpu,
    system_disk,
    system_leftovers,
    system_platform,
)

MACHINE: tuple[Check, ...] = tuple(
    module.CHECK
    for module in (
        gpu_driver,
        gpu_model,
        gpu_memory,
        gpu_processes,
        gpu_display,
        gpu_mig,
        gpu_ecc,
        gpu_xid,
        gpu_power,
        gpu_module,
        pcie_link,
        pcie_rates,
        pcie_p2p,
        memory_available,
        memory_pinned,
        memory_shm,
        memory_swap,
        memory_numa,
        memory_hugepages,
        system_platform,
        system_cpu,
        system_disk,
        system_leftovers,
        software_versions,
        software_cuda,
        software_plugin,
        software_patches,
        software_kernels_name,
        software_environment,
        model_files,
        model_tokenizer,
        model_parsers,
        model_code,
        model_basis,
        server_port,
        server_exposure,
    )
)
"""Is this machine fit to serve the profile?"""

LIVE: tuple[Check, ...] = tuple(
    module.CHECK
    for module in (
        live_server,
        live_waiting,
        live_pool,
        live_hot_hits,
        live_coverage,
        live_preemptions,
        live_prefix_cache,
        live_speculation,
    )
)
"""How is the server at `--url` doing?"""
