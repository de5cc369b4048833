"""One arm in one process: boots an engine, runs cases, prints one JSON object a line on stdout.

The conversations' history is not computed: vLLM's `DecodeBenchConnector` claims it as already present, so a 250K context costs
no prefill. Its values are synthetic, so speeds are measured here and quality elsewhere (`validate recall`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from .arms import ARMS, Case

WARM_TOKENS = 8


def emit(**row: Any) -> None:
    print(json.dumps(row), file=sys.__stdout__, flush=True)


def run_case(engine: Any, case: Case, seed: int) -> dict[str, Any]:
    """Decodes `case` once; times the stretch in which every request is past its warm-up and none has finished."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    total = WARM_TOKENS + case.steps
    params = SamplingParams(temperature=0, max_tokens=total, ignore_eos=True, detokenize=False)
    for i in range(case.requests):
        tokens = [rng.randrange(1000, 50000) for _ in range(case.context)]
        engine.add_request(f"{case.name}-{seed}-{i}", {"prompt_token_ids": tokens}, params)
    produced: dict[str, int] = {}
    started = begun = None
    queued = time.perf_counter()
    first_tokens = stamp = 0.0
    at_begin = 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            produced[out.request_id] = len(out.outputs[0].token_ids)
        now = time.perf_counter()
        if started is None and len(produced) == case.requests:
            started, first_tokens = now, now - queued
        if begun is None and len(produced) == case.requests and min(produced.values()) >= WARM_TOKENS:
            begun, at_begin = now, sum(produced.values())
        if begun is not None and max(produced.values()) < total:
            stamp, at_end = now, sum(produced.values())
    if begun is None or stamp <= begun:
        raise RuntimeError(f"{case.name}: the requests never decoded together (admitted {len(produced)} of {case.requests})")
    tokens = at_end - at_begin
    seconds = stamp - begun
    return {
        "requests": case.requests,
        "context": case.context,
        "tokens_per_s": tokens / seconds,
        "ms_per_token_row": seconds * 1e3 * case.requests / tokens,
        "first_tokens_s": first_tokens,
        "measured_s": seconds,
    }


def sparse_counters() -> Callable[[], dict[str, float]]:
    """What the engine counted since the last call. The engine runs in this process, or there is nothing to read."""
    import torch

    from sparsekv.engine.metrics import step_counters

    counters = step_counters(torch.device("cuda"))

    def read() -> dict[str, float]:
        counters.drain()
        torch.cuda.synchronize()
        return counters.drain()

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=sorted(ARMS))
    parser.add_argument("--model", required=True, help="folder with config.json; weights are random")
    parser.add_argument("--cases", required=True, help="JSON list of [requests, context, steps]")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=262144)
    parser.add_argument("--kv-memory-gib", type=float, default=None, help="cap of vLLM's own KV memory on the GPU")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.93)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    arm = ARMS[args.arm]
    cases = [Case(*c) for c in json.loads(args.cases)]

    import torch
    from vllm import LLM

    if not arm.sparse:
        os.environ.pop("SPARSEKV_PROFILE", None)
    connector = "FilledPoolConnector" if arm.sparse else "DecodeBenchConnector"
    transfer: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0, "fill_std": 0.5},
    }
    if arm.sparse:
        transfer["kv_connector_module_path"] = "sparsekv.engine.filled_pool"
    options: dict[str, Any] = {
        "model": args.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(c.requests for c in cases),
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "gdn_prefill_backend": "triton",
        "enable_prefix_caching": False,
        "seed": 0,
        "disable_log_stats": False,
        "kv_transfer_config": transfer,
        **arm.engine,
    }
    if args.kv_memory_gib is not None:
        options["kv_cache_memory_bytes"] = int(args.kv_memory_gib * 2**30)
    if args.drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": args.drafts}
    started = time.perf_counter()
    llm = LLM(**options)
    emit(arm=arm.name, event="boot", seconds=time.perf_counter() - started, drafts=args.drafts)
    read_counters = sparse_counters() if arm.sparse else dict
    for case in cases:
        for repeat in range(args.repeats):
            read_counters()
            row = run_case(llm.llm_engine, case, seed=repeat) | {"counters": read_counters()}
            free, total = torch.cuda.mem_get_info()
            emit(arm=arm.name, event="case", repeat=repeat, drafts=args.drafts, gpu_used_gib=(total - free) / 2**30, **row)


if __name__ == "__main__":
    main()
