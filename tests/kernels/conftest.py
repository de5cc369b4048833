"""Shared by the kernel tests: no luck from fresh memory, and one way to compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is imported
KERNELS = str(Path(__file__).resolve().parents[2] / "kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(
    params=[
        "reference",
        pytest.param("interpreter", marks=pytest.mark.skipif(HAS_GPU, reason="with a GPU the kernels are compiled")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Which implementation of the op under test to use."""
    return request.param


@pytest.fixture
def device(backend: str) -> str:
    return "cuda" if backend == "cuda" else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` called from the kernels gives NaN (or the largest integer), so that an unwritten output fails its test."""

    def poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            if str(Path(sys._getframe(1).f_code.co_filename).resolve()).startswith(KERNELS):
                tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
            return tensor

        return empty

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str = "tensor") -> None:
    """Root-mean-square error relative to the expected root mean square; prints it on success too."""
    assert actual.shape == expected.shape, f"{name}: {list(actual.shape)} against {list(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert torch.equal(actual.isfinite(), expected.isfinite()), f"{name}: NaN or infinity in other places than expected"
    finite = expected.isfinite()
    assert torch.equal(actual[~finite], expected[~finite]) or bool(expected[~finite].isnan().all()), f"{name}: infinities differ"
    error = (actual - expected)[finite].square().mean().sqrt() if finite.any() else torch.zeros(())
    size = expected[finite].square().mean().sqrt().clamp_min(1e-12) if finite.any() else torch.ones(())
    print(f"{name}: relative error {float(error / size):.2e} (tolerance {tolerance:.0e})")
    assert error / size <= tolerance, f"{name}: relative error {float(error / size):.2e} over {tolerance:.0e}"
