"""select: the reference against brute force and its own promises."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.policy import SelectionPolicy
from sparsekv.kernels.select import kernel, select, select_reference
from sparsekv.kernels.select.reference import exp2_table, key_weight, project_queries, token_weights, weight_key
from sparsekv.kernels.sketch import Selection, Sketch, SketchBasis, encode_keys

LAYOUT = KVLayout(num_q_heads=6, num_kv_heads=2, head_dim=64, row_format="int8", sketch_rank=32)
POLICY = SelectionPolicy(min_tokens=64, max_tokens=192, sink_tokens=4, window_tokens=32, run_hits=8, dense_below=300)


class Case:
    """Random requests over a shuffled block table, with keys that attend unevenly."""

    def __init__(self, lengths: list[int], query_lens: list[int], layout: KVLayout = LAYOUT, seed: int = 0, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        heads, dim, size = layout.num_kv_heads, layout.head_dim, layout.block_size
        self.layout, self.lengths = layout, lengths
        tiles = max(1, max(-(-n // size) for n in lengths))
        blocks = len(lengths) * tiles + 3
        self.basis = SketchBasis(randn(heads, dim), randn(heads, dim, layout.sketch_rank) / 8, randn(heads, dim, layout.sketch_rank) / 8)
        self.block_table = torch.randperm(blocks, generator=generator)[: len(lengths) * tiles].view(len(lengths), tiles).to(torch.int32)
        keys = randn(blocks * size, heads, dim) * (1 + randn(blocks * size, 1, 1).abs())
        codes, scales = encode_keys(keys, self.basis, layout)
        self.sketch = Sketch(
            codes.view(blocks, size, heads, -1).transpose(1, 2).contiguous(), scales.view(blocks, size, heads).transpose(1, 2).contiguous()
        )
        self.query = randn(max(1, sum(query_lens)), layout.num_q_heads, dim) * spread
        self.query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)

    def select(self, policy: SelectionPolicy = POLICY, representatives: int = 2) -> Selection:
        return select(
            self.query,
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.sketch,
            self.basis,
            self.layout,
            policy,
            representatives=representatives,
        )


def chosen(selection: Selection, request: int, head: int) -> list[int]:
    count = int(selection.counts[request, head])
    assert selection.indices[request, head, count:].eq(-1).all()
    return selection.indices[request, head, :count].tolist()


@pytest.mark.parametrize("length", [1, 3, 127, 128, 129, 299, 300, 301, 511, 512, 513, 2000])
def test_every_length_gives_a_valid_set(length: int) -> None:
    case = Case([length], [1], seed=length)
    selection = case.select()
    for head in range(2):
        tokens = chosen(selection, 0, head)
        assert tokens == sorted(set(tokens))
        assert tokens[0] >= 0
        assert tokens[-1] == length - 1
        if length <= POLICY.dense_below:
            assert tokens == list(range(length))
            assert selection.mass[0, head] == 1.0
        else:
            forced = {*range(4), *range(length - 32, length)}
            assert forced <= set(tokens)
            assert min(64, length - 36) <= len(tokens) - 36 <= 192 + 32


def test_weights_match_a_float64_softmax_of_the_sketch_scores() -> None:
    case = Case([700], [3], seed=5)
    queries = project_queries(case.query, case.query_start_loc, case.seq_lens, case.basis, LAYOUT, 0.125, 2)
    weights = token_weights(queries, 0, 700, case.block_table[0], case.sketch, LAYOUT).double() / 2**30
    from sparsekv.kernels.sketch import decode_codes

    blocks = case.block_table[0].long()
    codes = (decode_codes(case.sketch.codes[blocks], LAYOUT).double() * case.sketch.scales[blocks].double()[..., None]).transpose(0, 1)
    codes = codes.reshape(2, -1, 32)[:, :700]
    q = case.query[[2, 0]].double().view(2, 2, 3, 64).transpose(0, 1)
    scores = torch.einsum("hpgd,hdr,htr->hpgt", q, case.basis.query_map.double(), codes) * 0.125
    scores[:, 1, :, 698:] = float("-inf")
    want = scores.softmax(-1).mean((1, 2))
    assert (weights.sum(1) - 1).abs().max() < 0.01
    big = want > 1e-4
    assert (weights[big] / want[big]).log2().abs().max() < 0.2
    assert (weights[big] / want[big]).log2().abs().mean() < 0.05
    assert weights[~big].max() < 1.2e-4


def test_selected_tokens_are_the_strongest_and_ties_go_by_index() -> None:
    case = Case([1500], [1], seed=7)
    policy = replace(POLICY, run_hits=0)
    selection = case.select(policy)
    queries = project_queries(case.query, case.query_start_loc, case.seq_lens, case.basis, LAYOUT, 0.125, 1)
    keys = weight_key(token_weights(queries, 0, 1500, case.block_table[0], case.sketch, LAYOUT))
    for head in range(2):
        tokens = chosen(selection, 0, head)
        free = list(range(4, 1500 - 32))
        ranked = sorted(free, key=lambda t: (-int(keys[head, t]), t))
        picked = [t for t in tokens if 4 <= t < 1500 - 32]
        assert picked == sorted(ranked[: len(picked)])


def test_equal_keys_select_the_first_tokens() -> None:
    case = Case([1000], [1])
    case.sketch.codes.zero_()
    tokens = chosen(case.select(replace(POLICY, run_hits=0)), 0, 0)
    assert tokens == [*range(4 + 192), *range(1000 - 32, 1000)]


def test_runs_surround_the_strongest_hits() -> None:
    case = Case([1500], [1], seed=9)
    without = set(chosen(case.select(replace(POLICY, run_hits=0)), 0, 1))
    with_runs = set(chosen(case.select(replace(POLICY, run_hits=8, run_radius=2)), 0, 1))
    assert without < with_runs
    added = with_runs - without
    assert len(added) <= 32
    assert all(any(abs(a - t) <= 2 for t in without) for a in added)


def test_mass_budget_between_its_bounds() -> None:
    case = Case([3000], [1], seed=3, spread=6.0)
    small, large = (case.select(replace(POLICY, mass=m, min_tokens=1, max_tokens=2000)) for m in (0.5, 0.95))
    assert (small.counts < large.counts).all()
    assert (small.mass >= 0.499).all()
    assert (small.mass < 0.9).all()
    assert (large.mass >= 0.949).all()
    queries = project_queries(case.query, case.query_start_loc, case.seq_lens, case.basis, LAYOUT, 0.125, 1)
    weights = token_weights(queries, 0, 3000, case.block_table[0], case.sketch, LAYOUT).double() / 2**30
    for head in range(2):
        assert weights[head, chosen(small, 0, head)].sum() >= 0.49


def test_planted_token_is_found() -> None:
    case = Case([4000], [1], seed=11)
    target = 1234
    key = torch.einsum("hgd,hdr->hr", case.query[0].view(2, 3, 64), case.basis.query_map)
    block, offset = int(case.block_table[0, target // 128]), target % 128
    codes = torch.round(key / key.abs().amax(1, keepdim=True) * 7).to(torch.int8).view(torch.uint8) & 0xF
    case.sketch.codes[block, :, offset] = codes[:, 0::2] | (codes[:, 1::2] << 4)
    case.sketch.scales[block, :, offset] = 4.0
    selection = case.select()
    for head in range(2):
        assert {target - 2, target - 1, target, target + 1, target + 2} <= set(chosen(selection, 0, head))


def test_a_request_does_not_depend_on_its_batch() -> None:
    batch = Case([3, 2500, 0, 900, 301], [1, 4, 0, 1, 2], seed=13)
    together = batch.select()
    assert together.counts[2].eq(0).all()
    assert together.indices[2].eq(-1).all()
    for r, (start, end) in enumerate(batch.query_start_loc.unfold(0, 2, 1).tolist()):
        if end > start:
            alone = select(
                batch.query[start:end],
                torch.tensor([0, end - start]),
                batch.seq_lens[r : r + 1],
                batch.block_table[r : r + 1],
                batch.sketch,
                batch.basis,
                LAYOUT,
                POLICY,
            )
            assert torch.equal(alone.indices[0], together.indices[r])
            assert torch.equal(alone.mass[0], together.mass[r])


def test_unallocated_table_entries_are_never_read() -> None:
    case = Case([3, 1000], [1, 1], seed=17)
    before = case.select()
    case.block_table[0, 1:] = 2**30
    assert torch.equal(case.select().indices, before.indices)


def test_exp2_is_far_from_every_rounding_boundary() -> None:
    """GPU exp2 is off by at most 2 units in 2^23: rounded to 16 bits it must always give the table's value."""
    exact = torch.exp2(-torch.arange(8, dtype=torch.float64) / 8) * 2.0**16
    assert ((exact - exact.floor() - 0.5).abs()[1:] > 2.0**16 * 2.0**-21).all()
    assert torch.equal(exp2_table()[8:16] * 2, exp2_table()[:8])


