from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparsekv.basis.format import BasisMetadata, LayerFit, check_basis, load_basis, read_metadata, save_basis
from sparsekv.basis.identity import layer_key, model_identity
from sparsekv.kernels.sketch import SketchBasis
from sparsekv.profiles.errors import SparsekvError

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}


def make(path: Path, ranks: tuple[int, ...] = (8,) * 12, config: dict = CONFIG, bits: int = 4) -> tuple[str, dict[str, SketchBasis]]:
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    identity = model_identity(config, "f" * 64)
    keys = [*identity.attention_layers, "mtp.0"][: len(ranks)]
    layers = {
        key: SketchBasis(mean=values(2, 16), key_map=values(2, 16, rank) * 1e-4, query_map=values(2, 16, rank) * 1e4)
        for key, rank in zip(keys, ranks, strict=True)
    }
    fits = {key: LayerFit(rank, (0.9, 0.8), (0.7, 0.6), 320, 640) for key, rank in zip(keys, ranks, strict=True)}
    metadata = BasisMetadata(identity, "kq", max(ranks), bits, fits, recall={"basis": 0.9, "random": 0.5}, recall_budget=320)
    return save_basis(path, metadata, layers), layers


def test_round_trip_keeps_scores_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    digest, layers = make(path, ranks=(8,) * 12 + (4,))
    basis = load_basis(path)
    assert basis.file_hash == digest
    assert list(basis.layers) == [*map(str, range(12)), "mtp.0"]  # model order, not the alphabet's
    assert basis.metadata == read_metadata(path)
    assert basis.metadata.layers["3"].recall_mean == (0.9, 0.8)
    for key, sketch in layers.items():
        loaded = basis.layers[key]
        assert loaded.mean.dtype == torch.float32
        want, got = (m.query_map @ m.key_map.mT for m in (sketch, loaded))
        assert (want - got).abs().max() < 4e-3 * want.abs().max()
    assert torch.equal(basis.layer("2", slice(1, 2)).key_map, basis.layers["2"].key_map[1:])


def test_equal_inputs_give_equal_files(tmp_path: Path) -> None:
    assert make(tmp_path / "a.safetensors")[0] == make(tmp_path / "b.safetensors")[0]
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 13}, "num layers 12 != 13"),
        ({"num_key_value_heads": 3}, "num kv heads 2 != 3"),
        ({"head_dim": 32}, "head dim 16 != 32"),
        ({"model_type": "qwen3"}, 'model type "llama" != "qwen3"'),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "rope "),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100000.0}}, "rope "),
    ],
)
def test_another_model_is_refused_in_one_line(tmp_path: Path, change: dict, says: str) -> None:
    make(tmp_path / "a.safetensors")
    basis = load_basis(tmp_path / "a.safetensors")
    with pytest.raises(SparsekvError) as caught:
        check_basis(basis, CONFIG | change)
    assert says in str(caught.value)
    assert "a.safetensors was fitted on another model" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "refit-basis" in (caught.value.hint or "")


def test_equal_models_in_other_words_are_accepted(tmp_path: Path) -> None:
    make(tmp_path / "a.safetensors")
    basis = load_basis(tmp_path / "a.safetensors")
    old = {key: value for key, value in CONFIG.items() if key != "rope_parameters"} | {"rope_theta": 100000, "rope_scaling": None}
    assert check_basis(basis, old) == []
    assert check_basis(basis, {"model_type": "wrapper", "text_config": CONFIG}) == []
    assert check_basis(basis, CONFIG, weights_fingerprint="f" * 64) == []
    assert "other weights" in check_basis(basis, CONFIG, weights_fingerprint="e" * 64)[0]


def test_a_basis_must_cover_every_attention_layer(tmp_path: Path) -> None:
    make(tmp_path / "a.safetensors", ranks=(8,) * 11)
    with pytest.raises(SparsekvError, match=r"no sketch for attention layers: 11"):
        check_basis(load_basis(tmp_path / "a.safetensors"), CONFIG)


def test_hybrids_need_their_full_attention_layers_only() -> None:
    hybrid = CONFIG | {"layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 4 + ["full_attention"] * 4}
    assert model_identity(hybrid).attention_layers == ("3", "8", "9", "10", "11")
    assert model_identity(CONFIG | {"full_attention_interval": 4}).attention_layers == ("3", "7", "11")


def test_layer_key() -> None:
    assert layer_key("model.layers.3.self_attn.attn") == "3"
    assert layer_key("language_model.model.layers.11.self_attn.attn") == "11"
    assert layer_key("mtp.layers.0.self_attn.attn") == "mtp.0"


def test_files_that_are_no_basis(tmp_path: Path) -> None:
    with pytest.raises(SparsekvError, match="no basis file at"):
        load_basis(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(SparsekvError, match="not a safetensors file"):
        load_basis(tmp_path / "text")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(SparsekvError, match="not a safetensors file"):
        load_basis(tmp_path / "empty")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(SparsekvError, match="no basis"):
        load_basis(tmp_path / "other")
    for header in ("{", "[]", "{}", json.dumps({"format": "sparsekv-basis/0"}), json.dumps({"format": "sparsekv-basis/1", "model": 3})):
        save_file({"x": torch.zeros(1)}, tmp_path / "odd", metadata={"sparsekv_basis": header})
        with pytest.raises(SparsekvError, match=r"odd (has a damaged header|is not in the format)"):
            load_basis(tmp_path / "odd")


def test_cut_files_and_wrong_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    make(path)
    whole = path.read_bytes()
    for length in (4, 100, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(SparsekvError, match="not a safetensors file"):
            load_basis(tmp_path / "cut")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors, header = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    for name, value, says in (
        ("layers.4.key_map", torch.zeros(2, 16, 7, dtype=torch.float16), r"layer 4: key_map is \[2, 16, 7\], expected \[2, 16, 8\]"),
        ("layers.4.mean", torch.full((2, 16), torch.nan, dtype=torch.float16), "layer 4: mean holds NaN"),
    ):
        save_file(tensors | {name: value}, tmp_path / "wrong", metadata=header)
        with pytest.raises(SparsekvError, match=says):
            load_basis(tmp_path / "wrong")
    del tensors["layers.11.mean"]
    save_file(tensors, tmp_path / "less", metadata=header)
    with pytest.raises(SparsekvError, match=r"layers\.11\.mean` is missing"):
        load_basis(tmp_path / "less")


def test_save_refuses_inconsistent_input(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    _, layers = make(path)
    metadata = load_basis(path).metadata
    before = path.read_bytes()
    with pytest.raises(ValueError, match="describes layers"):
        save_basis(path, metadata, {"0": layers["0"]})
    broken = dict(layers)
    broken["5"] = SketchBasis(mean=layers["5"].mean, key_map=layers["5"].key_map * torch.nan, query_map=layers["5"].query_map)
    with pytest.raises(ValueError, match="NaN"):
        save_basis(path, metadata, broken)
    with pytest.raises(ValueError, match="whole bytes"):
        save_basis(path, replace(metadata, layers={key: replace(fit, rank=7) for key, fit in metadata.layers.items()}), layers)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]
