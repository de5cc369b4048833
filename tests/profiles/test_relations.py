"""Values that do not go together are refused where the profile is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparsekv.profiles.loader import LoadedProfile
from sparsekv.profiles.relations import BLOCK_TOKENS

Load = Callable[..., LoadedProfile]
Problems = Callable[..., list[tuple[str, str, str]]]

CPU = ["hardware.device=cpu", "hardware.gpu=", "hardware.vram="]


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        (CPU[:1], "hardware.gpu", "describes no card"),
        (CPU, "kv.hot", "copy on a card"),
        ([*CPU, "kv.hot=", "kv.placement=gpu"], "kv.placement", "needs `hardware.device: cuda`"),
        (["hardware.gpu="], "hardware.gpu", "required with `device: cuda`"),
        (["hardware.gpus=0", "parallel.tensor=1"], "hardware.gpus", "at least 1"),
        (["hardware.gpus=1"], "parallel.tensor", "2 ranks need 2 cards, hardware.gpus is 1"),
        (["hardware.gpus=3", "parallel.tensor=3"], "parallel.tensor", "3 ranks do not share 4 KV heads evenly"),
        (["kv.placement=gpu"], "kv.hot", "need no hot set"),
        (["kv.hot="], "kv.hot", "required with `placement: host`"),
        (["sketch.basis=./basis.pt"], "sketch.basis", "a basis is a *.safetensors file"),
        (["sketch.rank=127"], "sketch.rank", "no whole bytes"),
        (["sketch.rank=512"], "sketch.rank", "more than the model's head_dim, 256"),
        (["selection.min_tokens=4096"], "selection.min_tokens", "more than selection.max_tokens, 2048"),
        (["model.shape.query_heads=10"], "model.shape.kv_heads", "10 query heads do not share 4 KV heads evenly"),
        (["speculation.method=mtp"], "speculation.tokens", "needs at least 1"),
        (["speculation.tokens=3"], "speculation.tokens", "3 drafts with `method: none`"),
        (["speculation.method=mtp", "speculation.tokens=3", "model.shape.draft_layers=0"], "speculation.method", "needs a model with"),
        (["speculation.ngram_min=6"], "speculation.ngram_min", "more than ngram_max, 5"),
        (["scheduler.max_num_batched_tokens=1600"], "scheduler.max_num_batched_tokens", "not a multiple of 128"),
        (["scheduler.max_num_batched_tokens=128", "scheduler.max_num_seqs=128"], "scheduler.max_num_batched_tokens", "no room for prompts"),
        (["recurrent.retention_interval=1000"], "recurrent.retention_interval", "not a multiple of 128"),
        (["recurrent.retention_interval=1024", "scheduler.prefix_caching=off"], "recurrent.retention_interval", "caching, which is off"),
        (["env.OPENAI_API_KEY=sk-canary"], "env.OPENAI_API_KEY", "looks like a secret"),
        (["env.HF_TOKEN=canary"], "env.HF_TOKEN", "looks like a secret"),
        (["env.SPARSEKV_PROFILE=x"], "env.SPARSEKV_PROFILE", "sparsekv sets its own variables"),
        (["env.a-b=x"], "env.a-b", "no name of an environment variable"),
        (["vllm.--max-model-len=5"], "vllm.--max-model-len", "no leading dashes"),
        (["vllm.host=0.0.0.0"], "vllm.host", "use `--host`, or server.host"),
        (["vllm.trust-remote-code=true"], "vllm.trust-remote-code", "nothing in a model's folder is executed"),
        (["vllm.no-trust-remote-code=false"], "vllm.no-trust-remote-code", "nothing in a model's folder is executed"),
        (["vllm.api-key=canary"], "vllm.api-key", "seen by every user"),
    ],
)
def test_refused(problems: Problems, valid: str, settings: list[str], field: str, message: str) -> None:
    found = problems(valid, *settings)
    assert [text for _, name, text in found if name == field and message in text], found


def test_a_secret_is_named_but_not_shown(problems: Problems, valid: str) -> None:
    assert "canary" not in str(problems(valid, "env.HF_TOKEN=canary"))
    assert "canary" not in str(problems(valid + "env:\n  API_KEY: canary\nvllm:\n  api-key: canary\n"))


def test_the_server_listens_to_this_machine_alone(load: Load, valid: str) -> None:
    server = load(valid).profile.server
    assert (server.host, server.api_key_file) == ("127.0.0.1", None)


@pytest.mark.parametrize("watts", ["90W", "230W", "230 W", "999W"])
def test_a_cap_is_compared_with_the_card_only_when_it_is_applied(load: Load, valid: str, watts: str) -> None:
    assert load(valid, f"hardware.power_cap={watts}").profile.hardware.power_cap == float(watts.removesuffix("W"))


def test_no_cap(load: Load, valid: str) -> None:
    assert load(valid, "hardware.power_cap=null").profile.hardware.power_cap is None


def test_the_block_is_the_engines() -> None:
    from sparsekv.engine.config import BLOCK_SIZE

    assert BLOCK_TOKENS == BLOCK_SIZE
