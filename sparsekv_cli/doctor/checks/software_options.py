"""The installed vLLM has every option that the launch would use."""

from __future__ import annotations

from sparsekv.profiles.launch import build_launch
from sparsekv_cli.serve.vllm_options import unknown_options, vllm_options

from ..check import Check, Findings, error, ok, skip
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if machine.loaded is None or machine.vllm is None:
        yield skip("no profile, or no vLLM")
        return
    launch = build_launch(machine.loaded, program=(), profile_path="", extra=machine.extra)
    missing = unknown_options(launch.argv, vllm_options(machine.vllm))
    if missing:
        yield error(
            f"vLLM {machine.vllm.version} lacks {len(missing)} option(s) of the launch",
            *missing,
            cause="the profile or the command line is for another version of vLLM",
            remedy="sparsekv serve --explain shows which key each option comes from",
        )
    else:
        yield ok(f"vLLM {machine.vllm.version} has all {len(launch.options)} options of the launch")


CHECK = Check("software.options", "Software", "whether vLLM has the options of the launch", _run, limit_s=200)
