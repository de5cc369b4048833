"""A profile becomes a vLLM command. The only place that knows vLLM's option names."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .budget import pool_size
from .fields import FieldPath
from .free_options import refuse_answered_for
from .loader import LoadedProfile
from .relations import BLOCK_TOKENS
from .schema import Profile, Shape

CONNECTOR = {"kv_connector": "SparseKVConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
SCHEDULER = "sparsekv.engine.scheduler.SparseScheduler"
RETRY_AFTER = "sparsekv.engine.retry_after.RetryAfter"

SINCE = {"--tool-strict-level": "0.31"}
"""Options of this file that older supported versions of vLLM lack; 0.30 has all others, and 0.32 has all."""


@dataclass(frozen=True)
class Option:
    """One vLLM option: `--name` alone where `value` is None."""

    name: str
    value: str | None
    why: str
    field: FieldPath | None = None
    """The profile's key it comes from; None where sparsekv needs it so."""

    @property
    def words(self) -> list[str]:
        return [self.name] if self.value is None else [self.name, self.value]


@dataclass(frozen=True)
class Variable:
    """One environment variable of the server."""

    name: str
    value: str
    why: str
    field: FieldPath | None = None
    shell: str | None = None
    """For a secret: what stands for the value in a command to paste."""

    @property
    def shown(self) -> str:
        return shlex.quote(self.value) if self.shell is None else self.shell


@dataclass(frozen=True)
class Launch:
    """What is executed: `PROGRAM… OPTIONS… EXTRA…` with `variables` added to the environment."""

    program: tuple[str, ...]
    """The words that start vLLM's server with the model, such as `vllm serve MODEL`."""
    options: tuple[Option, ...]
    variables: tuple[Variable, ...]
    extra: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        return [*self.program, *(word for option in self.options for word in option.words), *self.extra]

    def shell(self) -> str:
        """A command to paste, one option a line; no secret is in it."""
        lines = [f"{variable.name}={variable.shown}" for variable in self.variables]
        lines.append(shlex.join(self.program))
        lines += [f"  {shlex.join(option.words)}" for option in self.options]
        if self.extra:
            lines.append(f"  {shlex.join(self.extra)}")
        return " \\\n".join(lines)


def build_launch(
    loaded: LoadedProfile,
    *,
    program: Sequence[str],
    profile_path: str,
    gpus: Sequence[str] = (),
    api_key: tuple[str, str] | None = None,
    extra: Sequence[str] = (),
) -> Launch:
    """The whole command.

    Args:
        program: what starts vLLM's server with the model.
        profile_path: where the resolved profile for the engine lies (`engine_document`).
        gpus: UUIDs of the cards, none where they are not known.
        api_key: the key, and what stands for it in a command to paste. It reaches the server by its environment alone.
        extra: vLLM arguments of the user, put last so that they win.

    Raises:
        SparsekvError: `extra` holds an option that sparsekv answers for.
    """
    profile = loaded.profile
    refuse_answered_for(extra)
    return Launch(tuple(program), tuple(_options(profile)), tuple(_variables(profile, profile_path, gpus, api_key)), tuple(extra))


def engine_document(loaded: LoadedProfile, shape: Shape) -> dict[str, Any]:
    """The resolved profile as the engine's processes read it: plain numbers, absolute paths, no secrets."""
    document = loaded.profile.model_dump(mode="python")
    document["name"] = loaded.name
    document["kv"]["pool_tokens"] = pool_size(loaded.profile, shape).tokens
    document["kv"]["hot_bytes"] = loaded.profile.kv.hot
    return document


def _options(profile: Profile) -> Iterator[Option]:
    yield from _model_options(profile)
    yield from _cache_options(profile)
    yield from _scheduler_options(profile)
    yield from _memory_options(profile)
    yield from _server_options(profile)
    for name, value in profile.vllm.items():
        yield _free_option(name, value)


