"""The arithmetic, against worked examples and against what the engine allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from sparsekv.profiles.budget import STEPS_IN_FLIGHT, Term, hot_rows, plan, pool_size, states_per_request
from sparsekv.profiles.figures import bus_limit, figures, link_rate
from sparsekv.profiles.loader import LoadedProfile, load_profile
from sparsekv.profiles.schema import Profile, Shape

Load = Callable[..., LoadedProfile]


def shape_of(profile: Profile) -> Shape:
    assert profile.model.shape is not None
    return profile.model.shape


def by_name(terms: tuple[Term, ...] | list[Term]) -> dict[str, Term]:
    return {term.name: term for term in terms}


def test_a_worked_example(load: Load) -> None:
    """16 layers x 4 KV heads x 512 B = 32 KiB a token; 69 GiB are 17,664 blocks of 128."""
    profile = load().profile
    pool = pool_size(profile, shape_of(profile))
    assert (pool.block_bytes, pool.num_blocks, pool.tokens) == (4 * 2**20, 17_664, 17_663 * 128)
    budget = plan(profile, shape_of(profile))
    rows = 17_664 * 128 * 2 * 16
    card = by_name(budget.card)
    assert card["weights"].value == pytest.approx(7.15 * 2**30)
    assert card["sketch"].value == rows * 66
    assert card["row scales"].value == rows * 8
    assert card["staged histories"].value == 3 * 16384 * 2 * 256 * 2 * 2
    assert card["recurrent states"].value == 8 * 3 * 147 * 2**20 / 2
    assert card["hot set"].value == 2**22 * (512 + 8)
    assert by_name(budget.host)["rows"].value == 69 * 2**30


def test_the_draft_heads_rows_count_only_where_it_speculates(load: Load, valid: str) -> None:
    plain, drafting = load().profile, load(valid, "speculation.method=mtp", "speculation.tokens=3").profile
    assert plain.attention_layers(shape_of(plain)) == 16
    assert drafting.attention_layers(shape_of(drafting)) == 17
    assert states_per_request(drafting) == 1 + 3 + STEPS_IN_FLIGHT
    # vLLM pads 48 recurrent layers to groups of 17: 51
    assert by_name(plan(drafting, shape_of(drafting)).card)["recurrent states"].value == pytest.approx(8 * 6 * 147 * 2**20 / 2 * 51 / 48)


def test_rows_on_the_card(load: Load, valid: str) -> None:
    profile = load(valid, "kv.placement=gpu", "kv.hot=", "kv.pool=9GiB").profile
    budget = plan(profile, shape_of(profile))
    assert by_name(budget.card)["rows"].value == 4.5 * 2**30
    assert "hot set" not in by_name(budget.card)
    assert "rows" not in by_name(budget.host)
    assert not any(term.unit == "tok/s" for term in figures(profile, shape_of(profile)))


@pytest.mark.parametrize(("generation", "width", "rate"), [(4, 8, 12.5), (4, 16, 25), (5, 16, 50), (3, 4, 3.125)])
def test_links(load: Load, valid: str, generation: int, width: int, rate: float) -> None:
    profile = load(valid, f"hardware.pcie.generation={generation}", f"hardware.pcie.width={width}").profile
    assert link_rate(profile).value == rate
    assert link_rate(load(valid, "hardware.link_rate=11GB/s").profile).value == 11


def test_the_bus_limit(load: Load, valid: str) -> None:
    profile = load(valid, "hardware.pcie.width=8").profile
    per_step = (2048 + 136 + 128) * 2 * 16 * 512
    assert bus_limit(profile, shape_of(profile), 2048).value == pytest.approx(12.5e9 / per_step)


def test_every_term_says_how_it_was_found(load: Load) -> None:
    for name in ("dual3090", "cpu-demo"):
        profile = load_profile(name).profile
        budget = plan(profile, shape_of(profile))
        for term in (*budget.host, *budget.card, budget.host_limit, *figures(profile, shape_of(profile))):
            assert term.formula
            assert term.text


# ---- against the engine


def bytes_of(value: object) -> Iterator[int]:
    """Of every tensor in a dataclass, its basis left out: that is a few megabytes whatever the pool."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value.nbytes
    elif is_dataclass(value):
        for item in fields(value):
            if item.name != "basis":
                yield from bytes_of(getattr(value, item.name))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_the_cpu_engine_allocates_what_the_budget_says(tmp_path: Path, dtype: str) -> None:
    import torch

    from sparsekv.engine.config import BLOCK_SIZE, read_config
    from sparsekv.engine.pools import allocate_cpu_rows, allocate_layer
    from sparsekv.kernels.layout import KVLayout
    from sparsekv.kernels.sketch import SketchBasis
    from sparsekv.profiles.launch import engine_document

    loaded = load_profile("cpu-demo", [f"kv.dtype={dtype}", "kv.pool=48MiB", "model.max_model_len=1024"])
    shape, rank = shape_of(loaded.profile), loaded.profile.sketch.rank
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(engine_document(loaded, shape)))
    config = read_config(path)
    layout = KVLayout(shape.query_heads, shape.kv_heads, shape.head_dim, config.row_format, rank, loaded.profile.sketch.bits, BLOCK_SIZE)
    maps = torch.zeros(shape.kv_heads, shape.head_dim, rank)
    basis = SketchBasis(torch.zeros(shape.kv_heads, shape.head_dim), maps, maps)
    layer = allocate_layer(layout, config.num_blocks, basis, allocate_cpu_rows, torch.device("cpu"))
    allocated = shape.attention_layers * sum(bytes_of(layer))
    terms = by_name(plan(loaded.profile, shape).host)
    planned = sum(terms[name].value for name in ("rows", "row scales", "sketch") if name in terms)
    assert allocated == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize(("hot", "max_num_seqs"), [("1MiB", 2), ("1.5MiB", 3)])
def test_the_hot_set_is_what_the_engine_allocates(load: Load, valid: str, hot: str, max_num_seqs: int) -> None:
    from sparsekv.kernels.fetch import HotSet

    profile = load(valid, f"kv.hot={hot}", f"scheduler.max_num_seqs={max_num_seqs}", "selection.dense_below=0").profile
    layout, capacity = profile.layout(shape_of(profile)), profile.selection.policy().capacity
    allocated = HotSet.allocate(layout, profile.kv.hot // layout.row_bytes, max_num_seqs * 2 * capacity, "cpu")
    assert allocated.capacity == hot_rows(profile, shape_of(profile))
    terms = by_name(plan(profile, shape_of(profile)).card)
    assert sum(bytes_of(allocated)) == pytest.approx(terms["hot set"].value + terms["selected rows"].value, rel=0.01)


def test_constants_of_the_engine() -> None:
    from sparsekv.kernels.fetch import hot_set
    from sparsekv.profiles import budget

    assert budget.HOT_WAYS == hot_set.WAYS
    source = (Path(__file__).parents[2] / "engine" / "history.py").read_text()
    assert f"SEGMENT_TOKENS = {budget.SEGMENT_TOKENS}\nBUFFERS = {budget.SEGMENT_BUFFERS}\n" in source
