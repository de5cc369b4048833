"""`sparsekv serve`: what it refuses and how, what it prints, what it executes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Refuses = Callable[..., None]
Run = Callable[..., Any]
Executed = list[tuple[str, list[str], dict[str, str]]]

KEY = "canary-key-0123456789abcdef"


def edit(site: Path, old: str, new: str) -> None:
    path = site / "tiny.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def profile(site: Path) -> str:
    return str(site / "tiny.yaml")


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    """What `os.execve` was called with; it ends the program, as the real one does."""
    calls: Executed = []

    def execve(path: str, argv: list[str], env: dict[str, str]) -> None:
        calls.append((path, argv, env))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    return calls


# ---- refusals


@pytest.fixture
def refuses(run: Run, executed: Executed) -> Refuses:
    """Runs `serve` and checks the message; nothing may have been started."""

    def check(status: int, *parts: str, arguments: tuple[str, ...]) -> None:
        outcome = run("serve", *arguments)
        assert outcome.status == status, outcome.stderr
        for part in parts:
            assert part in outcome.stderr
        assert outcome.stdout == ""
        assert not executed

    return check


def test_unknown_profile(refuses: Refuses, site: Path) -> None:
    refuses(2, "error: no profile named `cpu-dmo`", "did you mean `cpu-demo`?", arguments=("--profile", "cpu-dmo"))


def test_bad_yaml(refuses: Refuses, site: Path, profile: str) -> None:
    (site / "tiny.yaml").write_text("description: x\n\thardware: 1\n")
    refuses(2, "tiny.yaml:2:", "indented with a tab", arguments=("--profile", profile))


def test_unknown_and_wrong_keys_at_once(refuses: Refuses, site: Path, profile: str) -> None:
    edit(site, "  dtype: bf16\n", "  dtyp: bf16\n  dtype: fp8\n")
    refuses(2, "2 problems", "unknown key; did you mean `dtype`?", "expected one of bf16, int8, int4", arguments=("--profile", profile))


def test_missing_model(refuses: Refuses, site: Path, profile: str) -> None:
    edit(site, "path: model", "path: nowhere")
    refuses(2, "model's folder is not there", str(site / "nowhere"), arguments=("--profile", profile))


def test_missing_model_with_a_stated_shape(refuses: Refuses, site: Path, profile: str) -> None:
    edit(site, "path: model\n", "path: nowhere\n  shape: {attention_layers: 2, query_heads: 4, kv_heads: 2, head_dim: 16}\n")
    refuses(2, "the model's folder is not there", arguments=("--profile", profile))


def test_shape_of_another_model(refuses: Refuses, site: Path, profile: str) -> None:
    edit(site, "path: model\n", "path: model\n  shape: {attention_layers: 3, query_heads: 4, kv_heads: 2, head_dim: 16}\n")
    refuses(2, "describes another model", "model.shape.attention_layers is 3, the model has 2", arguments=("--profile", profile))


def test_half_downloaded_shard(refuses: Refuses, site: Path, profile: str) -> None:
    shard = site / "model/model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    refuses(2, "1 shard(s) are damaged", "model.safetensors", arguments=("--profile", profile))


def test_folder_without_weights(refuses: Refuses, site: Path, profile: str) -> None:
    (site / "model/model.safetensors").rename(site / "model/pytorch_model.bin")
    refuses(2, "no safetensors weights", "pickle files, which can run code", "pytorch_model.bin", arguments=("--profile", profile))


@pytest.mark.parametrize("template", [None, "", "  \n"], ids=["none", "empty", "blank"])
def test_no_chat_template(refuses: Refuses, site: Path, profile: str, template: str | None) -> None:
    path = site / "model/chat_template.jinja"
    path.unlink() if template is None else path.write_text(template)
    refuses(2, "there is no chat template", "set model.chat_template", arguments=("--profile", profile))


def test_template_file_that_is_not_there(refuses: Refuses, site: Path, profile: str) -> None:
    refuses(2, "no chat template", "cannot be read", arguments=("--profile", profile, "--set", "model.chat_template=/nowhere.jinja"))


def test_context_longer_than_the_model_was_made_for(refuses: Refuses, profile: str) -> None:
    refuses(2, "4,096", "made for 2,048", arguments=("--profile", profile, "--set", "model.max_model_len=4096"))


def test_missing_basis(refuses: Refuses, site: Path, profile: str) -> None:
    (site / "tiny.safetensors").unlink()
    refuses(2, f"no basis file at: {site}/tiny.safetensors", "sparsekv refit-basis", arguments=("--profile", profile))


def test_basis_of_another_model(refuses: Refuses, files: Any, site: Path, profile: str) -> None:
    files.basis(site / "tiny.safetensors", files.config | {"num_key_value_heads": 4})
    refuses(2, "was fitted on another model: num kv heads 4 != 2", arguments=("--profile", profile))


def test_basis_of_another_rank(refuses: Refuses, files: Any, site: Path, profile: str) -> None:
    files.basis(site / "tiny.safetensors", files.config, rank=16)
    refuses(2, "of rank 16 with 4 bits, the profile says rank 8", "set sketch.rank: 16", arguments=("--profile", profile))


@pytest.mark.parametrize("kind", ["pickle", "truncated", "other safetensors"])
def test_file_that_is_no_basis(refuses: Refuses, files: Any, site: Path, profile: str, kind: str) -> None:
    path = site / "tiny.safetensors"
    match kind:
        case "pickle":
            path.write_bytes(b"\x80\x04\x95" + bytes(100))
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case _:
            files.safetensors(path)
    message = "no basis" if kind == "other safetensors" else "is not a safetensors file"
    refuses(2, str(path), message, arguments=("--profile", profile))


@pytest.mark.parametrize(("version", "accepted"), [("0.29.9", False), ("0.30.0+cpu", True), ("0.33.1rc1", True), ("0.34.0", False)])
def test_vllm_version(run: Run, profile: str, monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool) -> None:
    from packaging.version import Version

    from sparsekv.patches.tree import VllmTree

    monkeypatch.setattr(VllmTree, "version", Version(version))
    outcome = run("serve", "--profile", profile, "--dry-run")
    assert outcome.status == (0 if accepted else 3), outcome.stderr
    assert (f"vLLM {version} is not supported: sparsekv works with 0.30 up to 0.34" in outcome.stderr) is not accepted


def test_no_vllm_at_all(refuses: Refuses, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(3, "vLLM is not installed", "pip install 'sparsekv[cuda]'", arguments=("--profile", profile))


def test_pool_larger_than_free_memory(refuses: Refuses, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsekv_cli.doctor.machine import Machine

    monkeypatch.setattr(Machine, "available", 100 * 2**20)
    refuses(
        3,
        "the pool does not fit: ",
        "headroom 64.0 MiB + sketch 6.0 MiB + rows 64.0 MiB = 0.13 GiB needed",
        "0.10 GiB available",
        "2,048 blocks x 128 tokens x 2 KV heads x 2 layers x 64 B of bf16",
        arguments=("--profile", profile),
    )


def test_port_in_use(refuses: Refuses, profile: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        refuses(3, f"port {port} is taken", arguments=("--profile", profile, "--port", str(port)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "workstation.lan"])
@pytest.mark.parametrize("key", [None, "", "  "], ids=["none", "empty", "blank"])
def test_open_port_without_key(refuses: Refuses, profile: str, monkeypatch: pytest.MonkeyPatch, host: str, key: str | None) -> None:
    if key is not None:
        monkeypatch.setenv("SPARSEKV_API_KEY", key)
    refuses(2, f"would listen on {host} without a key", arguments=("--profile", profile, "--host", host))


def test_key_file_that_others_may_read(refuses: Refuses, site: Path, profile: str) -> None:
    file = site / "key"
    file.write_text(KEY)
    file.chmod(0o644)
    refuses(2, "others may read the key file", "mode 644", "chmod 600", arguments=("--profile", profile, "--api-key-file", str(file)))


def test_empty_key_file_counts_as_none(refuses: Refuses, site: Path, profile: str) -> None:
    file = site / "key"
    file.touch(0o600)
    refuses(2, "key file is empty", "without a key", arguments=("--profile", profile, "--host", "0.0.0.0", "--api-key-file", str(file)))


@pytest.mark.parametrize(
    "words",
    [("--api-key", KEY), ("--host=0.0.0.0",), ("--trust-remote-code",), ("--trust_remote_code",), ("--config", "x.yaml"), ("--model", "x")],
    ids=lambda words: words[0],
)
def test_arguments_that_would_undo_a_check(refuses: Refuses, profile: str, words: tuple[str, ...]) -> None:
    refuses(2, "not possible after `--`", arguments=("--profile", profile, "--", *words))


def test_option_that_vllm_lacks(refuses: Refuses, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsekv_cli.doctor.checks import software_options

    known = frozenset({"--seed"})
    monkeypatch.setattr(software_options, "vllm_options", lambda tree: known)
    refuses(2, "lacks", "--sed; did you mean --seed?", arguments=("--profile", profile, "--", "--sed", "1"))


@pytest.mark.parametrize(("key", "close"), [("tool_parser", "qwen3_coder"), ("reasoning_parser", "qwen3")])
def test_unknown_parser(refuses: Refuses, profile: str, key: str, close: str) -> None:
    setting = ("--set", f"server.{key}={close}x")
    refuses(2, f"has no {key} `{close}x`", f"set server.{key}: {close}", arguments=("--profile", profile, *setting))


def test_several_problems_at_once(refuses: Refuses, site: Path, profile: str) -> None:
    (site / "tiny.safetensors").unlink()
    (site / "model/chat_template.jinja").unlink()
    refuses(2, "2 problems", "model.tokenizer: ", "model.basis: ", arguments=("--profile", profile))


# ---- printing


def test_print_command(run: Run, site: Path, profile: str) -> None:
    outcome = run("serve", "--profile", profile, "--set", "scheduler.prefix_caching=off", "--print-command", "--", "--seed", "1")
    assert outcome.status == 0, outcome.stderr
    assert "  --no-enable-prefix-caching \\\n" in outcome.stdout
    assert outcome.stdout.endswith("  --seed 1\n")
    assert "PYTHONSAFEPATH=1 \\\n" in outcome.stdout
    assert f"{site}/model \\\n" in outcome.stdout


def test_printed_command_is_one_a_shell_understands(run: Run, site: Path, profile: str) -> None:
    """With a path that holds a blank, and a key that is not in it."""
    (site / "model").rename(site / "my model")
    edit(site, "path: model", "path: my model")
    file = site / "the key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    outcome = run("serve", "--profile", profile, "--print-command", "--api-key-file", str(file))
    assert KEY not in outcome.stdout + outcome.stderr
    program = next(line for line in outcome.stdout.splitlines() if "my model" in line).split()[0]
    tell = "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]))"
    shown = outcome.stdout.replace(program, f"{sys.executable} -c '{tell}'", 1)
    answer = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    argv, environ = json.loads(answer.stdout)
    assert f"{site}/my model" in argv
    assert environ["VLLM_API_KEY"] == KEY


def test_explain_names_value_origin_and_reason_of_every_option(run: Run, site: Path, profile: str) -> None:
    outcome = run("serve", "--profile", profile, "--set", "scheduler.max_num_seqs=3", "--explain", "--", "--seed", "1")
    rows = {line.split()[0]: line for line in outcome.stdout.splitlines() if line.startswith(("--", "SPARSEKV"))}
    assert f"{profile}:9:3" in rows["--max-model-len"]
    assert "--set scheduler.max_num_seqs" in rows["--max-num-seqs"]
    assert "default" in rows["--host"]
    assert "command line" in rows["--seed"]
    printed = run("serve", "--profile", profile, "--set", "scheduler.max_num_seqs=3", "--print-command", "--", "--seed", "1").stdout
    assert {line.split()[0] for line in printed.splitlines() if line.startswith("  --")} == {name for name in rows if name.startswith("--")}


def test_dry_run_starts_nothing(run: Run, executed: Executed, profile: str) -> None:
    outcome = run("serve", "--profile", profile, "--dry-run")
    assert (outcome.status, outcome.stdout) == (0, "")
    assert outcome.stderr.splitlines()[-1] == "tiny: everything is in order; nothing was started"
    assert not executed


def test_extra_arguments_that_nobody_marked(run: Run, profile: str) -> None:
    outcome = run("serve", "--profile", profile, "--sed", "1")
    assert outcome.status == 2
    assert "--sed" in outcome.stderr


# ---- executing


def test_exec(run: Run, executed: Executed, site: Path, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_API_KEY", KEY)
    outcome = run("serve", "--profile", profile, "--host", "0.0.0.0", "--", "--seed", "1")
    assert outcome.status == 0, outcome.stderr
    [(path, argv, environ)] = executed
    assert path == argv[0]
    assert Path(path).parent == Path(sys.executable).parent
    assert "--no-trust-remote-code" in argv
    assert argv[-2:] == ["--seed", "1"]
    assert environ["PYTHONSAFEPATH"] == "1"
    assert environ["VLLM_API_KEY"] == KEY
    assert "SPARSEKV_API_KEY" not in environ
    assert KEY not in " ".join(argv) + outcome.stdout + outcome.stderr
    file = Path(environ["SPARSEKV_PROFILE"])
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    document = json.loads(file.read_text())
    assert document["kv"]["pool_tokens"] == 2047 * 128
    assert document["sketch"]["basis"] == str(site / "tiny.safetensors")


def test_the_engine_reads_the_resolved_profile(run: Run, executed: Executed, profile: str) -> None:
    from sparsekv.engine.config import read_config

    run("serve", "--profile", profile)
    config = read_config(Path(executed[0][2]["SPARSEKV_PROFILE"]))
    assert (config.row_format, config.num_blocks, config.placement) == ("bf16", 2048, "host")


def test_no_secret_is_written_anywhere(run: Run, executed: Executed, site: Path, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", f"{KEY}-token")
    for mode in ("--print-command", "--explain", "--dry-run"):
        outcome = run("-v", "serve", "--profile", profile, mode)
        assert KEY not in outcome.stdout + outcome.stderr
    assert not [path for path in (site / "cache").rglob("*") if path.is_file() and KEY in path.read_text()]


@pytest.fixture
def fake_server(site: Path) -> list[str]:
    """`sparsekv serve` in a process of its own, with a program in vLLM's place that says what it was given."""
    server = site / "server"
    server.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import json, os, signal, sys, time
        print(json.dumps([sys.argv, dict(os.environ)]), flush=True)
        if "--seed" in sys.argv:
            sys.exit(int(sys.argv[-1]))
        signal.pause()
        """)
    )
    server.chmod(0o755)
    code = f"""
