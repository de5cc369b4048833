from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsekv.basis.capture import TransformersCapture, weights_fingerprint
from sparsekv.basis.format import check_basis, load_basis
from sparsekv.basis.refit import RefitOptions, partial_path, refit, refuse_if_beaten
from sparsekv.profiles.errors import SparsekvError

CONTEXT = 512


def options(model: Path, out: Path, **changes: object) -> RefitOptions:
    return replace(RefitOptions(model, out, context=CONTEXT, sequences=3, heldout_sequences=1), **changes)


def run(model: Path, out: Path, tokenizer: object, source: object = None, **changes: object) -> str:
    refit(options(model, out, **changes), source or TransformersCapture(model), tokenizer, weights_fingerprint(model), lambda *_: None)
    return hashlib.sha256(out.read_bytes()).hexdigest()


def test_capture_sees_post_rope_keys(tiny_model) -> None:
    folder = tiny_model()
    source = TransformersCapture(folder)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    source.run(list(range(40)), lambda layer, query, key: seen.update({layer: (query, key)}))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = model(input_ids=torch.arange(40)[None], use_cache=True).past_key_values
    assert list(seen) == ["0", "1", "2"]
    for index in range(3):
        query, key = seen[str(index)]
        assert query.shape == (40, 4, 16)
        assert torch.allclose(key.transpose(0, 1), cache.layers[index].keys[0], atol=1e-5)


def test_two_refits_give_one_hash_and_the_file_fits_the_model(tiny_model, tokenizer, tmp_path: Path) -> None:
    model = tiny_model()
    first = run(model, tmp_path / "a.safetensors", tokenizer)
    assert run(model, tmp_path / "b.safetensors", tokenizer) == first
    assert run(model, tmp_path / "c.safetensors", tokenizer, seed=1) != first
    basis = load_basis(tmp_path / "a.safetensors")
    source = TransformersCapture(model)
    assert check_basis(basis, source.config, weights_fingerprint(model)) == []
    meta = basis.metadata
    assert (meta.method, meta.rank, meta.bits, meta.calibration_tokens) == ("kq", 8, 4, 3 * CONTEXT)
    assert meta.recall["oracle"] >= meta.recall["basis"] > max(meta.recall[name] for name in ("random", "recency", "transposed"))
    assert all(len(fit.recall_mean) == 2 and fit.budget > 0 and fit.hot_slots >= fit.budget for fit in meta.layers.values())
    assert not partial_path(tmp_path / "a.safetensors").exists()
    with pytest.raises(SparsekvError, match="another model"):
        check_basis(basis, TransformersCapture(tiny_model(rope_theta=5.0)).config)


class Interrupted(TransformersCapture):
    """Ctrl-C in the middle of the second sequence."""

    runs = 0

    def run(self, tokens: list[int], observer) -> None:
        self.runs += 1
        if self.runs == 2:
            super().run(tokens[:100], observer)
            raise KeyboardInterrupt
        super().run(tokens, observer)


def test_an_interrupted_run_resumes_to_the_same_file(tiny_model, tokenizer, tmp_path: Path) -> None:
    model, out = tiny_model(), tmp_path / "out.safetensors"
    whole = run(model, tmp_path / "whole.safetensors", tokenizer)
    with pytest.raises(KeyboardInterrupt):
        run(model, out, tokenizer, source=Interrupted(model))
    assert not out.exists()
    assert partial_path(out).is_file()
    seen: list[tuple[str, int, int]] = []
    refit(options(model, out), TransformersCapture(model), tokenizer, weights_fingerprint(model), lambda *step: seen.append(step))
    assert seen[0] == ("calibrate", 1, 3)
    assert hashlib.sha256(out.read_bytes()).hexdigest() == whole


def test_a_partial_of_other_inputs_or_a_damaged_one_is_not_used(tiny_model, tokenizer, tmp_path: Path) -> None:
    model, out = tiny_model(), tmp_path / "out.safetensors"
    whole = run(model, tmp_path / "whole.safetensors", tokenizer, seed=1)
    with pytest.raises(KeyboardInterrupt):
        run(model, out, tokenizer, source=Interrupted(model))
    assert run(model, out, tokenizer, seed=1) == whole
    partial_path(out).write_bytes(b"damaged")
    assert run(model, out, tokenizer, seed=1) == whole


def test_ranks_are_shared_within_the_same_bytes(tiny_model, tokenizer, tmp_path: Path) -> None:
    run(tiny_model(), tmp_path / "auto.safetensors", tokenizer, rank="auto")
    basis = load_basis(tmp_path / "auto.safetensors")
    ranks = [fit.rank for fit in basis.metadata.layers.values()]
    assert set(ranks) <= {8, 16}
    assert sum(ranks) <= 8 * len(ranks)
    assert [sketch.key_map.shape[-1] for sketch in basis.layers.values()] == ranks


def test_pca_and_int8(tiny_model, tokenizer, tmp_path: Path) -> None:
    run(tiny_model(), tmp_path / "pca.safetensors", tokenizer, method="pca", rank=8, bits=8)
    basis = load_basis(tmp_path / "pca.safetensors")
    sketch = basis.layers["1"]
    gram = sketch.key_map.mT @ sketch.query_map  # orthonormal columns, up to the factor that float16 storage moves
    assert torch.allclose(gram, torch.eye(8).expand(2, 8, 8), atol=5e-3)


def test_a_basis_no_better_than_a_control_is_refused(tiny_model, tokenizer, tmp_path: Path) -> None:
    run(tiny_model(), tmp_path / "a.safetensors", tokenizer)
    metadata = load_basis(tmp_path / "a.safetensors").metadata
    refuse_if_beaten(metadata)
    refuse_if_beaten(replace(metadata, recall={"basis": 0.9, "oracle": 0.9, "random": 0.9}))  # full rank: all are the true scores
    with pytest.raises(SparsekvError, match=r"is refused: .* no more than: random 0\.9"):
        refuse_if_beaten(replace(metadata, recall={"basis": 0.9, "oracle": 0.95, "random": 0.9, "recency": 0.2}))


@pytest.mark.parametrize("rank", [0, 17, 7, -2])
def test_impossible_ranks_are_refused_before_any_work(tiny_model, tokenizer, tmp_path: Path, rank: int) -> None:
    with pytest.raises(SparsekvError, match="does not fit head size 16"):
        run(tiny_model(), tmp_path / "a.safetensors", tokenizer, rank=rank)
    assert list(tmp_path.iterdir()) == []


def test_fingerprint_follows_the_weights(tiny_model) -> None:
    folder = tiny_model()
    assert weights_fingerprint(folder) == weights_fingerprint(folder)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    before = weights_fingerprint(folder)
    weights["model.layers.1.mlp.up_proj.weight"] *= 2  # what a quantiser touches
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_fingerprint(folder) == before
    weights["model.layers.1.input_layernorm.weight"] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_fingerprint(folder) != before


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SparsekvError, match="no model at"):
        TransformersCapture(tmp_path)
