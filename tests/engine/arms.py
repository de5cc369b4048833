"""Engines to compare: each arm is one engine in a process of its own (`arm.py`); all arms of a comparison see the same prompts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Arm = dict[str, Any]
"""What arm.py wrote."""


def phrases(length: int, seed: int, vocabulary: int = 40000) -> list[int]:
    """Token ids with structure to copy: a random phrase book repeated in random order."""
    rng = random.Random(seed)
    book = [[rng.randrange(100, vocabulary) for _ in range(rng.randrange(3, 12))] for _ in range(40)]
    out: list[int] = []
    while len(out) < length:
        out += rng.choice(book)
    return out[:length]


def profile(basis: Path, row_format: str, policy: dict[str, Any], *, pool_tokens: int = 65536, hot_mib: int = 0, placement: str = "host") -> Arm:
    kv = {"dtype": row_format, "pool_tokens": pool_tokens, "placement": placement, "hot_bytes": hot_mib * 2**20}
    return {"kv": kv, "sketch": {"basis": str(basis)}, "selection": policy}


def arm_runner(
    folder: Path, device: str, model: Path, arms: dict[str, tuple[Arm | None, Arm]], common: Arm, prompts: Sequence[list[int]], rounds: Any, max_tokens: int
) -> Callable[[str], Arm]:
    """Gives a function that runs an arm by its name, once."""
    done: dict[str, Arm] = {}

    def run(name: str) -> Arm:
        if name not in done:
            resolved, engine = arms[name]
            spec = {"device": device, "model": str(model), "engine": {**common, **engine}, "profile": resolved}
            spec |= {"prompts": prompts, "rounds": rounds, "max_tokens": max_tokens}
            spec_path, out_path = folder / f"{name}.json", folder / f"{name}.out.json"
            spec_path.write_text(json.dumps(spec))
            command = [sys.executable, str(Path(__file__).with_name("arm.py")), str(spec_path), str(out_path)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            assert ended.returncode == 0, f"{name}:\n{ended.stderr[-6000:]}"
            done[name] = json.loads(out_path.read_text())
        return done[name]

    return run


def differences(a: Arm, b: Arm, near_tie: float = 0.0) -> list[str]:
    """Where two arms' tokens part although neither sees its two best tokens within `near_tie` (log-probability)."""
    found = []
    for number, x, y, at in _pairs(a, b):
        if at == len(x["tokens"]):
            continue
        gaps = [side["logprobs"][at][0] - side["logprobs"][at][1] for side in (x, y)]
        if min(gaps) >= near_tie:
            found.append(f"round {number} prompt {x['prompt']} token {at}: gaps {gaps[0]:.3f} {gaps[1]:.3f}")
    return found


def agreement(a: Arm, b: Arm) -> float:
    """Share of generated tokens before the first difference."""
    pairs = list(_pairs(a, b))
    return sum(at for _, _, _, at in pairs) / sum(len(x["tokens"]) for _, x, _, _ in pairs)


def logprob_error(a: Arm, b: Arm) -> float:
    """Largest difference of the best token's log-probability before the first difference of the tokens."""
    return max(
        (abs(x["logprobs"][i][0] - y["logprobs"][i][0]) for _, x, y, at in _pairs(a, b) for i in range(at)),
        default=0.0,
    )


def _pairs(a: Arm, b: Arm) -> Any:
    for number, (round_a, round_b) in enumerate(zip(a["rounds"], b["rounds"], strict=True)):
        for x, y in zip(round_a, round_b, strict=True):
            at = next((i for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t), len(x["tokens"]))
            yield number, x, y, at