import sparsekv_cli.serve.launching as launching
from sparsekv_cli.doctor.checks import software_options
from sparsekv_cli.app import main
launching.server_program = lambda model: ({str(server)!r}, "serve", model)
software_options.unknown_options = lambda words, known: []
software_options.vllm_options = lambda tree: frozenset()
main()
"""
    return [sys.executable, "-c", code, "serve", "--profile", str(site / "tiny.yaml")]


def test_exit_status_is_the_servers(fake_server: list[str]) -> None:
    done = subprocess.run([*fake_server, "--", "--seed", "37"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 37, done.stderr
    argv, environ = json.loads(done.stdout)
    assert argv[1] == "serve"
    assert environ["PYTHONSAFEPATH"] == "1"


def test_signals_reach_the_server_itself(fake_server: list[str]) -> None:
    with subprocess.Popen(fake_server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM


# ---- the installed vLLM


def test_every_option_is_one_of_the_installed_vllm(site: Path) -> None:
    """The real parser, asked once; what the launch can emit, what it must not take for known, and the answer that is kept."""
    pytest.importorskip("vllm")
    from sparsekv.patches.tree import installed_trees
    from sparsekv_cli.serve.vllm_options import unknown_options, vllm_options

    tree = next(iter(installed_trees()))
    known = vllm_options(tree)
    assert unknown_options(every_option(), known) == []
    assert unknown_options(["--max_model_len=3", "--compilation-config.mode", "3"], known) == []
    assert unknown_options(["--max-model-le", "3"], known) == ["--max-model-le; did you mean --max-model-len?"]
    [kept] = (site / "cache/vllm-options").iterdir()
    kept.write_text('["--seed"]')
    assert vllm_options(tree) == {"--seed"}


def every_option() -> list[str]:
    """All options that any profile can make the launch emit, both ways of each switch."""
    from sparsekv.profiles.launch import build_launch
    from sparsekv.profiles.loader import load_profile

    on = (
        "hardware={device: cuda, gpu: X, vram: 24GiB, compute_capability: '8.6', gpus: 2, numa_bind: on, platform: wsl2}",
        "model={text_only: on, chat_template: /x}",
        "kv.hot=1GiB",
        "parallel={tensor: 1, custom_all_reduce: on}",
        "speculation={method: ngram, tokens: 3}",
        "scheduler={max_queued_requests: 9, max_queued_tokens: 9}",
        "recurrent.retention_interval=128",
        "memory={max_cudagraph_size: 8}",
        "server={reasoning_parser: qwen3, tool_parser: qwen3_coder, tool_strict_level: parameter}",
    )
    off = ("scheduler.prefix_caching=off", "memory.cudagraphs=off")
    found: dict[str, None] = {}
    for settings in (on, off):
        loaded = load_profile("cpu-demo", settings)
        found |= dict.fromkeys(build_launch(loaded, program=(), profile_path="x").argv)
    return [word for word in found if word.startswith("--")]


def test_option_of_a_later_vllm() -> None:
    from sparsekv_cli.serve.vllm_options import unknown_options

    assert unknown_options(["--tool-strict-level", "parameter"], frozenset()) == ["--tool-strict-level is in vLLM from 0.31 on"]


def test_paths_the_command_names_exist() -> None:
    """The classes that vLLM imports by their dotted path."""
    pytest.importorskip("vllm")
    from sparsekv.profiles import launch

    for path in (launch.SCHEDULER, launch.RETRY_AFTER):
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type)
