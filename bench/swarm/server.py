"""The server under test: where it is, what it serves, what it understands; asked before the load begins."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparsekv.profiles.errors import ExitCode, SparsekvError

from .client import Answer, Client
from .options import Plan, PromptForm, SwarmOptions
from .tools import SCHEMAS


@dataclass(frozen=True)
class Server:
    """What a probe found."""

    model: str
    max_model_len: int | None
    vllm_version: str | None
    metrics: bool
    tools: bool
    """Takes requests with tools."""
    tools_refused: str = ""
    """What it said where it does not."""

    @property
    def counts_along(self) -> bool:
        """vLLM can give usage with every event, so that also a stream we stop has an exact count."""
        return self.vllm_version is not None


def base_url(url: str) -> str:
    """The server's root.

    Raises:
        SparsekvError: not an http(s) URL, or one with a secret in it.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        raise SparsekvError(f"--url {url!r}: the port is not a number") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SparsekvError(f"--url {url!r} is not an http address", hint="for example --url http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise SparsekvError(
            "--url must not carry a user, key or query", hint="put the key into SPARSEKV_API_KEY or a file for --api-key-file"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "") + parts.path.rstrip("/").removesuffix("/v1")


def is_local(base: str) -> bool:
    return (urlsplit(base).hostname or "") in ("localhost", "127.0.0.1", "::1")


def api_key(key_file: Path | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key from the environment or a file; an empty one is none."""
    if key := environ.get("SPARSEKV_API_KEY", "").strip():
        return key
    if key_file is None:
        return None
    try:
        return key_file.read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise SparsekvError(f"--api-key-file {key_file}: {getattr(error, 'strerror', 'not a text')}") from None


async def probe(client: Client, options: SwarmOptions) -> Server:
    """Asks the server for its model and limits, and sends it one short request of the kind that the swarm will send.

    Raises:
        SparsekvError: nobody answers, the key is wrong, the model is not served, the context does not fit, or the request fails.
    """
    model, max_model_len = await _model(client, options)
    if max_model_len is not None and max(options.peak, options.intruder_tokens + 64) > max_model_len:
        raise SparsekvError(
            f"the longest turn needs {max(options.peak, options.intruder_tokens + 64)} tokens, but the server's context is {max_model_len}",
            hint="lower --context, --decode-tokens or --intruder-tokens, or serve with a longer context",
        )
    status, text = await client.get("/version")
    version = _field(text, "version") if status == 200 else None
    status, _ = await client.get("/metrics")
    server = Server(model, max_model_len, version, metrics=status == 200, tools=False)
    refused = ""
    if options.prompt is PromptForm.CHAT and options.plan is not Plan.SCRIPTED:
        refused = await _try(client, options, server, tools=True)
        if not refused:
            return Server(model, max_model_len, version, server.metrics, tools=True)
        if options.plan is Plan.MODEL:
            raise SparsekvError(f"the server refuses tools: {refused}", hint="use --plan scripted, or serve with a tool parser")
    if failure := await _try(client, options, server, tools=False):
        raise SparsekvError(f"the server refuses the kind of request that the swarm sends: {failure}", exit_code=ExitCode.ENVIRONMENT)
    return Server(model, max_model_len, version, server.metrics, tools=False, tools_refused=refused)


def request_options(options: SwarmOptions, server: Server, max_tokens: int, *, tools: bool) -> dict[str, Any]:
    """All of a request but its prompt."""
    usage = {"include_usage": True} | ({"continuous_usage_stats": True} if server.counts_along else {})
    body: dict[str, Any] = {"model": server.model, "stream": True, "stream_options": usage, "max_tokens": max_tokens}
    body |= {"temperature": 0, "seed": options.seed}
    if tools:
        body |= {"tools": SCHEMAS, "tool_choice": "auto"}
    return body | options.extra_body


async def _model(client: Client, options: SwarmOptions) -> tuple[str, int | None]:
    status, text = await client.get("/v1/models")
    if status == 0:
        raise SparsekvError(
            f"no server answers at {client.base}: {text}",
            hint="start one with `sparsekv serve`, or name another with --url",
            exit_code=ExitCode.ENVIRONMENT,
        )
    if status in (401, 403):
        raise SparsekvError("the server wants a key, or another one", hint="set SPARSEKV_API_KEY or give --api-key-file")
    try:
        served = {model["id"]: model for model in json.loads(text)["data"]}
    except (ValueError, KeyError, TypeError):
        raise SparsekvError(f"{client.base}/v1/models answers with HTTP {status} and no list of models") from None
    name = options.model or (next(iter(served)) if len(served) == 1 else None)
    if name is None or name not in served:
        problem = f"the server does not serve {options.model!r}" if options.model else "the server serves several models"
        raise SparsekvError(f"{problem}; it has {', '.join(sorted(served)) or 'none'}", hint="choose one with --model")
    limit = served[name].get("max_model_len")
    return name, limit if isinstance(limit, int) else None


async def _try(client: Client, options: SwarmOptions, server: Server, *, tools: bool) -> str:
    """Sends one short request; returns what went wrong, or an empty text."""
    body = request_options(options, server, 2, tools=tools)
    if options.prompt is PromptForm.TOKENS:
        path, prompt = "/v1/completions", {"prompt": list(range(100, 116)), "return_token_ids": True, "ignore_eos": True}
    else:
        path, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Say yes."}]}
    answer = Answer()
    await client.stream(path, json.dumps(body | prompt).encode(), answer)
    if answer.status not in ("ok", "empty"):
        return answer.detail or answer.status
    if answer.usage.output_tokens is None:
        return "its streams carry no usage, so tokens cannot be counted"
    if options.prompt is PromptForm.TOKENS and not answer.token_ids:
        return "its streams carry no token ids (`return_token_ids`)"
    return ""


def _field(text: str, name: str) -> str | None:
    try:
        value = json.loads(text).get(name)
    except (ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None