def test_keys_are_monotone_and_invert_to_their_lower_edge() -> None:
    weights = torch.cat((torch.arange(5000), 2 ** torch.arange(0, 31), torch.randint(0, 2**30, (5000,)))).sort().values
    keys = weight_key(weights)
    assert (keys.diff() >= 0).all()
    assert keys.min() >= 0
    assert keys.max() < 2047
    assert (key_weight(keys) <= weights.float().long().clamp_min(weights)).all()
    assert ((key_weight(keys) + 1) * (1 + 1 / 64) + 1 >= weights).all()


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 1500),
    query_len=st.integers(1, 8),
    seed=st.integers(0, 2**16),
    policy=st.builds(
        SelectionPolicy,
        min_tokens=st.integers(0, 100),
        max_tokens=st.integers(100, 400),
        mass=st.floats(0.0, 1.0),
        sink_tokens=st.integers(0, 16),
        window_tokens=st.integers(0, 64),
        run_hits=st.integers(0, 32),
        run_radius=st.integers(0, 4),
        dense_below=st.integers(0, 600),
    ),
)
def test_promises_hold_for_any_policy(length: int, query_len: int, seed: int, policy: SelectionPolicy) -> None:
    query_len = min(query_len, length)
    selection = Case([length], [query_len], seed=seed).select(policy)
    for head in range(2):
        tokens = chosen(selection, 0, head)
        assert tokens == sorted(set(tokens))
        assert set(tokens) <= set(range(length))
        if length <= policy.dense_below:
            assert len(tokens) == length
            continue
        window = max(policy.window_tokens, query_len)
        forced = {t for t in range(length) if t < policy.sink_tokens or t >= length - window}
        assert forced <= set(tokens)
        free = len(tokens) - len(forced)
        assert min(policy.min_tokens, length - len(forced)) <= free <= policy.max_tokens + policy.run_hits * 2 * policy.run_radius
        assert 0 <= selection.mass[0, head] <= 1.0001


