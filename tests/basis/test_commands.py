from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sparsekv.basis.capture import TransformersCapture
from sparsekv.basis.progress import Eta
from sparsekv.basis.refit import partial_path
from sparsekv.profiles.errors import SparsekvError
from sparsekv_cli.app import app


@pytest.fixture
def model(tiny_model) -> Path:
    """The tiny model with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder: Path = tiny_model()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def refit(model: Path, out: Path, *more: str) -> Result:
    size = ("--context", "512", "--sequences", "2", "--heldout-sequences", "1")
    return CliRunner().invoke(app, ["refit-basis", "--model", str(model), "--out", str(out), *size, *more])


def test_refit_then_show_with_plots(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "tiny.safetensors"
    fitted = refit(model, out)
    assert fitted.exit_code == 0, fitted.output
    assert "kq, rank 8, 4 bits: 6 bytes per token and KV head" in fitted.stdout
    assert [line for line in fitted.stderr.splitlines() if line.startswith("calibrate")] == [
        "calibrate 0/2",
        *[line for line in fitted.stderr.splitlines() if line.startswith("calibrate 1/2, about ")],
        "calibrate 2/2",
    ]
    shown = CliRunner().invoke(app, ["basis", "show", str(out), "--plot", str(tmp_path / "a.svg")])
    assert shown.exit_code == 0
    assert shown.stdout == fitted.stdout
    assert "<svg" in (tmp_path / "a.svg").read_text()[:1000]
    CliRunner().invoke(app, ["basis", "show", str(out), "--plot", str(tmp_path / "a.png")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads(CliRunner().invoke(app, ["basis", "show", str(out), "--json"]).stdout)
    assert facts["schema_version"] == 1
    assert list(facts["layers"]) == ["0", "1", "2"]
    with pytest.raises(SparsekvError, match="cannot plot to"):
        CliRunner().invoke(app, ["basis", "show", str(out), "--plot", "a.pdf"], catch_exceptions=False)


def test_ctrl_c_leaves_a_partial_that_the_next_run_uses(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, whole = tmp_path / "tiny.safetensors", tmp_path / "whole.safetensors"
    refit(model, whole)
    run, runs = TransformersCapture.run, []

    def interrupted(self: TransformersCapture, tokens: list[int], observer: object) -> None:
        runs.append(len(tokens))
        if len(runs) == 2:
            raise KeyboardInterrupt
        run(self, tokens, observer)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(TransformersCapture, "run", interrupted)
        assert refit(model, out).exit_code == 130
    assert partial_path(out).is_file()
    assert not out.exists()
    resumed = refit(model, out)
    assert f"found {partial_path(out)}" in resumed.stderr
    assert "calibrate 0/2" not in resumed.stderr
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--method", "svd"], "no such method: svd"),
        (["--rank", "20"], "rank 20 does not fit head size 16"),
        (["--bits", "3"], "no codes of 3 bits"),
        (["--context", "8192"], "--context 8192 is beyond the model's 4096 positions"),
        (["--out", "basis.bin"], "not named"),
        (["--corpus", "nowhere"], "no folder at: nowhere"),
    ],
)
def test_bad_options_stop_before_the_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], problem: str
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(TransformersCapture, "__init__", loaded)
    found = refit(model, tmp_path / "a.safetensors", *more).exception
    assert isinstance(found, SparsekvError)
    assert problem in str(found)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    found = refit(tmp_path / "nothing", tmp_path / "a.safetensors").exception
    assert isinstance(found, SparsekvError)
    assert "no usable model configuration at" in str(found)


def test_eta_counts_from_where_a_stage_began() -> None:
    now = 0.0
    eta = Eta(lambda: now)
    assert eta.line("calibrate", 2, 8) == "calibrate 2/8"
    now = 60.0
    assert eta.line("calibrate", 4, 8) == "calibrate 4/8, about 2 min left"
    now = 6000.0
    assert eta.line("test", 0, 2) == "test 0/2"
    now = 12000.0
    assert eta.line("test", 1, 2) == "test 1/2, about 1.7 h left"
    assert eta.line("test", 2, 2) == "test 2/2"
