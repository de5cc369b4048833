"""The CUDA engine with real weights against stock vLLM: graphs, eager, hot set spilling, poisoned pool, prefix hits.

Each arm is one engine in a process of its own; all arms see the same prompts. Bf16 batches meet near ties, so a divergence is
allowed only where the two best tokens of the other arm lie within `NEAR_TIE` of each other.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODEL = Path(os.environ.get("SPARSEKV_CACHE", Path.home() / ".cache/sparsekv")) / "models/SmolLM2-135M-Instruct"
BASIS = Path(__file__).parents[2] / "basis/files/smollm2-135m-instruct.safetensors"
NEAR_TIE = 0.15
LENGTHS = (1, 5, 127, 128, 129, 640, 1000, 2049, 3000, 4095, 4097, 6000, 7900)
MAX_TOKENS = 48
FULL = {"min_tokens": 8192, "max_tokens": 8192, "dense_below": 256}
QUARTER = {"min_tokens": 1000, "max_tokens": 2000, "mass": 0.999, "dense_below": 512}


def words(length: int, seed: int) -> list[int]:
    """Token ids with structure to copy: a random phrase book repeated in random order."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(100, 40000) for _ in range(rng.randrange(3, 12))] for _ in range(40)]
    out: list[int] = []
    while len(out) < length:
        out += rng.choice(phrases)
    return out[:length]


def profile(row_format: str, policy: dict, hot_mib: int = 256, placement: str = "host") -> dict:
    kv = {"dtype": row_format, "pool_tokens": 65536, "placement": placement, "hot_bytes": hot_mib * 2**20}
    return {"kv": kv, "sketch": {"basis": str(BASIS)}, "selection": policy}


ARMS = {
    "stock": (None, {"attention_backend": "FLASH_ATTN"}),
    "stock-int8": (None, {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "int8_per_token_head"}),
    "bf16-full": (profile("bf16", FULL), {}),
    "bf16-full-eager": (profile("bf16", FULL), {"enforce_eager": True}),
    "int8-full": (profile("int8", FULL), {}),
    "int8-full-spill": (profile("int8", FULL, hot_mib=4), {}),
    "int8-full-gpu": (profile("int8", FULL, placement="gpu"), {}),
    "int8-quarter": (profile("int8", QUARTER), {}),
    "int4-quarter": (profile("int4", QUARTER), {}),
}


@pytest.fixture(scope="session")
def run_arm(tmp_path_factory):
    done: dict[str, dict] = {}
    folder = tmp_path_factory.mktemp("arms")
    prompts = [words(n, seed=n) for n in LENGTHS]
    prompts += [p + words(50, seed=1) for p in prompts[5:8]]  # extend three conversations: prefix hits
    first = list(range(len(LENGTHS)))
    rounds = [[i] for i in first] + [first, first, list(range(len(LENGTHS), len(prompts)))]

    def run(name: str) -> dict:
        if name not in done:
            resolved, engine = ARMS[name]
            options = {"max_model_len": 8192, "max_num_seqs": 16, "gpu_memory_utilization": 0.5, "block_size": 128, **engine}
            spec = {"model": str(MODEL), "engine": options, "profile": resolved, "poison": resolved is not None}
            spec |= {"prompts": prompts, "rounds": rounds, "max_tokens": MAX_TOKENS}
            spec_path, out_path = folder / f"{name}.json", folder / f"{name}.out.json"
            spec_path.write_text(json.dumps(spec))
            command = [sys.executable, str(Path(__file__).with_name("cuda_arm.py")), str(spec_path), str(out_path)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
            assert ended.returncode == 0, f"{name}:\n{ended.stderr[-6000:]}"
            done[name] = json.loads(out_path.read_text())
        return done[name]

    return run


def differences(a: dict, b: dict) -> list[str]:
    """Where two arms' tokens part and neither sees a near tie."""
    found = []
    for number, (round_a, round_b) in enumerate(zip(a["rounds"], b["rounds"], strict=True)):
        for x, y in zip(round_a, round_b, strict=True):
            at = next((i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t), None)
            if at is None:
                continue
            gaps = [side["logprobs"][at][0] - side["logprobs"][at][1] for side in (x, y)]
            if min(gaps) > NEAR_TIE:
                found.append(f"round {number} prompt {x['prompt']} token {at}: gaps {gaps[0]:.3f} {gaps[1]:.3f}")
    return found


def agreement(a: dict, b: dict) -> float:
    """Share of generated tokens before the first difference."""
    same = total = 0
    for round_a, round_b in zip(a["rounds"], b["rounds"], strict=True):
        for x, y in zip(round_a, round_b, strict=True):
            at = next((i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t), MAX_TOKENS)
            same, total = same + at, total + MAX_TOKENS
    return same / total


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
    assert differences(a, b) == []


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
