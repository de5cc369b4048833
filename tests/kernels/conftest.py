"""Every test of a kernel runs on its PyTorch reference, on the Triton kernel in the interpreter, and, with a GPU, compiled."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is imported


@pytest.fixture(
    params=[
        "reference",
        pytest.param("interpreter", marks=pytest.mark.skipif(HAS_GPU, reason="kernels are compiled when there is a GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]),
    ]
)
def backend(request):
    """Which implementation of the op under test to use."""
    return request.param


@pytest.fixture
def device(backend):
    return "cuda" if backend == "cuda" else "cpu"
