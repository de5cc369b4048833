"""Compiles the kernels for a card that is not there: `python compile_ops.py 80`. Prints each kernel's shared memory.

Launches become compilations for the architecture, so the specialisations are those of real calls. Run by test_compile.py in a
process of its own, as the other tests run Triton's interpreter.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MAX_SHARED = 99 * 1024
"""What a block may use on consumer cards (compute capability 8.6 and 8.9)."""


class AbsentCard:
    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ops() -> Iterator[tuple[str, Callable[[], Any]]]:
    from sparsekv.kernels.attend import kernel as attend
    from sparsekv.kernels.fetch import HotSet
    from sparsekv.kernels.fetch import kernel as fetch
    from sparsekv.kernels.layout import KVLayout
    from sparsekv.kernels.merge import kernel as merge
    from sparsekv.kernels.policy import SelectionPolicy
    from sparsekv.kernels.select import kernel as select
    from sparsekv.kernels.sketch import Selection, Sketch, SketchBasis
    from sparsekv.kernels.stage import kernel as stage
    from sparsekv.kernels.tally import kernel as tally
    from sparsekv.kernels.write import kernel as write

    blocks, requests, policy = 8, 2, SelectionPolicy()
    starts, seq_lens = torch.zeros(requests + 1, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
    table = torch.zeros(requests, 2048, dtype=torch.int32)
    small, large = KVLayout(9, 3, 64, "int8", 32), KVLayout(24, 4, 256, "int8", 128)

    def sketch_of(layout: KVLayout) -> tuple[Sketch, SketchBasis]:
        heads, dim, rank = layout.num_kv_heads, layout.head_dim, layout.sketch_rank
        maps, codes = torch.zeros(heads, dim, rank), torch.zeros(layout.codes_shape(blocks), dtype=torch.uint8)
        scales = torch.zeros(layout.scales_shape(blocks), dtype=torch.float16)
        return Sketch(codes, scales), SketchBasis(torch.zeros(heads, dim), maps, maps)

    def choose(layout: KVLayout, representatives: int) -> None:
        query = torch.zeros(16, layout.num_q_heads, layout.head_dim, dtype=torch.bfloat16)
        select.select(query, starts, seq_lens, table, *sketch_of(layout), layout, policy, layout.head_dim**-0.5, representatives)

    for representatives in (1, 2):
        yield f"select 27B x{representatives}", partial(choose, large, representatives)
    for rank, bits in itertools.product((16, 32, 64, 128), (4, 8)):
        yield f"select rank {rank} int{bits}", partial(choose, replace(small, sketch_rank=rank, sketch_bits=bits), 1)

    for shape, row_format in itertools.product((small, large), ("bf16", "int8", "int4")):
        layout = replace(shape, row_format=row_format)
        heads, dim, capacity = layout.num_kv_heads, layout.head_dim, policy.capacity
        rows = torch.zeros(layout.rows_shape(blocks), dtype=torch.uint8)
        row_scales = torch.zeros(layout.row_scales_shape(blocks)) if layout.has_scales else None
        index = torch.zeros(requests, heads, capacity, dtype=torch.int32)
        selection = Selection(index, torch.zeros(requests, heads, dtype=torch.int32), torch.zeros(requests, heads))
        hot = HotSet.allocate(layout, 1024, index.numel(), "cpu")
        name, flat_rows = f"head_dim {dim} {row_format}", rows.view(-1, layout.row_bytes)
        for queries in (1, 8):
            query = torch.zeros(queries * requests, layout.num_q_heads, dim, dtype=torch.bfloat16)
            arguments = (query, starts, seq_lens, table, flat_rows, row_scales, index, selection, layout, dim**-0.5)
            yield f"attend {name} x{queries}", partial(attend.attend, *arguments)
        yield f"fetch {name}", partial(fetch.fetch, selection, table, rows, layout, hot)
        key, slots = torch.zeros(16, heads, dim, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int64)
        yield f"write {name}", partial(write.write, key, key, slots, rows, row_scales, layout, *sketch_of(layout), hot)
        yield f"stage {name}", partial(stage.stage, rows, row_scales, table, 0, 100, 900, layout, key, key)

    out, lse = torch.zeros(4, 24, 256, dtype=torch.bfloat16), torch.zeros(4, 24)
    yield "merge", lambda: merge.merge(out, lse, out, lse)
    yield "pool_row_index", lambda: fetch.pool_row_index(selection, table, large)
    yield "invalidate", lambda: fetch.invalidate(torch.zeros(4, dtype=torch.int64), large, hot)
    yield "tally", lambda: tally.tally(selection.counts, selection.mass, seq_lens, 4096, torch.zeros(6, dtype=torch.float64))


def main() -> None:
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    driver.set_active(AbsentCard(int(sys.argv[1])))
    launch, failed, current = JITFunction.run, False, ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        nonlocal failed
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        shared = compiled.metadata.shared
        failed |= shared > MAX_SHARED
        print(f"{current}: {self.__name__} {shared} B shared{' TOO MUCH' if shared > MAX_SHARED else ''}")
        return compiled

    JITFunction.run = compile_only
    for current, call in ops():
        try:
            call()
        except Exception as error:
            failed = True
            print(f"{current}: FAILED {type(error).__name__}: {error}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
