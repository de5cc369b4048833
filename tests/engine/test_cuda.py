"""The CUDA engine with real weights against stock vLLM: graphs, eager, hot set spilling, poisoned pool, prefix hits.

Each arm is one engine in a process of its own; all arms see the same prompts. Bf16 batches meet near ties, so a divergence is
allowed only where the two best tokens of the other arm lie within `NEAR_TIE` of each other.
"""

import os
from pathlib import Path

import pytest

from .arms import agreement, arm_runner, differences, phrases, profile

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = Path(os.environ.get("SPARSEKV_CACHE", Path.home() / ".cache/sparsekv")) / "models/SmolLM2-135M-Instruct"
BASIS = Path(__file__).parents[2] / "basis/files/smollm2-135m-instruct.safetensors"
NEAR_TIE = 0.15
LENGTHS = (1, 5, 127, 128, 129, 640, 1000, 2049, 3000, 4095, 4097, 6000, 7900)
MAX_TOKENS = 48
FULL = {"min_tokens": 8192, "max_tokens": 8192, "dense_below": 256}
QUARTER = {"min_tokens": 1000, "max_tokens": 2000, "mass": 0.999, "dense_below": 512}


ARMS = {
    "stock": (None, {"attention_backend": "FLASH_ATTN"}),
    "stock-int8": (None, {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "int8_per_token_head"}),
    "bf16-full": (profile(BASIS, "bf16", FULL, hot_mib=256), {}),
    "bf16-full-eager": (profile(BASIS, "bf16", FULL, hot_mib=256), {"enforce_eager": True}),
    "int8-full": (profile(BASIS, "int8", FULL, hot_mib=256), {}),
    "int8-full-spill": (profile(BASIS, "int8", FULL, hot_mib=4), {}),
    "int8-full-gpu": (profile(BASIS, "int8", FULL, placement="gpu"), {}),
    "int8-quarter": (profile(BASIS, "int8", QUARTER, hot_mib=256), {}),
    "int4-quarter": (profile(BASIS, "int4", QUARTER, hot_mib=256), {}),
}


@pytest.fixture(scope="module")
def run_arm(tmp_path_factory):
    prompts = [phrases(n, seed=n) for n in LENGTHS]
    prompts += [p + phrases(50, seed=1) for p in prompts[5:8]]  # extend three conversations: prefix hits
    first = list(range(len(LENGTHS)))
    rounds = [[i] for i in first] + [first, first, list(range(len(LENGTHS), len(prompts)))]
    engine = {"max_model_len": 8192, "max_num_seqs": 16, "gpu_memory_utilization": 0.5, "block_size": 128}
    return arm_runner(tmp_path_factory.mktemp("arms"), "cuda", MODEL, ARMS, engine, prompts, rounds, MAX_TOKENS)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("bf16-full", "stock"),
        ("bf16-full", "bf16-full-eager"),
        ("int8-full", "stock-int8"),
        ("int8-full-spill", "int8-full"),
        ("int8-full-gpu", "int8-full"),
    ],
)
def test_full_budget_equals_dense(run_arm, name, other):
    a, b = run_arm(name), run_arm(other)
    print(f"{name} against {other}: {agreement(a, b):.3f} of the tokens before a first difference")
    assert differences(a, b, NEAR_TIE) == []


def test_prefix_hits_cover_full_blocks(run_arm):
    for item in run_arm("int8-full")["rounds"][len(LENGTHS) + 1]:
        assert item["cached"] == (LENGTHS[item["prompt"]] - 1) // 128 * 128


def test_a_quarter_of_the_rows_still_answers(run_arm):
    counters = run_arm("int8-quarter")["counters"]
    assert 0 < counters["selected_tokens"] < 0.6 * counters["context_tokens"]
    assert agreement(run_arm("int8-quarter"), run_arm("int8-full")) > 0.6
    assert agreement(run_arm("int4-quarter"), run_arm("int8-full")) > 0.4


def test_a_small_hot_set_misses_more(run_arm):
    spilled, roomy = run_arm("int8-full-spill")["counters"], run_arm("int8-full")["counters"]
    assert spilled["hot_misses"] > roomy["hot_misses"]