def _model_options(profile: Profile) -> Iterator[Option]:
    model, parallel = profile.model, profile.parallel
    yield Option("--served-model-name", model.name, "name in requests", ("model", "name"))
    yield Option("--dtype", model.dtype, "arithmetic of the model", ("model", "dtype"))
    yield Option("--max-model-len", str(model.max_model_len), "longest request", ("model", "max_model_len"))
    yield Option("--no-trust-remote-code", None, "nothing in a model's folder is executed")
    if model.text_only:
        yield Option("--language-model-only", None, "leaves the vision tower out", ("model", "text_only"))
    if model.chat_template:
        yield Option("--chat-template", model.chat_template, "in place of the model's own", ("model", "chat_template"))
    yield Option("--tensor-parallel-size", str(parallel.tensor), "cards that share the model", ("parallel", "tensor"))
    if parallel.tensor > 1:
        name = "--no-disable-custom-all-reduce" if parallel.custom_all_reduce else "--disable-custom-all-reduce"
        yield Option(name, None, "how ranks add up their results", ("parallel", "custom_all_reduce"))
    if profile.hardware.numa_bind:
        yield Option("--numa-bind", None, "workers beside their cards", ("hardware", "numa_bind"))
    speculation = profile.speculation
    if speculation.method != "none":
        config: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.tokens}
        if speculation.method == "mtp":
            config["draft_sample_method"] = speculation.sample
        else:
            config |= {"prompt_lookup_min": speculation.ngram_min, "prompt_lookup_max": speculation.ngram_max}
        yield Option("--speculative-config", json.dumps(config), "drafts that one step verifies", ("speculation", "method"))


def _cache_options(profile: Profile) -> Iterator[Option]:
    if profile.hardware.device == "cuda":
        yield Option("--attention-backend", "CUSTOM", "sparsekv's backend")
    yield Option("--kv-cache-dtype", "auto", "rows have a format of their own, kv.dtype")
    yield Option("--block-size", str(BLOCK_TOKENS), "a block of the row pool")
    yield Option("--kv-transfer-config", json.dumps(CONNECTOR), "carries sparsekv's statistics to /metrics")
    caching = profile.scheduler.prefix_caching
    yield Option(f"--{'' if caching else 'no-'}enable-prefix-caching", None, "reuse of known prompts", ("scheduler", "prefix_caching"))
    recurrent = profile.recurrent
    if profile.model.shape is None or profile.model.shape.recurrent_layers:
        mode = recurrent.cache_mode if caching else "none"
        yield Option("--mamba-cache-mode", mode, "recurrent states at block boundaries", ("recurrent", "cache_mode"))
        yield Option("--mamba-ssm-cache-dtype", recurrent.state_dtype, "precision of recurrent states", ("recurrent", "state_dtype"))
    if recurrent.checkpoints:
        # Every state is offered to the connector; which it keeps follows retention_interval and retention_turns.
        interval, why = str(BLOCK_TOKENS), "states go to RAM, by sparsekv's own policy"
        yield Option("--prefix-cache-retention-interval", interval, why, ("recurrent", "checkpoints"))
    elif recurrent.retention_interval:
        interval = str(recurrent.retention_interval)
        yield Option("--prefix-cache-retention-interval", interval, "states kept inside a prompt", ("recurrent", "retention_interval"))


def _scheduler_options(profile: Profile) -> Iterator[Option]:
    scheduler = profile.scheduler
    yield Option("--max-num-seqs", str(scheduler.max_num_seqs), "requests that run at once", ("scheduler", "max_num_seqs"))
    tokens = str(scheduler.max_num_batched_tokens)
    yield Option("--max-num-batched-tokens", tokens, "tokens of one step", ("scheduler", "max_num_batched_tokens"))
    yield Option("--scheduler-cls", SCHEDULER, "prompts beside answers, within a time", ("scheduler", "itl_target_ms"))
    if scheduler.max_queued_requests:
        queue = str(scheduler.max_queued_requests)
        yield Option("--max-num-queued-reqs", queue, "more are turned away with 503", ("scheduler", "max_queued_requests"))
    if scheduler.max_queued_tokens:
        queue = str(scheduler.max_queued_tokens)
        yield Option("--max-num-queued-tokens", queue, "more are turned away with 503", ("scheduler", "max_queued_tokens"))
    if scheduler.max_queued_requests or scheduler.max_queued_tokens:
        yield Option("--middleware", RETRY_AFTER, "tells who got 503 when to come back", ("scheduler", "retry_after_s"))


