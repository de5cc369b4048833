"""Versions, plug-in, patches and the environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sparsekv.patches.tree import VllmTree
from sparsekv_cli.doctor.check import Level
from sparsekv_cli.doctor.checks import (
    software_cuda,
    software_environment,
    software_kernels_name,
    software_patches,
    software_plugin,
    software_versions,
)

Make = Callable[..., Any]


def levels(findings: list[Any]) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Callable[[str | None], VllmTree]:
    def make(version: str | None) -> VllmTree:
        root = tmp_path / f"env-{version}" / "vllm"
        (root / "v1").mkdir(parents=True)
        (root / "__init__.py").write_text("")
        if version:
            (root / "_version.py").write_text(f"__version__ = version = {version!r}\n")
        return VllmTree(root.resolve())

    return make


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.31.0", Level.OK),
        ("0.31.0+cu130", Level.OK),
        ("0.30.0", Level.WARN),
        ("0.32.1rc1", Level.WARN),
        ("0.33.0", Level.WARN),
        ("0.34.0", Level.ERROR),
        ("0.27.1", Level.ERROR),
        (None, Level.UNKNOWN),
    ],
)
def test_vllm_versions(make_machine: Make, run: Make, fake_vllm: Make, version: str | None, expected: Level) -> None:
    machine = make_machine()
    machine.__dict__["vllm"] = fake_vllm(version)
    assert run(software_versions.CHECK, machine)[0].level is expected


def test_no_vllm(make_machine: Make, run: Make) -> None:
    machine = make_machine()
    machine.__dict__["vllm"] = None
    assert run(software_versions.CHECK, machine)[0].level is Level.ERROR
    assert levels(run(software_patches.CHECK, machine)) == [Level.SKIP]


@pytest.mark.parametrize(
    ("cuda", "driver", "expected"),
    [
        ("13.0", "580.95.05", Level.OK),
        ("13.0", "570.133.20", Level.ERROR),
        ("12.8", "570.133.20", Level.OK),
        ("14.0", "600.10", Level.UNKNOWN),
        ("13.0", "[N/A]", Level.UNKNOWN),
        ("", "580.95.05", Level.ERROR),
        (None, "580.95.05", Level.UNKNOWN),
    ],
)
def test_driver_against_cuda(
    make_machine: Make, run: Make, card: Any, monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: str, expected: Level
) -> None:
    monkeypatch.setattr(software_cuda, "_cuda_of_torch", lambda: cuda)
    (finding,) = run(software_cuda.CHECK, make_machine(cards=[card | {"driver_version": driver}]))
    assert finding.level is expected


def test_cuda_of_torch_is_read_without_importing_it() -> None:
    torch = pytest.importorskip("torch")
    assert software_cuda._cuda_of_torch() == (torch.version.cuda or "")


def test_plugin(make_machine: Make, run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(run(software_plugin.CHECK, make_machine())) == [Level.OK]
    assert levels(run(software_plugin.CHECK, make_machine(environ={"VLLM_PLUGINS": "other, sparsekv"}))) == [Level.OK]
    (finding,) = run(software_plugin.CHECK, make_machine(environ={"VLLM_PLUGINS": ""}))
    assert (finding.level, finding.remedy) == (Level.ERROR, "export VLLM_PLUGINS=sparsekv")
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints())
    assert levels(run(software_plugin.CHECK, make_machine())) == [Level.ERROR]


def test_patches(make_machine: Make, run: Make, fake_vllm: Make) -> None:
    machine = make_machine()
    machine.__dict__["vllm"] = fake_vllm("0.33.0")
    assert levels(run(software_patches.CHECK, machine)) == [Level.INFO]
    machine.__dict__["vllm"] = tree = fake_vllm("0.31.0")
    findings = run(software_patches.CHECK, machine)
    assert levels(findings) == [Level.WARN, Level.OK]
    assert "work-around" in findings[1].summary
    (tree.root / ".sparsekv-patches").mkdir()
    assert Level.WARN in levels(run(software_patches.CHECK, machine))
    (tree.root / "envs.py").write_text("VLLM_SPEC_DECODE_ATTN = False\n")
    assert any("also patched by HyperQwen" in finding.summary for finding in run(software_patches.CHECK, machine))


def test_name_of_kernels(make_machine: Make, run: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repository = Path(__file__).resolve().parents[2]
    monkeypatch.setattr(sys, "path", [str(repository), *sys.path])
    (finding,) = run(software_kernels_name.CHECK, make_machine())
    assert finding.level is Level.ERROR
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert levels(run(software_kernels_name.CHECK, make_machine())) == [Level.OK]
    monkeypatch.setattr(sys, "path", [str(tmp_path / "kernels")])
    assert levels(run(software_kernels_name.CHECK, make_machine())) == [Level.OK]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Level.OK),
        ({"VLLM_MARLIN_INPUT_DTYPE": ""}, Level.ERROR),
        ({"TRITON_INTERPRET": "1"}, Level.WARN),
        ({"TRITON_INTERPRET": "0"}, Level.OK),
        ({"SPARSEKV_PROFIL": "x"}, Level.WARN),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, Level.ERROR),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128, expandable_segments: True"}, Level.ERROR),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, Level.OK),
    ],
)
def test_environment(make_machine: Make, make_profile: Make, run: Make, environ: dict[str, str], expected: Level) -> None:
    (finding,) = run(software_environment.CHECK, make_machine(environ=environ, profile=make_profile()))
    assert finding.level is expected
