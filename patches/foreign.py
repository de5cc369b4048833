"""Other patch series on the same vLLM, known by names that they add. Ours goes on top of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from .tree import VllmTree

MARKS: dict[str, Mapping[str, tuple[str, str]]] = {
    "HyperQwen": {
        "speed-knobs-envs": ("envs.py", "VLLM_SPEC_DECODE_ATTN"),
        "engine-stall-sentinel": ("v1/engine/core.py", "_StallSentinel"),
        "engine-completion-log": ("v1/core/sched/scheduler.py", "Request finished: req %s"),
        "hybrid-sw-block-promote": ("v1/core/kv_cache_utils.py", "_promote_indivisible_block_sizes"),
        "mamba-align-checkpoint-order": ("v1/core/single_type_kv_cache_manager.py", "VLLM_MAMBA_ALIGN_KEEP_CHECKPOINTS"),
        "auth-deny-default": ("entrypoints/serve/middleware/authenticate.py", "UNGUARDED_PATHS"),
    },
}
"""Series -> patch -> (file, a name that only the patch brings). A sample of each series, enough to tell that it is there."""


def foreign_series(tree: VllmTree) -> dict[str, list[str]]:
    """The series found in the tree, each with those of its known patches that are there."""
    found = {}
    for series, marks in MARKS.items():
        there = []
        for patch, (path, mark) in marks.items():
            with suppress(OSError):
                if mark.encode() in (tree.root / path).read_bytes():
                    there.append(patch)
        if there:
            found[series] = there
    return found