def _memory_options(profile: Profile) -> Iterator[Option]:
    memory = profile.memory
    utilization = f"{memory.gpu_memory_utilization:g}"
    yield Option("--gpu-memory-utilization", utilization, "share that may be filled", ("memory", "gpu_memory_utilization"))
    if memory.device_pool is not None:
        pool = str(memory.device_pool)
        yield Option("--kv-cache-memory-bytes", pool, "vLLM's own cache; rows are not in it", ("memory", "device_pool"))
    if not memory.cudagraphs:
        yield Option("--enforce-eager", None, "no CUDA graphs", ("memory", "cudagraphs"))
    elif memory.max_cudagraph_size:
        size = str(memory.max_cudagraph_size)
        yield Option("--max-cudagraph-capture-size", size, "largest captured batch", ("memory", "max_cudagraph_size"))


def _server_options(profile: Profile) -> Iterator[Option]:
    server = profile.server
    yield Option("--host", server.host, "listen address", ("server", "host"))
    yield Option("--port", str(server.port), "listen port", ("server", "port"))
    if server.reasoning_parser:
        yield Option("--reasoning-parser", server.reasoning_parser, "finds the thinking", ("server", "reasoning_parser"))
    if server.tool_parser:
        yield Option("--enable-auto-tool-choice", None, "models choose tools themselves", ("server", "tool_parser"))
        yield Option("--tool-call-parser", server.tool_parser, "finds tool calls", ("server", "tool_parser"))
    if server.tool_strict_level:
        yield Option("--tool-strict-level", server.tool_strict_level, "schema checks of tool calls", ("server", "tool_strict_level"))
    if server.sse_keep_alive_seconds:
        seconds = str(server.sse_keep_alive_seconds)
        yield Option("--sse-keep-alive-interval", seconds, "silent streams stay open", ("server", "sse_keep_alive_seconds"))
    yield Option("--enable-prompt-tokens-details", None, "answers tell how much of a prompt was known")
    yield Option("--no-enable-log-requests", None, "requests stay out of the log")


def _free_option(name: str, value: str | int | float | bool) -> Option:
    field = ("vllm", name)
    if isinstance(value, bool):
        return Option(f"--{'' if value else 'no-'}{name}", None, "stated by the profile", field)
    return Option(f"--{name}", str(value), "stated by the profile", field)


def _variables(profile: Profile, profile_path: str, gpus: Sequence[str], api_key: tuple[str, str] | None) -> Iterator[Variable]:
    yield Variable("SPARSEKV_PROFILE", profile_path, "switches the plug-in on, in every process")
    yield Variable("PYTHONSAFEPATH", "1", "keeps the working folder off Python's path")
    yield Variable("HF_HUB_OFFLINE", "1", "the model is a folder; no hub is asked")
    yield Variable("VLLM_NO_USAGE_STATS", "1", "no usage reports")
    if profile.hardware.device == "cuda":
        segments = f"expandable_segments:{profile.memory.expandable_segments}"
        yield Variable("PYTORCH_CUDA_ALLOC_CONF", segments, "allocator", ("memory", "expandable_segments"))
        yield Variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "cards are numbered as nvidia-smi does")
    if profile.hardware.platform == "wsl2":
        yield Variable("VLLM_WSL2_ENABLE_PIN_MEMORY", "1", "vLLM would not pin memory there", ("hardware", "platform"))
    if gpus:
        yield Variable("CUDA_VISIBLE_DEVICES", ",".join(gpus), "the profile's cards, whatever their order", ("hardware", "gpu"))
    if api_key:
        value, shell = api_key
        yield Variable("VLLM_API_KEY", value, "clients must send it", ("server", "api_key_file"), shell)
    for name, value in profile.env.items():
        yield Variable(name, value, "stated by the profile", ("env", name))
