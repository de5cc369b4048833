"""Measures each card and prints one JSON line per card; `probe` runs it as a process.

The gather is the product's own: `kernels.fetch` brings random rows of the given sizes out of a page-locked pool.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

POOL_BYTES = 2 * 2**30
GATHER_ROWS = 65_536
MIN_SECONDS = 0.5


def main() -> None:
    request = json.loads(sys.argv[1])
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuid for uuid, _ in request["cards"])
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device: " + (f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"))
    for index, (uuid, bus_id) in enumerate(request["cards"]):
        print(json.dumps({"uuid": uuid, **_measure(index, bus_id, request["rows"])}), flush=True)


def _measure(index: int, bus_id: str, rows: list[int]) -> dict[str, Any]:
    import torch

    from sparsekv.engine.host_memory import allocate_pinned

    device = torch.device("cuda", index)
    found: dict[str, Any] = {"problems": []}

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            found["problems"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None

    with torch.cuda.device(device):
        pool = attempt("page-locking", lambda: allocate_pinned(POOL_BYTES, device))
        if pool is None:
            return found
        found["pinned_bytes"] = pool.nbytes
        pool.fill_(0x3C)
        link = _Link(bus_id)
        with link:
            found["copy_rate"] = attempt("copy", lambda: _copy_rate(pool, device))
        found["link_gen"], found["link_width"] = link.generation, link.width
        rates = {size: attempt(f"gather of {size} B rows", partial(_gather_rate, pool, size, device)) for size in rows}
        found["gather_rates"] = {size: rate for size, rate in rates.items() if rate is not None}
    return found


def _copy_rate(pool: Any, device: Any) -> float:
    """Large contiguous copies: what the link can carry."""
    import torch

    source = pool[: POOL_BYTES // 4]
    target = torch.empty_like(source, device=device)
    return _rate(lambda: target.copy_(source, non_blocking=True), source.nbytes)


def _gather_rate(pool: Any, row_bytes: int, device: Any) -> float:
    return _rate(gather(pool, row_bytes, device), GATHER_ROWS * row_bytes)


def _rate(run: Callable[[], Any], moved: int) -> float:
    """Bytes per second of a repeated operation, after one warm-up."""
    import torch

    run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    runs, started = 0, time.monotonic()
    begin.record()
    while time.monotonic() - started < MIN_SECONDS:
        run()
        runs += 1
        if runs % 8 == 0:
            torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    return runs * moved / (begin.elapsed_time(end) / 1e3)


def gather(pool: Any, row_bytes: int, device: Any, total: int = GATHER_ROWS) -> Callable[[], Any]:
    """A fetch that finds nothing on the card: `total` distinct random rows, those of 8 requests with 4 heads each.

    Args:
        pool: `[bytes]` uint8, page-locked host memory for a GPU.
        total: a multiple of 32.
    """
    import torch

    from sparsekv.kernels.fetch import HotSet, fetch
    from sparsekv.kernels.sketch import Selection

    requests, heads, count = 8, 4, total // 32
    layout = _layout(row_bytes, heads)
    blocks = pool.numel() // (heads * layout.block_size * row_bytes) // requests
    shape = layout.rows_shape(blocks * requests)
    rows = pool[: torch.Size(shape).numel()].view(shape)
    table = torch.randperm(blocks * requests, device=device).view(requests, blocks).int()
    tokens = blocks * layout.block_size
    indices = torch.stack([torch.randperm(tokens, device=device)[:count].sort().values for _ in range(requests * heads)])
    counts = torch.full((requests, heads), count, dtype=torch.int32, device=device)
    selection = Selection(indices.int().view(requests, heads, count), counts, torch.ones(requests, heads, device=device))
    hot = HotSet.allocate(layout, 2 * total, total, device)

    def run() -> Any:
        hot.entries.fill_(-1)
        return fetch(selection, table, rows, layout, hot)

    return run


def _layout(row_bytes: int, heads: int) -> Any:
    from sparsekv.kernels.layout import KVLayout

    for row_format in ("bf16", "int8", "int4"):
        for head_dim in (64, 80, 96, 128, 160, 192, 256, 512):
            layout = KVLayout(num_q_heads=heads, num_kv_heads=heads, head_dim=head_dim, row_format=row_format, sketch_rank=16)
            if layout.row_bytes == row_bytes:
                return layout
    raise ValueError(f"no row format has {row_bytes} B rows")


class _Link:
    """The card's PCIe link as the kernel states it, sampled while something crosses it: idle links slow down."""

    def __init__(self, bus_id: str) -> None:
        self._folder = Path(f"/sys/bus/pci/devices/{bus_id}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.generation: int | None = None
        self.width: int | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2)

    def _sample(self) -> None:
        speeds = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
        while not self._stop.wait(0.05):
            try:
                speed = speeds.get((self._folder / "current_link_speed").read_text().split()[0])
                width = int((self._folder / "current_link_width").read_text())
            except (OSError, ValueError, IndexError):
                return
            self.generation = max(self.generation or 0, speed or 0) or None
            self.width = max(self.width or 0, width) or None


if __name__ == "__main__":
    main()
