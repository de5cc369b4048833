"""A profile, a model's folder and a basis that fit together, and the command line in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from sparsekv.basis.header import FORMAT, METADATA_KEY
from sparsekv.basis.identity import model_identity

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
}

PROFILE = """\
description: a tiny model, for tests
hardware:
  device: cpu
  gpus: 0
  ram: 8GiB
model:
  path: model
  name: tiny
  max_model_len: 2048
kv:
  dtype: bf16
  pool: 64MiB
  headroom: 64MiB
sketch:
  basis: ./tiny.safetensors
  rank: 8
  bits: 4
server:
  port: {port}
"""


@dataclass(frozen=True)
class Outcome:
    status: int
    stdout: str
    stderr: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `sparsekv ARGUMENTS` in this process."""
    from sparsekv_cli.app import main

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["sparsekv", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capfd.readouterr()
        return Outcome(int(stopped.value.code or 0), out, err)

    return call


class Files:
    """Makes the small files of a site; a fixture, since a test cannot import this module."""

    config = CONFIG

    @staticmethod
    def safetensors(path: Path, metadata: dict[str, str] | None = None, data: int = 16) -> Path:
        """A well-formed safetensors file with one tensor of `data` bytes."""
        header: dict[str, object] = {"x": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}
        if metadata:
            header["__metadata__"] = metadata
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
        return path

    @classmethod
    def basis(cls, path: Path, config: dict[str, object], rank: int = 8) -> Path:
        """A basis by its header; its maps are never read before the engine starts."""
        model = model_identity(config)
        facts = {
            "format": FORMAT,
            "model": asdict(model),
            "method": "pca",
            "rank": rank,
            "bits": 4,
            "layers": {key: {"rank": rank} for key in model.attention_layers},
        }
        return cls.safetensors(path, {METADATA_KEY: json.dumps(facts)})


@pytest.fixture
def files() -> type[Files]:
    return Files


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> Path:
    """A folder with `tiny.yaml`, `model/` and `tiny.safetensors`; the cache and vLLM's options are the test's own."""
    from sparsekv_cli.doctor.checks import software_options

    (tmp_path / "tiny.yaml").write_text(PROFILE.format(port=unused_tcp_port))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": []}))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    Files.safetensors(model / "model.safetensors")
    Files.basis(tmp_path / "tiny.safetensors", CONFIG)
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    for name in ("SPARSEKV_API_KEY", "VLLM_API_KEY", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(software_options, "vllm_options", lambda tree: EVERY_OPTION)
    return tmp_path


class _Everything(frozenset[str]):
    """Contains whatever is asked for; the real parser has a test of its own."""

    def __contains__(self, item: object) -> bool:
        return True


EVERY_OPTION = _Everything()
