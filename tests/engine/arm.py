"""One engine in one process for the tests of this folder: `arm.py SPEC.json OUT.json`.

SPEC: device, model, engine (keyword arguments of vllm.LLM), profile (resolved, or null for stock vLLM), prompts (token ids), rounds
(lists of prompt numbers sent together), max_tokens. OUT: for each round and prompt the tokens, their top-2 logprobs, cached tokens;
and what the engine counted.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_AOT_COMPILE": "0"}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("SPARSEKV_PROFILE", None)
    options = dict(spec["engine"])
    if spec["device"] == "cpu":
        os.environ.update(CPU_ENVIRONMENT)
    if spec["profile"] is not None:
        path = Path(tempfile.mkdtemp()) / "profile.json"
        path.write_text(json.dumps(spec["profile"]))
        os.environ["SPARSEKV_PROFILE"] = str(path)
        if spec["device"] == "cuda":
            options["attention_backend"] = "CUSTOM"
        options["kv_transfer_config"] = {"kv_connector": "SparseKVConnector", "kv_role": "kv_both"}
        if spec["device"] == "cpu":
            _poison_cpu_rows()

    from vllm import LLM, SamplingParams

    llm = LLM(model=spec["model"], skip_tokenizer_init=True, seed=0, **options)
    counters = _collect_counters() if spec["profile"] is not None else {}
    if spec["device"] == "cuda" and spec["profile"] is not None:
        _poison_cuda_rows()
    params = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True, logprobs=2, detokenize=False)
    rounds = []
    for numbers in spec["rounds"]:
        outputs = llm.generate([{"prompt_token_ids": spec["prompts"][i]} for i in numbers], params, use_tqdm=False)
        rounds.append(
            [
                {
                    "prompt": i,
                    "tokens": list(o.outputs[0].token_ids),
                    "logprobs": [sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in o.outputs[0].logprobs],
                    "cached": o.num_cached_tokens,
                }
                for i, o in zip(numbers, outputs, strict=True)
            ]
        )
    Path(sys.argv[2]).write_text(json.dumps({"rounds": rounds, "counters": counters}))


def _collect_counters() -> dict[str, float]:
    """Sums what the engine reports from now on; the engine itself takes it away each step."""
    from sparsekv.engine.metrics import StepCounters

    totals: dict[str, float] = {}
    drain = StepCounters.drain

    def drain_and_add(self: StepCounters) -> dict[str, float]:
        step = drain(self)
        for key, value in step.items():
            totals[key] = totals.get(key, 0.0) + value
        return step

    StepCounters.drain = drain_and_add
    return totals


# Rows that nobody wrote hold NaN patterns: whoever reads one shows it.


def _poison_cpu_rows() -> None:
    from sparsekv.engine import backend_cpu

    allocate = backend_cpu.allocate_layer

    def poisoned(*args):
        pool = allocate(*args)
        pool.rows.fill_(0xFF)
        if pool.row_scales is not None:
            pool.row_scales.fill_(float("nan"))
        return pool

    backend_cpu.allocate_layer = poisoned


def _poison_cuda_rows() -> None:
    import torch

    from sparsekv.engine.cuda_runtime import cuda_runtime

    for pool in cuda_runtime().layers:
        pool.rows.view(torch.uint8).fill_(0xFF)
        if pool.row_scales is not None:
            pool.row_scales.fill_(float("nan"))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
