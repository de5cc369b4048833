"""The CPU engine against stock vLLM: a random model over all lengths, and the demo model's real weights.

The random model is compared to the last bit where the arithmetic is the same. The sparse path sums in float32 where vLLM's
kernel sums in bf16: there a divergence is allowed where two tokens tie within `NEAR_TIE`.
"""

from pathlib import Path

import pytest

from .arms import agreement, arm_runner, differences, logprob_error, phrases, profile

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

LENGTHS = (1, 2, 63, 64, 127, 128, 129, 255, 256, 257, 383, 385, 511, 640, 1000, 1023, 1025, 2047, 2049, 3000, 4095, 4097, 8000)
EXTENDED = (5, 13, 18)
VOCABULARY = 512
MAX_TOKENS = 12
NEAR_TIE = 0.1
DENSE = {"min_tokens": 64, "max_tokens": 8192, "dense_below": 8192}
WHOLE = {"min_tokens": 64, "max_tokens": 8192, "mass": 1.0, "dense_below": 0, "sink_tokens": 4, "window_tokens": 16}
"""Takes the sparse path from about 100 tokens on and selects every token with any attention at all."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder and basis of a random Llama with attention that looks at something."""
    import json

    from transformers import LlamaConfig, LlamaForCausalLM

    from sparsekv.bench.decode.setup import random_basis

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    random_basis(json.loads((folder / "config.json").read_text()), 32, folder.with_suffix(".basis"))
    return folder


@pytest.fixture(scope="module")
def run_tiny(tiny, tmp_path_factory):
    basis = tiny.with_suffix(".basis")
    arms = {
        "stock": (None, {}),
        "bf16-dense": (profile(basis, "bf16", DENSE), {}),
        "bf16-whole": (profile(basis, "bf16", WHOLE), {}),
        "bf16-small-pool": (profile(basis, "bf16", WHOLE, pool_tokens=9000), {}),
        "int8-whole": (profile(basis, "int8", WHOLE), {}),
        "int4-whole": (profile(basis, "int4", WHOLE), {}),
    }
    prompts = [phrases(n, seed=n, vocabulary=VOCABULARY) for n in LENGTHS]
    prompts += [prompts[i] + phrases(50, seed=1, vocabulary=VOCABULARY) for i in EXTENDED]
    first = list(range(len(LENGTHS)))
    rounds = [[i] for i in first] + [first[::-1], first, list(range(len(LENGTHS), len(prompts)))]
    engine = {"max_model_len": 8192, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "block_size": 128, "enforce_eager": True}
    return arm_runner(tmp_path_factory.mktemp("arms"), "cpu", tiny, arms, engine, prompts, rounds, MAX_TOKENS)


def test_dense_attention_over_the_host_pool_equals_stock(run_tiny):
    a, b = run_tiny("bf16-dense"), run_tiny("stock")
    assert differences(a, b) == []
    assert logprob_error(a, b) == 0.0


@pytest.mark.parametrize("name", ["bf16-whole", "bf16-small-pool"])
def test_sparse_attention_with_a_budget_for_everything_equals_stock(run_tiny, name):
    a, b = run_tiny(name), run_tiny("stock")
    print(f"{name}: {agreement(a, b):.3f} of the tokens before a first difference, log-probabilities within {logprob_error(a, b):.3f}")
    assert differences(a, b, NEAR_TIE) == []
    assert a["counters"]["selected_tokens"] > 0


def test_quantised_rows_stay_near(run_tiny):
    stock = run_tiny("stock")
    for name, bound in (("int8-whole", 0.3), ("int4-whole", 2.0)):
        assert logprob_error(run_tiny(name), stock) < bound


def test_prefix_hits_cover_all_full_blocks(run_tiny):
    for item in run_tiny("bf16-whole")["rounds"][len(LENGTHS) + 1]:
        assert item["cached"] == (LENGTHS[item["prompt"]] - 1) // 128 * 128
    for item in run_tiny("bf16-whole")["rounds"][len(LENGTHS) + 2]:
        assert item["cached"] == LENGTHS[EXTENDED[item["prompt"] - len(LENGTHS)]] // 128 * 128
