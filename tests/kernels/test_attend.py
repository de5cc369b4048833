"""attend: exact attention over the selected rows, against float64 over plain keys and values."""

import pytest
import torch

from sparsekv.kernels.attend import attend as public_attend
from sparsekv.kernels.attend import attend_reference, kernel
from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.rows import dequantise_rows, quantise_rows
from sparsekv.kernels.sketch import Selection

POISON = 0xFF  # as bytes of bf16: NaN


class Case:
    """A batch whose rows lie scattered in a flat buffer, their scales in those of a pool; all else is poison."""

    def __init__(
        self, device, lengths, q_lens, counts, *, row_format="int8", dim=64, heads=2, group=3, capacity=None, tokens=None, dtype=torch.bfloat16, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        self.layout = KVLayout(heads * group, heads, dim, row_format, sketch_rank=32)
        requests = len(lengths)
        sizes = torch.tensor([n if isinstance(n, tuple) else (n,) * heads for n in counts], dtype=torch.int32)
        capacity = capacity or max(128, -(-int(sizes.max()) // 128) * 128)
        total = int(sizes.sum())
        self.flat_rows = torch.full((2 * total + 1, self.layout.row_bytes), POISON, dtype=torch.uint8)
        indices = torch.full((requests, heads, capacity), -1, dtype=torch.int32)
        row_index = torch.full((requests, heads, capacity), -1, dtype=torch.int32)
        free = torch.randperm(2 * total, generator=generator) + 1  # row 0 stays poisoned
        for request in range(requests):
            for head in range(heads):
                n = int(sizes[request, head])
                # Selections hold the newest tokens (the window), as a real one does.
                newest = torch.arange(max(0, lengths[request] - n // 2), lengths[request])[-n:] if n else torch.arange(0)
                older = torch.randperm(lengths[request] - len(newest), generator=generator)[: n - len(newest)]
                indices[request, head, :n] = torch.cat([older, newest]).sort().values.int() if tokens is None else torch.tensor(tokens)
                row_index[request, head, :n], free = free[:n].int(), free[n:]
        blocks = [-(-length // 128) for length in lengths]
        pool = torch.randperm(sum(blocks) + 3, generator=generator).int()
        self.block_table = torch.full((requests, max(*blocks, 1)), 2**31 - 1, dtype=torch.int32)
        for request, used in enumerate(blocks):
            self.block_table[request, :used], pool = pool[:used], pool[used:]
        key, value = (
            torch.randn(total, dim, generator=generator) * torch.rand(total, 1, generator=generator).mul(3).exp() for _ in range(2)
        )
        used = row_index[row_index >= 0].long()
        self.flat_rows[used], scales = quantise_rows(key.bfloat16(), value.bfloat16(), self.layout)
        self.row_scales = None
        if scales is not None:
            self.row_scales = torch.full(self.layout.row_scales_shape(sum(blocks) + 3), torch.nan)
            request, head, _ = (row_index >= 0).nonzero(as_tuple=True)
            token = indices[row_index >= 0].long()
            self.row_scales[self.block_table[request, token // 128].long(), head, token % 128] = scales
        self.plain = torch.zeros(2, len(self.flat_rows), dim)
        self.plain[:, used] = torch.stack(dequantise_rows(self.flat_rows[used], scales, self.layout))
        self.q_lens, self.lengths = q_lens, lengths
        self.query = torch.randn(sum(q_lens), heads * group, dim, generator=generator).to(dtype)
        self.start = torch.tensor([0, *q_lens]).cumsum(0).int()
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.selection = Selection(indices, sizes, torch.ones(requests, heads))
        self.row_index, self.scale, self.device = row_index, dim**-0.5, device

    def run(self, attend):
        d = self.device
        selection = Selection(self.selection.indices.to(d), self.selection.counts.to(d), self.selection.mass.to(d))
        out, lse = attend(
            self.query.to(d),
            self.start.to(d),
            self.seq_lens.to(d),
            self.block_table.to(d),
            self.flat_rows.to(d),
            None if self.row_scales is None else self.row_scales.to(d),
            self.row_index.to(d),
            selection,
            self.layout,
            self.scale,
        )
        return out.cpu(), lse.cpu()

    def expected(self):
        """One query at a time, in float64."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:2], -torch.inf, dtype=torch.float64)
        for request, (start, q_len, length) in enumerate(zip(self.start.tolist(), self.q_lens, self.lengths, strict=False)):
            for q in range(q_len):
                for head in range(self.query.shape[1]):
                    kv_head = head // self.layout.group_size
                    n = int(self.selection.counts[request, kv_head])
                    seen = self.selection.indices[request, kv_head, :n] <= length - q_len + q
                    key, value = self.plain[:, self.row_index[request, kv_head, :n][seen].long()]
                    if not seen.any():
                        continue
                    scores = key.double() @ self.query[start + q, head].double() * self.scale
                    out[start + q, head] = scores.softmax(0) @ value.double()
                    lse[start + q, head] = scores.logsumexp(0)
        return out, lse

    def check(self, attend):
        out, lse = self.run(attend)
        assert out.dtype == self.query.dtype
        expected, expected_lse = self.expected()
        # Errors of the kernel: bf16 probabilities and output; int4 also rounds the rotated query.
        tolerance = 1e-4 if self.query.dtype == torch.float32 else 2e-2
        spread = expected.abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
        assert torch.isfinite(out).all()
        assert ((out.double() - expected).abs() / spread).max() < tolerance
        empty = expected_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, empty)
        assert (out[empty] == 0).all()
        assert (lse.double() - expected_lse)[~empty].abs().max() < (1e-4 if self.query.dtype == torch.float32 else 3e-2)


@pytest.fixture
def attend(backend):
    return attend_reference if backend == "reference" else kernel.attend


FORMATS = ["bf16", "int8", "int4"]


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_formats_and_head_dims(attend, device, row_format, dim):
    Case(device, [300, 5000, 70], [1, 1, 1], [130, (97, 1), 70], row_format=row_format, dim=dim, seed=dim).check(attend)


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("q_len", range(2, 9))
def test_drafts_are_causal(attend, device, row_format, q_len):
    Case(device, [4000, q_len, 90], [q_len] * 3, [150, q_len, (90, 33)], row_format=row_format, seed=q_len).check(attend)


def test_ragged_query_lengths(attend, device):
    Case(device, [700, 30, 9, 50_000], [3, 1, 8, 2], [64, 30, 9, (129, 255)], seed=1).check(attend)


@pytest.mark.parametrize("group", [1, 2, 6, 7, 12])
def test_group_sizes(attend, device, group):
    Case(device, [200, 77], [4, 4], [100, 77], group=group, heads=1, row_format="int4", seed=group).check(attend)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 127, 128])
def test_counts_up_to_capacity(attend, device, count):
    Case(device, [262_144, 131], [1, 2], [count, (0, count)], capacity=128, seed=count).check(attend)


def test_empty_selection_and_graph_padding(attend, device):
    """Padded requests have no tokens; padded query rows lie beyond the last start. Both must come out as empty."""
    case = Case(device, [90, 40, 0, 0], [1, 1, 1, 1], [50, 0, 0, 0])
    case.check(attend)
    case = Case(device, [90, 40, 0, 0], [2, 2, 0, 0], [50, 40, 0, 0])
    case.query = torch.cat([case.query, torch.full((4, *case.query.shape[1:]), torch.nan, dtype=case.query.dtype)])
    case.check(attend)


def test_query_sees_only_later_tokens(attend, device):
    """Every selected token is a draft after the first query."""
    Case(device, [100], [3], [2], tokens=[98, 99]).check(attend)


@pytest.mark.parametrize("row_format", ["bf16", "int4"])
def test_long_dense_selection(attend, device, row_format):
    Case(device, [1300, 900], [1, 1], [1300, 900], row_format=row_format, capacity=1408).check(attend)


@pytest.mark.parametrize("row_format", FORMATS)
def test_float32_reference_is_exact(row_format):
    Case("cpu", [300, 70], [2, 1], [130, (70, 3)], row_format=row_format, dtype=torch.float32).check(public_attend)


def test_large_scores_do_not_overflow(attend, device):
    case = Case(device, [200], [1], [150])
    case.query *= 40
    case.scale = 1.0
    out, lse = case.run(attend)
    _, expected_lse = case.expected()
    assert torch.isfinite(out).all()
    assert ((lse.double() - expected_lse).abs() / expected_lse.abs()).max() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("row_format", FORMATS)
def test_rows_beyond_two_gib(row_format):
    case = Case("cuda", [4000, 3000], [2, 1], [1500, (900, 3)], row_format=row_format, dim=256, heads=2)
    far = torch.full((5 * 2**29 // case.layout.row_bytes, case.layout.row_bytes), POISON, dtype=torch.uint8, device="cuda")
    offset = len(far) - len(case.flat_rows)
    assert offset * case.layout.row_bytes > 2**31
    far[offset:] = case.flat_rows.cuda()
    expected, expected_lse = case.run(public_attend)
    case.row_index = torch.where(case.row_index >= 0, case.row_index + offset, -1)
    case.flat_rows = far
    out, lse = case.run(public_attend)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("row_format", FORMATS)
def test_graph_replay_follows_its_inputs(row_format):
    """One graph for a uniform batch serves every count, length and padding."""
    batches = [
        (4, [5000, 70, 900, 2], [1000, 70, (1, 900), 2]),
        (2, [300, 20, 0, 0], [(7, 128), 20, 0, 0]),
        (3, [9, 4096, 2, 0], [9, 1024, 1, 0]),
    ]
    cases = [
        Case("cuda", lengths, [2] * real + [0] * (4 - real), counts, row_format=row_format, dim=128, capacity=1024, seed=real)
        for real, lengths, counts in batches
    ]
    layout = cases[0].layout
    shapes = {
        "query": (8, 6, 128),
        "start": (5,),
        "seq_lens": (4,),
        "block_table": (4, 64),
        "flat_rows": (20_000, layout.row_bytes),
        "row_scales": layout.row_scales_shape(64),
        "row_index": (4, 2, 1024),
    }
    static = {
        name: None if getattr(cases[0], name) is None else torch.zeros(shape, dtype=getattr(cases[0], name).dtype, device="cuda")
        for name, shape in shapes.items()
    }
    indices, counts = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((4, 2, 1024), (4, 2)))
    selection = Selection(indices, counts, torch.ones(4, 2, device="cuda"))

    def step():
        return public_attend(*static.values(), selection, layout, cases[0].scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for case in [*cases, cases[0]]:
        for name, tensor in static.items():
            if tensor is not None:
                value = getattr(case, name)
                part = tensor[: len(value), : value.shape[1]] if name == "block_table" else tensor[: len(value)]
                part.copy_(value)
        selection.indices.copy_(case.selection.indices)
        selection.counts.copy_(case.selection.counts)
        out.fill_(torch.nan)
        graph.replay()
        used = len(case.query)
        case.check(lambda *_, used=used: (out[:used].clone(), lse[:used].clone()))
        assert (out[used:] == 0).all()
        assert (lse[used:] == -torch.inf).all()


@pytest.mark.gpu
def test_same_bits_every_time():
    case = Case("cuda", [9000, 400, 5000], [3, 1, 8], [2200, 400, 1999], dim=256)
    out, lse = case.run(public_attend)
    for _ in range(5):
        again, lse_again = case.run(public_attend)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)
