"""fetch: whatever the hot set holds, the rows it returns are the rows of the pool."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels import fetch as op
from sparsekv.kernels.fetch import HotSet, kernel
from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.sketch import Selection


class Pool:
    """A pool of random rows; `pick` makes a selection out of it and `check` compares what fetch returned."""

    def __init__(self, device, *, requests=3, heads=2, blocks=9, dim=64, row_format="int8", block_size=128, shared=False, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.layout = KVLayout(heads * 3, heads, dim, row_format, sketch_rank=32, block_size=block_size)
        self.rows = torch.randint(
            256, self.layout.rows_shape(blocks * (1 if shared else requests)), dtype=torch.uint8, generator=self.generator
        )
        table = torch.randperm(self.rows.shape[0], generator=self.generator)
        self.table = (table.repeat(requests, 1) if shared else table.view(requests, blocks)).int().to(device)
        self.rows = self.rows.to(device)
        self.device, self.tokens = device, blocks * block_size

    def pick(self, counts, capacity):
        """A selection of `counts[r]` (a number, or one per head) random tokens, ascending; the tail is garbage."""
        requests, heads = len(counts), self.layout.num_kv_heads
        indices = torch.full((requests, heads, capacity), 2**31 - 1, dtype=torch.int32)
        sizes = torch.tensor([n if isinstance(n, tuple) else (n,) * heads for n in counts], dtype=torch.int32)
        for request in range(requests):
            for head in range(heads):
                size = sizes[request, head]
                indices[request, head, :size] = torch.randperm(self.tokens, generator=self.generator)[:size].sort().values.int()
        mass = torch.ones(requests, heads)
        return Selection(indices.to(self.device), sizes.to(self.device), mass.to(self.device))

    def hot(self, capacity, selection_rows):
        hot = HotSet.allocate(self.layout, capacity, selection_rows, self.device)
        hot.rows.fill_(0xFF)
        return hot

    def check(self, selection, row_index, hot):
        pool_index = op.pool_row_index_reference(selection, self.table[: len(selection.counts)], self.layout).cpu()
        row_index, used = row_index.cpu(), pool_index >= 0
        assert (row_index[~used] == -1).all()
        expected = self.rows.cpu().view(-1, self.layout.row_bytes)[pool_index[used].long()]
        assert torch.equal(hot.rows.cpu()[row_index[used].long()], expected)


@pytest.fixture
def fetch(backend):
    return op.fetch_reference if backend == "reference" else kernel.fetch


@pytest.fixture
def invalidate(backend):
    return op.invalidate_reference if backend == "reference" else kernel.invalidate


@pytest.mark.parametrize(("row_format", "dim"), [("int8", 64), ("int4", 256), ("int8", 256), ("bf16", 128), ("int4", 64)])
def test_rows_arrive_and_stay(fetch, device, row_format, dim):
    pool = Pool(device, row_format=row_format, dim=dim)
    hot = pool.hot(2048, 3 * 2 * 40)
    selection = pool.pick([40, (0, 17), 1], 40)
    pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
    total = int(selection.counts.sum())
    assert hot.counters.tolist() == [0, total, 0]
    pool.rows.fill_(0)  # a second look must not touch the pool
    kept = fetch(selection, pool.table, pool.rows, pool.layout, hot)
    assert hot.counters.tolist() == [total, total, 0]
    used = kept >= 0
    assert int(used.sum()) == total
    assert hot.rows[kept[used].long()].any()


def test_drifting_selection_reads_only_what_is_new(fetch, device):
    pool = Pool(device, requests=2)
    hot = pool.hot(4096, 2 * 2 * 64)
    for step in range(6):
        selection = pool.pick([64, 64], 64)
        selection.indices[..., :48] = torch.arange(48, dtype=torch.int32) * 3 + step // 3
        selection.indices.copy_(selection.indices.sort().values)
        pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
    found, brought, bypassed = hot.counters.tolist()
    assert found + brought == 6 * 2 * 2 * 64
    assert found >= 4 * 2 * 2 * 48
    assert bypassed == 0


@pytest.mark.parametrize("capacity", [16, 32, 64])
def test_step_larger_than_the_set_goes_to_staging(fetch, device, capacity):
    pool = Pool(device)
    hot = pool.hot(capacity, 3 * 2 * 100)
    for _ in range(3):
        selection = pool.pick([100, 100, (3, 77)], 100)
        pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
    assert hot.counters[2] >= 3 * (480 - capacity)


def test_rows_of_this_step_are_never_evicted_by_it(fetch, device):
    pool = Pool(device, requests=1, heads=1)
    hot = pool.hot(16, 24)
    first = pool.pick([12], 24)
    fetch(first, pool.table, pool.rows, pool.layout, hot)
    both = pool.pick([24], 24)
    both.indices[0, 0, :12] = first.indices[0, 0, :12]
    both.indices[0, 0, 12:24] = torch.tensor([t for t in range(30) if t not in first.indices[0, 0, :12].tolist()][:12])
    both.indices[0, 0] = both.indices[0, 0].sort().values
    pool.check(both, fetch(both, pool.table, pool.rows, pool.layout, hot), hot)
    assert hot.counters.tolist() == [12, 24, 8]


def test_least_recently_used_goes_first(fetch, device):
    pool = Pool(device, requests=1, heads=1)
    hot = pool.hot(16, 8)

    def step(start):
        selection = pool.pick([8], 8)
        selection.indices[0, 0] = torch.arange(start, start + 8)
        pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
        return hot.counters[0].item()

    step(0)
    step(100)
    assert step(0) == 8  # 100.. is now the older half
    step(200)
    assert step(0) == 16
    assert step(100) == 16


def test_clock_wraps(fetch, device):
    pool = Pool(device, requests=1, heads=1)
    hot = pool.hot(16, 8)
    hot.clock.fill_(2**31 - 3)
    for step in range(6):
        selection = pool.pick([8], 8)
        selection.indices[0, 0] = torch.arange(8) + 8 * (step % 2)
        pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
    assert hot.counters.tolist() == [32, 16, 0]


def test_rewritten_slots_are_read_again(fetch, invalidate, device):
    pool = Pool(device, requests=2, shared=True)
    hot = pool.hot(1024, 2 * 2 * 64)
    selection = pool.pick([64, 64], 64)
    selection.indices[1] = selection.indices[0]
    fetch(selection, pool.table, pool.rows, pool.layout, hot)
    token = selection.indices[0, 0, ::4].long()
    slots = pool.table[0].long()[token // 128] * 128 + token % 128
    pool.rows[slots // 128, :, slots % 128] ^= 0x55
    padded = torch.cat([slots, torch.full((3,), -1, device=device)])
    invalidate(padded, pool.layout, hot)
    pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)


def test_requests_sharing_rows(fetch, device):
    pool = Pool(device, requests=3, shared=True)
    hot = pool.hot(2048, 3 * 2 * 64)
    selection = pool.pick([64, 64, 64], 64)
    selection.indices[:] = selection.indices[0].clone()
    for _ in range(3):
        pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
    assert hot.counters[:2].sum() == 3 * 3 * 2 * 64
    assert 2 * 64 <= hot.counters[1] <= 3 * 2 * 64


def test_one_set_for_several_layers(fetch, device):
    pools = [Pool(device, seed=seed) for seed in range(3)]
    hot = pools[0].hot(2048, 3 * 2 * 32)
    rows_per_layer = pools[0].rows.shape[:3].numel()
    selections = [pool.pick([32, 32, 5], 32) for pool in pools]
    for _ in range(2):
        for layer, (pool, selection) in enumerate(zip(pools, selections, strict=True)):
            view = hot.for_layer(layer, rows_per_layer)
            pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, view), view)
    total = sum(int(selection.counts.sum()) for selection in selections)
    assert hot.counters.tolist() == [total, total, 0]


def test_nothing_selected_and_graph_padding(fetch, device):
    pool = Pool(device)
    hot = pool.hot(64, 3 * 2 * 128)
    pool.table[1:] = 2**31 - 1  # the table of a padded request may hold anything
    selection = pool.pick([0, 0, 0], 128)
    assert (fetch(selection, pool.table, pool.rows, pool.layout, hot) == -1).all()
    selection = pool.pick([7, 0, 0], 128)
    pool.check(selection, fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=6), st.sampled_from([16, 64, 256]))
def test_any_history(steps, capacity):
    pool = Pool("cpu", requests=2, heads=2, blocks=2, block_size=16)
    hot = pool.hot(capacity, 2 * 2 * 32)
    for first, second, rewrite in steps:
        selection = pool.pick([min(first, 32), min(second, 32)], 32)
        if rewrite:
            slots = torch.randint(-1, pool.rows.shape[0] * 16, (9,), generator=pool.generator)
            op.invalidate(slots, pool.layout, hot)
            written = slots[slots >= 0]
            pool.rows[written // 16, :, written % 16] += 1
        pool.check(selection, op.fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
    tags = hot.entries[hot.entries != -1] & 0xFFFFFFFF
    assert len(tags.unique()) == len(tags)


def test_clear_errors():
    pool = Pool("cpu")
    with pytest.raises(ValueError, match="at least 16"):
        pool.hot(8, 64)
    hot = pool.hot(64, 3 * 2 * 32)
    with pytest.raises(ValueError, match="staging"):
        op.fetch(pool.pick([1, 1, 1], 33), pool.table, pool.rows, pool.layout, hot)
    with pytest.raises(ValueError, match="bytes"):
        op.fetch(pool.pick([1, 1, 1], 8), pool.table, pool.rows, KVLayout(6, 2, 64, "int4", 32), hot)
    with pytest.raises(ValueError, match="31-bit"):
        hot.for_layer(4, 2**29)


@pytest.mark.gpu
class TestOnTheGPU:
    """What only real hardware shows: host memory read in place, large offsets, graphs, races."""

    def pinned(self, gib):
        """int8 rows of head_dim 256 in a pinned pool of four requests, full of NaN patterns."""
        pool = Pool.__new__(Pool)
        pool.generator = torch.Generator().manual_seed(0)
        pool.layout = KVLayout(24, 4, 256, "int8", sketch_rank=128)
        blocks = int(gib * 2**30) // (4 * 128 * pool.layout.row_bytes)
        pool.rows = torch.full(pool.layout.rows_shape(blocks), 0xFF, dtype=torch.uint8, pin_memory=True)
        pool.table = torch.randperm(blocks, generator=pool.generator)[: blocks // 4 * 4].view(4, -1).int().cuda()
        pool.device, pool.tokens = "cuda", pool.table.shape[1] * 128
        return pool

    def fill(self, pool, pool_rows):
        """Gives some rows contents of their own, free of 0xFF bytes."""
        flat = pool.rows.view(-1, pool.layout.row_bytes)
        flat[pool_rows] = torch.randint(128, (len(pool_rows), pool.layout.row_bytes), dtype=torch.uint8, generator=pool.generator)

    def test_pinned_pool_beyond_two_gib(self):
        pool = self.pinned(3)
        selection = pool.pick([2048, (2100, 7, 0, 1), 500, 2048], 2176)
        index = op.pool_row_index_reference(selection, pool.table, pool.layout)
        used = index[index >= 0].unique().long().cpu()
        assert int(used.max()) * pool.layout.row_bytes > 2**31
        self.fill(pool, used)
        hot = pool.hot(65536, selection.indices.numel())
        for _ in range(2):
            row_index = op.fetch(selection, pool.table, pool.rows, pool.layout, hot)
            pool.check(selection, row_index, hot)
            assert not (hot.rows[row_index[row_index >= 0].long()] == 0xFF).any()
        assert hot.counters.tolist()[:2] == [int(selection.counts.sum())] * 2

    @pytest.mark.parametrize("capacity", [64, 8192])
    def test_graph_replay_follows_its_inputs(self, capacity):
        """Selections, tables and rewritten rows change in place between replays of one graph."""
        pool = self.pinned(0.5)
        pool.tokens = 600
        self.fill(pool, torch.arange(pool.rows.shape[:3].numel()).view(-1, 4 * 128)[pool.table[:, :5].flatten().long().cpu()].flatten())
        static = pool.pick([300, 300, 300, 300], 384)
        hot = pool.hot(capacity, static.indices.numel())
        slots = torch.full((32,), -1, dtype=torch.int64, device="cuda")

        def step():
            op.invalidate(slots, pool.layout, hot)
            return op.fetch(static, pool.table, pool.rows, pool.layout, hot)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            row_index = step()
        for replay in range(12):
            fresh = pool.pick([300 - 20 * replay, (replay, 0, 384, 1), 300, 0], 384)
            static.indices.copy_(fresh.indices)
            static.counts.copy_(fresh.counts)
            pool.table.copy_(pool.table.roll(1, 0))
            token = torch.randperm(600, generator=pool.generator)[:32]
            rewritten = pool.table[2].cpu().long()[token // 128] * 128 + token % 128
            if replay % 2:
                rewritten[:8] = -1
            slots.copy_(rewritten)
            pool.rows[rewritten[8:] // 128, :, rewritten[8:] % 128] ^= 0x11
            graph.replay()
            torch.cuda.synchronize()
            pool.check(static, row_index, hot)

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("capacity", [16, 1024, 65536])
    def test_many_claims_at_once(self, shared, capacity):
        """Thousands of misses race for few sets; requests with one table race for the same rows."""
        pool = Pool("cuda", requests=8, heads=4, blocks=64, row_format="int4", dim=256, shared=shared)
        hot = pool.hot(capacity, 8 * 4 * 1024)
        for step in range(6):
            selection = pool.pick([1024] * 8, 1024)
            if shared:
                selection.indices.copy_(selection.indices[:1].expand_as(selection.indices).clone())
            pool.check(selection, op.fetch(selection, pool.table, pool.rows, pool.layout, hot), hot)
            found, brought, bypassed = hot.counters.tolist()
            assert found + brought == (step + 1) * 8 * 4 * 1024
            assert bypassed <= brought
            tags = hot.entries[hot.entries != -1] & 0xFFFFFFFF
            stamps = hot.entries[hot.entries != -1] >> 32
            assert int(stamps.max()) == step + 1
            if not shared:
                assert len(tags.unique()) == len(tags)