@pytest.mark.parametrize("seed", range(9))
def test_triton_equals_the_reference_to_the_last_token(backend: str, device: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 3, 127, 128, 129, 299, 300, 301, 700, 2047, 2048, 2049, 3000, 4500]) for _ in range(rng.randrange(1, 4))]
    query_lens = [rng.choice([1, min(n, rng.randrange(1, 9))]) for n in lengths]
    if seed % 3 == 2:
        lengths, query_lens = [*lengths, 0], [*query_lens, 0]  # graph padding
    layout = KVLayout(4, 1, 64, "int8", 32, sketch_bits=8) if seed % 4 == 3 else replace(LAYOUT, sketch_rank=64)
    case = Case(lengths, query_lens, layout=layout, seed=seed)
    if seed == 7:  # nothing but ties
        case.sketch.codes[:], case.sketch.scales[:] = case.sketch.codes[:1].clone(), case.sketch.scales[:1].clone()
    policy = replace(
        POLICY,
        mass=rng.choice([0.3, 0.9, 1.0]),
        max_tokens=rng.choice([64, 192, 900]),
        run_hits=rng.choice([0, 8]),
        run_radius=rng.choice([1, 4]),
    )
    assert_same_selection(backend, device, case, policy, rng.choice([1, 2]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rank", [16, 32, 64, 128])
def test_triton_equals_the_reference_at_every_rank(backend: str, device: str, rank: int, bits: int) -> None:
    """Short codes too: 9 query heads, 3 KV heads, head_dim 64 and rank 32 are SmolLM2's."""
    layout = KVLayout(9, 3, 64, "int8", rank, sketch_bits=bits)
    assert_same_selection(backend, device, Case([700, 129], [1, 2], layout=layout, seed=rank + bits), POLICY, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[131072], [262144, 3], [2047, 2048, 2049, 100_000], [1_048_576]])
def test_triton_equals_the_reference_on_long_contexts(lengths: list[int]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layout = KVLayout(6, 2, 128, "int8", 64)
    case = Case(lengths, [1] * len(lengths), layout=layout, seed=1)
    policy = SelectionPolicy(max_tokens=2048, dense_below=2048)
    assert_same_selection("cuda", "cuda", case, policy, 1)


def assert_same_selection(backend: str, device: str, case: Case, policy: SelectionPolicy, representatives: int) -> None:
    arguments = (case.layout, policy, case.layout.head_dim**-0.5, representatives)
    inputs = (case.query, case.query_start_loc, case.seq_lens, case.block_table)
    want = select_reference(*inputs, case.sketch, case.basis, *arguments)
    if backend == "reference":
        return
    sketch = Sketch(case.sketch.codes.to(device), case.sketch.scales.to(device))
    got = kernel.select(*(t.to(device) for t in inputs), sketch, case.basis.to(device), *arguments)
    assert torch.equal(got.counts.cpu(), want.counts)
    assert torch.equal(got.indices.cpu(), want.indices)
    assert torch.equal(got.mass.cpu(), want.mass)
