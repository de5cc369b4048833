"""Page-locked host memory for the row pools.

PyTorch's pinned allocator rounds every allocation up to a power of two (a 62 GiB pool would take 64 GiB, a 33 GiB one too),
so the pools are mapped, populated and registered here.
"""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sparsekv.profiles.errors import SparsekvError

REGISTER_CHUNK_BYTES = 32 * 1024**3
"""One `cudaHostRegister` call covers at most this much: single registrations above 64 GiB fail on some drivers."""

POPULATE_CHUNK_BYTES = 1024**3
MADV_POPULATE_WRITE = 23
"""Linux 5.14; older kernels refuse it and pages are then faulted in by the registration itself."""

MPOL_PREFERRED = 1
SYS_MBIND = 237
"""mbind(2) on x86-64, the only architecture vLLM's CUDA wheels and consumer boards share here."""


def allocate_pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Maps `num_bytes` of anonymous memory near `device`, page-locks it, and returns it as uint8 `[num_bytes]` on the CPU.

    The memory is private to the process: whatever kills the process also frees it.

    Raises:
        SparsekvError: the memory cannot be mapped or page-locked. A pool that is not page-locked is unreadable
            for the GPU, so there is no fall-back.
    """
    try:
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise SparsekvError(
            f"cannot map {num_bytes / 2**30:.1f} GiB of host memory: {error}",
            hint="lower kv.pool in the profile or free memory",
        ) from error
    region.madvise(mmap.MADV_HUGEPAGE)
    pool = torch.frombuffer(region, dtype=torch.uint8)
    _prefer_numa_node(pool, _numa_node(device))
    _populate(pool)
    for start in range(0, num_bytes, REGISTER_CHUNK_BYTES):
        size = min(REGISTER_CHUNK_BYTES, num_bytes - start)
        status = torch.cuda.cudart().cudaHostRegister(pool.data_ptr() + start, size, 0)
        if int(status) != 0:
            raise SparsekvError(
                f"cudaHostRegister refused {size / 2**30:.1f} GiB at offset {start / 2**30:.1f} GiB of the KV pool: {status}",
                hint="run `sparsekv doctor` for the limits (ulimit -l, cgroup memory, WSL2), or lower kv.pool in the profile",
            )
    return pool


def _populate(pool: torch.Tensor) -> None:
    """Faults all pages in with several threads: registration alone does it with one, at about 2.5 GB/s."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    chunks = [(pool.data_ptr() + s, min(POPULATE_CHUNK_BYTES, pool.nbytes - s)) for s in range(0, pool.nbytes, POPULATE_CHUNK_BYTES)]
    with ThreadPoolExecutor(max_workers=8) as threads:
        list(threads.map(lambda chunk: libc.madvise(*chunk, MADV_POPULATE_WRITE), chunks))


def _numa_node(device: torch.device) -> int:
    """The NUMA node the GPU hangs on, or -1 where the kernel does not say."""
    p = torch.cuda.get_device_properties(device)
    path = Path(f"/sys/bus/pci/devices/{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0/numa_node")
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _prefer_numa_node(pool: torch.Tensor, node: int) -> None:
    """Asks for pages on `node` first; crossing sockets costs bandwidth, running out of one node must not fail the pool."""
    if node < 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << (node % 64)
    libc.syscall(SYS_MBIND, ctypes.c_void_p(pool.data_ptr()), ctypes.c_ulong(pool.nbytes), MPOL_PREFERRED, mask, 1024, 0)
