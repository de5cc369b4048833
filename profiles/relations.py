"""What no single key can get wrong: values that do not go together. Each rule is named by the key to change."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .fields import FieldPath
from .free_options import ANSWERED_FOR, option_name
from .schema import Profile

BLOCK_TOKENS = 128
"""Tokens of one block of the pool (`engine.config.BLOCK_SIZE`); chunks of a prompt are cut at its multiples."""

SECRET_NAME = re.compile(r"(?i)(key|token|secret|password|credential)s?$")


def check_relations(profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    """Yields the field to change and what is wrong with it."""
    yield from _hardware(profile)
    yield from _cache(profile)
    yield from _scheduling(profile)
    yield from _speculation(profile)
    yield from _environment(profile)


def _hardware(profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    hardware, tensor = profile.hardware, profile.parallel.tensor
    if hardware.device == "cpu":
        if hardware.gpu or hardware.vram:
            yield ("hardware", "gpu" if hardware.gpu else "vram"), "a profile for `device: cpu` describes no card"
        if profile.kv.placement == "gpu":
            yield ("kv", "placement"), "`gpu` needs `hardware.device: cuda`"
        if profile.kv.hot:
            yield ("kv", "hot"), "a hot set is a copy on a card; there is none with `hardware.device: cpu`"
        return
    for name in ("gpu", "vram", "compute_capability"):
        if not getattr(hardware, name):
            yield ("hardware", name), "required with `device: cuda`"
    if hardware.gpus < 1:
        yield ("hardware", "gpus"), "must be at least 1 with `device: cuda`"
    if tensor > hardware.gpus:
        yield ("parallel", "tensor"), f"{tensor} ranks need {tensor} cards, hardware.gpus is {hardware.gpus}"
    if profile.kv.placement == "gpu" and profile.kv.hot:
        yield ("kv", "hot"), "rows that lie on the card need no hot set; leave it out with `placement: gpu`"
    if profile.kv.placement == "host" and not profile.kv.hot:
        yield ("kv", "hot"), "required with `placement: host`: selected rows are read from there"


def _cache(profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    sketch, selection, shape = profile.sketch, profile.selection, profile.model.shape
    if not sketch.basis.endswith(".safetensors"):
        yield ("sketch", "basis"), "a basis is a *.safetensors file; other formats may run code when they are read"
    if sketch.rank * sketch.bits % 8:
        yield ("sketch", "rank"), f"{sketch.rank} codes of {sketch.bits} bits are no whole bytes"
    if selection.min_tokens > selection.max_tokens:
        yield ("selection", "min_tokens"), f"{selection.min_tokens} is more than selection.max_tokens, {selection.max_tokens}"
    if shape is None:
        return
    if sketch.rank > shape.head_dim:
        yield ("sketch", "rank"), f"{sketch.rank} is more than the model's head_dim, {shape.head_dim}"
    if shape.query_heads % shape.kv_heads:
        yield ("model", "shape", "kv_heads"), f"{shape.query_heads} query heads do not share {shape.kv_heads} KV heads evenly"
    if shape.kv_heads % profile.parallel.tensor:
        yield ("parallel", "tensor"), f"{profile.parallel.tensor} ranks do not share {shape.kv_heads} KV heads evenly"
    if profile.speculation.method == "mtp" and not shape.draft_layers:
        yield ("speculation", "method"), "`mtp` needs a model with a multi-token-prediction head; model.shape.draft_layers is 0"


def _scheduling(profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    scheduler = profile.scheduler
    if scheduler.max_num_batched_tokens % BLOCK_TOKENS:
        message = f"{scheduler.max_num_batched_tokens} is not a multiple of {BLOCK_TOKENS}, the block in which prompts are cut"
        yield ("scheduler", "max_num_batched_tokens"), message
    per_step = scheduler.max_num_seqs * (1 + profile.speculation.tokens)
    if scheduler.max_num_batched_tokens <= per_step:
        yield (
            ("scheduler", "max_num_batched_tokens"),
            f"{scheduler.max_num_batched_tokens} leaves no room for prompts beside {per_step} decode tokens a step",
        )
    if profile.recurrent.retention_interval and not scheduler.prefix_caching:
        yield ("recurrent", "retention_interval"), "states are kept for prefix caching, which is off"
    if profile.recurrent.checkpoints and (not scheduler.prefix_caching or profile.recurrent.cache_mode == "none"):
        yield ("recurrent", "checkpoints"), "needs scheduler.prefix_caching and recurrent.cache_mode: align"
    if profile.recurrent.retention_interval % BLOCK_TOKENS:
        yield ("recurrent", "retention_interval"), f"{profile.recurrent.retention_interval} is not a multiple of {BLOCK_TOKENS}"


def _speculation(profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    speculation = profile.speculation
    if speculation.method == "none" and speculation.tokens:
        yield ("speculation", "tokens"), f"{speculation.tokens} drafts with `method: none`"
    if speculation.method != "none" and not speculation.tokens:
        yield ("speculation", "tokens"), f"`method: {speculation.method}` needs at least 1"
    if speculation.ngram_min > speculation.ngram_max:
        yield ("speculation", "ngram_min"), f"{speculation.ngram_min} is more than ngram_max, {speculation.ngram_max}"


def _environment(profile: Profile) -> Iterator[tuple[FieldPath, str]]:
    for name in profile.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield ("env", name), "no name of an environment variable"
        elif SECRET_NAME.search(name):
            yield ("env", name), "looks like a secret; profiles are printed and stored, set it in the environment"
        elif name.startswith("SPARSEKV_"):
            yield ("env", name), "sparsekv sets its own variables"
    for name in profile.vllm:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
            yield ("vllm", name), "write the option as in `max-model-len`: lower case, no leading dashes"
        elif answer := ANSWERED_FOR.get(option_name(f"--{name.removeprefix('no-')}") or ""):
            yield ("vllm", name), f"not set here: {answer}"
