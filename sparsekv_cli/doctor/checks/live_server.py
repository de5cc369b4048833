"""The running server answers, and sparsekv is at work in it."""

from __future__ import annotations

from ..check import Check, Findings, error, ok, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    metrics = machine.metrics
    if metrics.failure:
        yield error(metrics.failure, cause="no server there, another address, or a key that is missing", remedy="export SPARSEKV_API_KEY=…")
        return
    if not any(name.startswith("vllm:") for name in metrics.samples):
        yield error("the server is not vLLM: it has no `vllm:` metrics")
        return
    if not metrics.has_plugin:
        yield error(
            "the server is vLLM without sparsekv",
            cause="it was not started by `sparsekv serve`, or VLLM_PLUGINS keeps the plug-in out",
            remedy="sparsekv serve --profile NAME",
        )
    else:
        yield ok("the server answers, and sparsekv is at work in it")
    profile = machine.profile
    if profile is not None and metrics.max_model_len is not None and metrics.max_model_len != profile.model.max_model_len:
        yield warn(
            f"the server takes {metrics.max_model_len:,} tokens, the profile says {profile.model.max_model_len:,}",
            cause="another profile, or --set",
        )


CHECK = Check("live.server", "Running server", "whether the server answers and runs the plug-in", _run, limit_s=15)
