"""The model's folder, its basis, and the server's address and key."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsekv_cli.doctor.check import Level
from sparsekv_cli.doctor.checks import (
    model_basis,
    model_code,
    model_files,
    model_parsers,
    model_tokenizer,
    server_exposure,
    server_port,
)
from sparsekv_cli.doctor.checks.server_exposure import is_loopback

Make = Callable[..., Any]
CONFIG = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 8,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 5120,
    "full_attention_interval": 4,
    "rope_theta": 1e7,
}
TEMPLATE = "{% for m in messages %}<think>{{ m }}{% endfor %}{% if tools %}{% endif %}"
TOKENIZER = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<think>"}, {"content": "</think>"}]}


def safetensors(size: int = 16, cut: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(size)
    return data[: len(data) - cut]


def levels(findings: list[Any]) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    names = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    for name in names:
        (folder / name).write_bytes(safetensors())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    return folder


@pytest.fixture
def served(make_machine: Make, make_profile: Make) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        parsers = {"server__tool_parser": "qwen3_coder", "server__reasoning_parser": "qwen3"}
        return make_machine(profile=make_profile(**(parsers | changes)))

    return make


def test_a_whole_model(model: Path, served: Make, run: Make) -> None:
    machine = served()
    for check in (model_files, model_tokenizer, model_code):
        assert levels(run(check.CHECK, machine)) == [Level.OK], check.__name__


def test_weights(model: Path, served: Make, run: Make) -> None:
    first, second = sorted(model.glob("*.safetensors"))
    second.write_bytes(safetensors(cut=5))
    (finding,) = run(model_files.CHECK, served())
    assert finding.level is Level.ERROR
    assert "should have" in finding.evidence[0]
    second.write_bytes(b"<html>not found</html>")
    assert "not a safetensors file" in run(model_files.CHECK, served())[0].evidence[0]
    second.unlink()
    (finding,) = run(model_files.CHECK, served())
    assert finding.summary == "1 of 2 shard(s) are missing"
    first.unlink()
    (model / "model.safetensors.index.json").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80")
    (finding,) = run(model_files.CHECK, served())
    assert "only pickle files" in finding.summary
    (model / "config.json").write_text("[]")
    assert "config.json" in run(model_files.CHECK, served())[0].summary


def test_an_index_cannot_lead_out_of_the_folder(model: Path, served: Make, run: Make) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    (finding,) = run(model_files.CHECK, served())
    assert finding.evidence == ("../secret.safetensors",)


def test_a_folder_that_is_not_there(served: Make, run: Make) -> None:
    machine = served()
    assert levels(run(model_files.CHECK, machine)) == [Level.ERROR]
    assert levels(run(model_tokenizer.CHECK, machine)) == [Level.SKIP]


def test_chat_templates(model: Path, served: Make, run: Make, tmp_path: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_text("  \n")
    assert levels(run(model_tokenizer.CHECK, served())) == [Level.ERROR]
    template.unlink()
    assert "no chat template" in run(model_tokenizer.CHECK, served())[0].summary
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": TEMPLATE}]}))
    assert levels(run(model_tokenizer.CHECK, served())) == [Level.OK]
    own = tmp_path / "own.jinja"
    assert levels(run(model_tokenizer.CHECK, served(model__chat_template=str(own)))) == [Level.ERROR]
    own.write_text(TEMPLATE)
    assert levels(run(model_tokenizer.CHECK, served(model__chat_template=str(own)))) == [Level.OK]


def test_what_the_template_needs(model: Path, make_machine: Make, make_profile: Make, served: Make, run: Make) -> None:
    plain = make_machine(profile=make_profile())
    assert levels(run(model_tokenizer.CHECK, plain)) == [Level.WARN, Level.WARN]
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert levels(run(model_tokenizer.CHECK, served())) == [Level.WARN]
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "tokenizer.json").write_text(json.dumps({**TOKENIZER, "added_tokens": [{"content": "<s>"}]}))
    assert levels(run(model_tokenizer.CHECK, served())) == [Level.ERROR]
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    assert "empty vocabulary" in run(model_tokenizer.CHECK, served())[0].summary
    (model / "tokenizer.json").write_text("{")
    assert "missing or damaged" in run(model_tokenizer.CHECK, served())[0].summary


def test_code_in_the_folder_is_named_and_not_run(model: Path, served: Make, run: Make, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (model / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "evil.Model"}}))
    (model / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    (model / "extra.pt").write_bytes(b"\x80\x04")
    machine = served()
    findings = run(model_code.CHECK, machine)
    assert levels(findings) == [Level.INFO, Level.INFO]
    assert "evil.py" in findings[0].evidence
    for check in (model_files, model_tokenizer, model_basis):
        run(check.CHECK, machine)
    assert not marker.exists()


def test_parsers(served: Make, run: Make, tmp_path: Path) -> None:
    from sparsekv.patches.tree import VllmTree

    for path, table, name in (
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER", "qwen3_coder"),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER", "qwen3"),
    ):
        (tmp_path / "vllm" / path).mkdir(parents=True)
        (tmp_path / "vllm" / path / "__init__.py").write_text(f"{table} = {{{name!r}: ('module', 'Class')}}\n")
    machine = served()
    machine.__dict__["vllm"] = VllmTree(tmp_path / "vllm")
    assert levels(run(model_parsers.CHECK, machine)) == [Level.OK]
    wrong = served(server__tool_parser="qwen3_code")
    wrong.__dict__["vllm"] = VllmTree(tmp_path / "vllm")
    findings = run(model_parsers.CHECK, wrong)
    assert findings[0].level is Level.ERROR
    assert findings[0].remedy == "set server.tool_parser: qwen3_coder"
    (tmp_path / "vllm/tool_parsers/__init__.py").write_text("")
    assert Level.UNKNOWN in levels(run(model_parsers.CHECK, machine))


def test_parsers_of_the_installed_vllm(served: Make, run: Make) -> None:
    machine = served()
    if machine.vllm is None:
        pytest.skip("needs vLLM")
    assert levels(run(model_parsers.CHECK, machine)) == [Level.OK]


def test_basis(model: Path, served: Make, run: Make, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from sparsekv.basis.format import BasisMetadata, LayerFit, save_basis
    from sparsekv.basis.identity import model_identity
    from sparsekv.kernels.sketch import SketchBasis

    assert "no basis file" in run(model_basis.CHECK, served())[0].summary
    path = tmp_path / "basis.safetensors"

    def write(config: dict[str, Any], rank: int = 128) -> None:
        identity = model_identity(config)
        fits = {key: LayerFit(rank) for key in identity.attention_layers}
        maps = {
            key: SketchBasis(mean=torch.zeros(4, 256), key_map=torch.ones(4, 256, rank), query_map=torch.ones(4, 256, rank)) for key in fits
        }
        save_basis(path, BasisMetadata(identity, "kq", rank, 4, fits), maps)

    write(CONFIG)
    assert levels(run(model_basis.CHECK, served())) == [Level.OK]
    assert levels(run(model_basis.CHECK, served(sketch__rank="64"))) == [Level.ERROR, Level.OK]
    write(CONFIG | {"rope_theta": 1e6})
    (finding,) = run(model_basis.CHECK, served())
    assert finding.level is Level.ERROR
    assert "another model" in finding.summary
    (model / "config.json").write_text(json.dumps({"model_type": "x"}))
    assert levels(run(model_basis.CHECK, served())) == [Level.UNKNOWN]
    path.write_bytes(b"\x80\x04pickle")
    (finding,) = run(model_basis.CHECK, served())
    assert finding.level is Level.ERROR


def test_port(served: Make, run: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (finding,) = run(server_port.CHECK, served(server__port=str(port)))
        assert finding.level is Level.ERROR
        assert "taken" in finding.summary
    assert levels(run(server_port.CHECK, served(server__port=str(port)))) == [Level.OK]
    (finding,) = run(server_port.CHECK, served(server__host="192.0.2.1", server__port=str(port)))
    assert "cannot listen" in finding.summary


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.4", False),
        ("my-box", False),
        ("localhost.evil.example", False),
    ],
)
def test_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_exposure(make_machine: Make, make_profile: Make, run: Make, tmp_path: Path) -> None:
    assert levels(run(server_exposure.CHECK, make_machine(profile=make_profile()))) == [Level.OK]
    open_ = make_profile(server__host="0.0.0.0")
    assert levels(run(server_exposure.CHECK, make_machine(profile=open_))) == [Level.ERROR]
    assert levels(run(server_exposure.CHECK, make_machine(profile=open_, environ={"SPARSEKV_API_KEY": "  "}))) == [Level.ERROR]
    keyed = make_machine(profile=open_, environ={"SPARSEKV_API_KEY": "canary-0123456789abcdef"})
    findings = run(server_exposure.CHECK, keyed)
    assert levels(findings) == [Level.INFO, Level.OK]
    assert "canary" not in str(findings)
    short = make_machine(profile=open_, environ={"SPARSEKV_API_KEY": "short"})
    assert Level.WARN in levels(run(server_exposure.CHECK, short))

    file = tmp_path / "key"
    with_file = make_profile(server__host="0.0.0.0", server__api_key_file=str(file))
    assert levels(run(server_exposure.CHECK, make_machine(profile=with_file))) == [Level.ERROR, Level.ERROR]
    file.write_text("canary-0123456789abcdef\n")
    file.chmod(0o644)
    findings = run(server_exposure.CHECK, make_machine(profile=with_file))
    assert [(f.level, f.remedy) for f in findings if f.level is Level.ERROR] == [(Level.ERROR, f"chmod 600 {file}")]
    file.chmod(0o600)
    assert levels(run(server_exposure.CHECK, make_machine(profile=with_file))) == [Level.INFO, Level.OK]
    file.write_text("\n")
    assert Level.ERROR in levels(run(server_exposure.CHECK, make_machine(profile=with_file)))
