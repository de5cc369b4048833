"""One engine in one process for test_cuda.py: `cuda_arm.py SPEC.json OUT.json`.

SPEC: model, engine (keyword arguments of vllm.LLM), profile (resolved, or null for stock vLLM), prompts (token ids), rounds
(lists of prompt numbers sent together), max_tokens. OUT: for each round and prompt the tokens, their top-2 logprobs, cached tokens.
"""

import json
import os
import sys
import tempfile
from pathlib import Path


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.pop("SPARSEKV_PROFILE", None)
    options = dict(spec["engine"])
    if spec["profile"] is not None:
        path = Path(tempfile.mkdtemp()) / "profile.json"
        path.write_text(json.dumps(spec["profile"]))
        os.environ["SPARSEKV_PROFILE"] = str(path)
        options["attention_backend"] = "CUSTOM"
        options["kv_transfer_config"] = {"kv_connector": "SparseKVConnector", "kv_role": "kv_both"}

    from vllm import LLM, SamplingParams

    llm = LLM(model=spec["model"], skip_tokenizer_init=True, seed=0, **options)
    if spec.get("poison"):
        poison()
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
    result = {"rounds": rounds, "counters": {}}
    if spec["profile"] is not None:
        import torch

        from sparsekv.engine.metrics import step_counters

        counters = step_counters(torch.device("cuda"))
        counters.drain()
        torch.cuda.synchronize()
        result["counters"] = counters.drain()
    Path(sys.argv[2]).write_text(json.dumps(result))


def poison() -> None:
    """Fills every row nobody wrote yet with NaN patterns: whoever reads one shows it."""
    import torch

    from sparsekv.engine.cuda_runtime import cuda_runtime

    for pool in cuda_runtime().layers:
        pool.rows.view(torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
