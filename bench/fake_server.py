"""An OpenAI-compatible server without a model: known times, known token counts, every dialect and failure of real servers.

`python -m sparsekv.bench.fake_server --port 8001 --itl-ms 12` practises a benchmark; tests start `FakeServer` in their own loop
and compare what the client measured with `FakeServer.log`, the times at which it really sent.

Tokens are four characters of text, or the ids of a token prompt. The prefix cache never forgets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CHARS = 4
"""Characters of one token of text."""
BLOCK = 16
"""Tokens of one block of the prefix cache."""


@dataclass(frozen=True)
class Behaviour:
    """How one answer comes; times in seconds."""

    ttft: float = 0.02
    """From the request's arrival to the first event, besides the time to read the prompt."""
    prefill_rate: float = math.inf
    """Prompt tokens a second that the prefix cache does not hold."""
    itl: float = 0.005
    """Between events, by an absolute schedule: delays do not add up."""
    tokens_per_event: int = 1
    output_tokens: int | None = None
    """None: as many as `max_tokens` allows (16 where it is absent)."""
    dialect: str = "plain"
    keep_alive: float | None = None
    """Sends a comment at this interval until the first event."""
    status: int = 200
    retry_after: str | None = None
    cut_after: int | None = None
    """Drops the connection after this many events."""
    tool_calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass
class Served:
    """What the server did for one request; times of `time.perf_counter`."""

    arrived: float
    prompt_tokens: int
    cached_tokens: int
    sent: list[float] = field(default_factory=list)
    output_tokens: int = 0


@dataclass
class FakeServer:
    """Serves until `stop`. `script` holds the behaviours of the next requests; `default` is that of all others."""

    default: Behaviour = field(default_factory=Behaviour)
    model: str = "fake"
    max_model_len: int = 262144
    tools: bool = True
    """False: refuses requests with tools, as vLLM does without a tool parser."""
    sparse_fraction: float | None = None
    """Serves sparsekv's metrics as if each decode step read this share of the context."""
    stalls: bool = False
    """One prompt being read stops every other stream, as without fair scheduling."""
    api_key: str | None = None
    cached_details: bool = True
    """Reports `prompt_tokens_details.cached_tokens`."""
    answer: Callable[[str], str | None] = lambda prompt: None
    """Text to answer a prompt with; None: words."""
    script: deque[Behaviour] = field(default_factory=deque)
    log: list[Served] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keep_bodies: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        self._cache: set[int] = set()
        self._counters: dict[str, float] = {}
        self._running = 0
        self._clear_to_decode = asyncio.Event()
        self._clear_to_decode.set()
        self._reading = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FakeServer:
        app = web.Application(client_max_size=256 << 20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, downtime: float) -> None:
        """Drops every stream, forgets the prefix cache and comes back on the same port."""
        await self.stop()
        self._cache.clear()
        self._counters.clear()
        await asyncio.sleep(downtime)
        await self.start()

    async def __aenter__(self) -> FakeServer:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.fake"})

    async def _models(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": self.max_model_len}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        gauges = {"vllm:num_requests_running": self._running, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0.25}
        lines = [f'{name}{{engine="0"}} {value}' for name, value in gauges.items()]
        for name, value in self._counters.items():
            name, _, label = name.partition("|")
            lines.append(f'{name}{{engine="0"{"," + label if label else ""}}} {value}')
        return web.Response(text="# HELP x y\n" + "\n".join(lines) + "\n")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("tools") and not self.tools:
            return _error(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        return await self._serve(request, body, _canonical(body["messages"]))

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._serve(request, body, body["prompt"])

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return _error(401, "Unauthorized")
        return None

    async def _serve(self, request: web.Request, body: dict[str, Any], prompt: str | list[int]) -> web.StreamResponse:
        arrived = time.perf_counter()
        if refused := self._refused(request):
            return refused
        if self.keep_bodies:
            self.bodies.append(body)
        behaviour = self.script.popleft() if self.script else self.default
        if behaviour.status != 200:
            headers = {} if behaviour.retry_after is None else {"Retry-After": behaviour.retry_after}
            return _error(behaviour.status, "not now", headers)
        units = _units(prompt)
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        if len(units) + limit > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {limit} output tokens"
            return _error(400, f"{message} and your prompt contains {len(units)} input tokens.")
        served = Served(arrived, len(units), self._cached(units))
        self.log.append(served)
        self._running += 1
        try:
            return await self._stream(request, body, prompt, units, behaviour, served, limit)
        except ConnectionResetError:  # the client has gone
            return web.Response()
        finally:
            self._running -= 1

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: str | list[int],
        units: list[Any],
        behaviour: Behaviour,
        served: Served,
        limit: int,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        frames = FRAMES[behaviour.dialect]
        first = served.arrived + behaviour.ttft + (served.prompt_tokens - served.cached_tokens) / behaviour.prefill_rate
        await self._read_prompt(response, behaviour, first)
        self._remember(units)
        self._count("vllm:prompt_tokens_total", served.prompt_tokens)
        self._count("vllm:prefix_cache_queries_total", served.prompt_tokens)
        self._count("vllm:prefix_cache_hits_total", served.cached_tokens)
        for source, tokens in (("local_cache_hit", served.cached_tokens), ("local_compute", served.prompt_tokens - served.cached_tokens)):
            self._count(f'vllm:prompt_tokens_by_source_total|source="{source}"', tokens)

        writer = _Writer(response, body, prompt, served, frames, self.cached_details)
        text = self.answer(prompt) if isinstance(prompt, str) else None
        calls = behaviour.tool_calls if body.get("tools") else ()
        total = behaviour.output_tokens if behaviour.output_tokens is not None else limit
        if text is not None:
            total = max(1, -(-len(text) // CHARS))
        pieces = _call_pieces(calls) if calls else list(_text_pieces(text, min(total, limit), behaviour.tokens_per_event, frames))
        await writer.open()
        number, behind = 0, 0.0
        for delta, tokens in pieces:
            await _sleep_until(first + number * behaviour.itl + behind)
            if self.stalls:
                stopped = time.perf_counter()
                await self._clear_to_decode.wait()
                behind += time.perf_counter() - stopped
            if number == behaviour.cut_after:
                if request.transport is not None:
                    request.transport.close()
                return response
            if tokens:
                served.sent.append(time.perf_counter())
                served.output_tokens += tokens
                number += 1
            await writer.event(delta, tokens)
            self._count("vllm:generation_tokens_total", tokens)
            self._count_sparse(served.prompt_tokens + served.output_tokens, tokens)
        self._remember(_units(prompt + writer.text) if isinstance(prompt, str) else _units(prompt + writer.ids))
        reason = "tool_calls" if calls else ("length" if text is None and total >= limit else "stop")
        await writer.close(reason)
        return response

    async def _read_prompt(self, response: web.StreamResponse, behaviour: Behaviour, first: float) -> None:
        self._reading += 1
        self._clear_to_decode.clear()
        try:
            while behaviour.keep_alive is not None and time.perf_counter() + behaviour.keep_alive < first:
                await asyncio.sleep(behaviour.keep_alive)
                await response.write(b": keep-alive\n\n")
            await _sleep_until(first)
        finally:
            self._reading -= 1
            if not self._reading:
                self._clear_to_decode.set()

    def _count(self, name: str, amount: float) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount

    def _count_sparse(self, context: int, tokens: int) -> None:
        if self.sparse_fraction is None:
            return
        read = self.sparse_fraction * context * tokens
        self._count("sparsekv_decode_selected_tokens_total", read)
        self._count("sparsekv_decode_context_tokens_total", context * tokens)
        self._count("sparsekv_decode_selections_total", tokens)
        self._count("sparsekv_decode_selected_mass_total", 0.97 * tokens)
        self._count('sparsekv_decode_requests_total|path="sparse"', tokens)
        self._count('sparsekv_host_read_bytes_total|path="sparse"', read * 0.1 * 1024)
        self._count('sparsekv_hot_rows_total|result="hit"', read * 0.9)
        self._count('sparsekv_hot_rows_total|result="miss"', read * 0.1)

    def _cached(self, units: list[Any]) -> int:
        cached = 0
        for end, block in _blocks(units):
            if block not in self._cache:
                break
            cached = end
        return min(cached, max(0, len(units) - 1))

    def _remember(self, units: list[Any]) -> None:
        self._cache.update(block for _, block in _blocks(units))


class _Writer:
    """Writes one stream: opening, events, closing, in the shape of the endpoint and the dialect."""

    def __init__(
        self, response: web.StreamResponse, body: dict[str, Any], prompt: object, served: Served, frames: Frames, details: bool
    ) -> None:
        self.response, self.served, self.frames, self.details = response, served, frames, details
        self.chat = "messages" in body
        self.by_ids = not self.chat and isinstance(prompt, list)
        options = body.get("stream_options") or {}
        self.usage_at_end = bool(options.get("include_usage"))
        self.usage_always = bool(options.get("continuous_usage_stats")) or frames.usage == "always"
        self.text = ""
        self.ids: list[int] = []

    async def open(self) -> None:
        if self.chat and self.frames.role_first:
            await self._send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})

    async def event(self, delta: dict[str, Any], tokens: int) -> None:
        if self.by_ids:
            ids = [1000 + (self.served.output_tokens - tokens + i) % 5000 for i in range(tokens)]
            self.ids += ids
            choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": ids, "finish_reason": None}
        elif self.chat:
            self.text += delta.get("content") or "" if isinstance(delta.get("content"), str) else ""
            choice = {"index": 0, "delta": delta, "finish_reason": None}
        else:
            self.text += delta.get("content", "")
            choice = {"index": 0, "text": delta.get("content", ""), "finish_reason": None}
        chunk: dict[str, Any] = {"choices": [choice]}
        if self.usage_always and self.frames.usage != "never":
            chunk["usage"] = self._usage()
        await self._send(chunk)

    async def close(self, reason: str) -> None:
        if self.frames.error_event:
            await self._send({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}})
            return
        last: dict[str, Any] = {"index": 0, "finish_reason": reason, **({"delta": {}} if self.chat else {"text": ""})}
        chunk: dict[str, Any] = {"choices": [last]}
        if self.frames.usage == "with_finish":
            chunk["usage"] = self._usage()
        await self._send(chunk)
        if self.usage_at_end and self.frames.usage in ("end", "always"):
            await self._send({"choices": [], "usage": self._usage()})
        if self.frames.done:
            await self.response.write(b"data: [DONE]" + self.frames.newline * 2)

    def _usage(self) -> dict[str, Any]:
        prompt, output = self.served.prompt_tokens, self.served.output_tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        if self.details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.served.cached_tokens}
        return usage

    async def _send(self, chunk: dict[str, Any]) -> None:
        data = json.dumps({"id": "x", "object": "chat.completion.chunk", "model": "fake", **chunk}, ensure_ascii=False).encode()
        newline = self.frames.newline
        frame = self.frames.before + self.frames.field + data + newline * 2
        cut = next((i + 1 for i, byte in enumerate(data) if byte >= 0xC3), None) if self.frames.split else None
        if cut is None:
            await self.response.write(frame)
            return
        cut += len(self.frames.before) + len(self.frames.field)
        await self.response.write(frame[:cut])
        await asyncio.sleep(0.002)
        await self.response.write(frame[cut:])


@dataclass(frozen=True)
class Frames:
    """One dialect of streaming."""

    fields: tuple[str, ...] = ("content",)
    """Fields of the delta that carry text, in turn."""
    as_list: bool = False
    before: bytes = b""
    field: bytes = b"data: "
    newline: bytes = b"\n"
    split: bool = False
    """Splits each event over two packets inside a UTF-8 character."""
    role_first: bool = True
    usage: str = "end"
    done: bool = True
    error_event: bool = False
    nothing: bool = False
    """Ends at once: 200, `[DONE]` and no text."""
    empty_deltas: bool = False
    word: str = "tok"


FRAMES: dict[str, Frames] = {
    "plain": Frames(),
    "reasoning_content": Frames(fields=("reasoning_content",)),
    "reasoning": Frames(fields=("reasoning",)),
    "reasoning_then_content": Frames(fields=("reasoning_content", "content")),
    "content_list": Frames(as_list=True),
    "comment": Frames(before=b": ping\n"),
    "comment_blank": Frames(before=b": ping\n\n"),
    "bare_colon": Frames(before=b":\n"),
    "crlf": Frames(newline=b"\r\n", before=b": ping\r\n\r\n"),
    "carriage_return": Frames(newline=b"\r"),
    "no_space": Frames(field=b"data:"),
    "named_events": Frames(field=b"event: message\nid: 7\nretry: 100\ndata: "),
    "split_utf8": Frames(split=True, word="tö\u4e2d"),
    "no_role": Frames(role_first=False),
    "empty_deltas": Frames(empty_deltas=True),
    "usage_always": Frames(usage="always"),
    "usage_with_finish": Frames(usage="with_finish"),
    "usage_never": Frames(usage="never"),
    "no_done": Frames(done=False),
    "error_event": Frames(error_event=True),
    "nothing": Frames(nothing=True, role_first=False, usage="never"),
}


def _text_pieces(text: str | None, total: int, per_event: int, frames: Frames) -> Iterator[tuple[dict[str, Any], int]]:
    """Deltas and their token counts; the fields of a dialect follow each other in equal parts."""
    if frames.nothing:
        return
    done = 0
    while done < total:
        tokens = min(per_event, total - done)
        piece = text[done * CHARS : (done + tokens) * CHARS] if text is not None else f"{frames.word:<3} " * tokens
        name = frames.fields[min(done * len(frames.fields) // total, len(frames.fields) - 1)]
        if frames.empty_deltas:
            yield {"content": ""}, 0
        yield {name: [{"type": "text", "text": piece}] if frames.as_list else piece}, tokens
        done += tokens


def _call_pieces(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[dict[str, Any], int]]:
    """Tool calls as vLLM streams them: the name first, then the arguments in fragments."""
    pieces: list[tuple[dict[str, Any], int]] = []
    for index, (name, arguments) in enumerate(calls):
        head = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        pieces.append(({"tool_calls": [head]}, 2))
        text = json.dumps(arguments)
        pieces += [({"tool_calls": [{"index": index, "function": {"arguments": text[i : i + 8]}}]}, 2) for i in range(0, len(text), 8)]
    return pieces


def _canonical(messages: list[dict[str, Any]]) -> str:
    """A chat template that later turns extend: an answer follows its opening mark, as it was generated."""
    parts = [f"<{m['role']}>{_content(m)}" for m in messages]
    return "".join(parts) + "<assistant>"


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return content + "".join(json.dumps(call.get("function")) for call in message.get("tool_calls") or ())


def _units(prompt: str | list[int]) -> list[Any]:
    return [prompt[i : i + CHARS] for i in range(0, len(prompt), CHARS)] if isinstance(prompt, str) else prompt


def _blocks(units: list[Any]) -> Iterator[tuple[int, int]]:
    """(end, hash of everything up to it) of each whole block."""
    chain = 0
    for end in range(BLOCK, len(units) + 1, BLOCK):
        chain = hash((chain, tuple(units[end - BLOCK : end])))
        yield end, chain


async def _sleep_until(moment: float) -> None:
    if (left := moment - time.perf_counter()) > 0:
        await asyncio.sleep(left)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": status}}, status=status, headers=headers)


def recall_answer(prompt: str) -> str | None:
    """Answers a question for a planted fact from the prompt, as a model with perfect recall would."""
    asked = re.findall(r"What is the release code of ([\w-]+)\?", prompt.rpartition("<user>")[2])
    found = re.findall(rf"the release code of {re.escape(asked[-1])} is (\d+)", prompt) if asked else []
    return found[0] if found else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sparsekv.bench.fake_server", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--ttft-ms", type=float, default=50)
    parser.add_argument("--itl-ms", type=float, default=12)
    parser.add_argument("--prefill-rate", type=float, default=20000, help="prompt tokens a second")
    parser.add_argument("--tokens-per-event", type=int, default=1)
    parser.add_argument("--dialect", choices=sorted(FRAMES), default="plain")
    parser.add_argument("--max-model-len", type=int, default=262144)
    parser.add_argument("--sparse-fraction", type=float, default=None, help="serve sparsekv's metrics with this share of the context read")
    parser.add_argument("--stalls", action="store_true", help="a prompt being read stops the other streams")
    parser.add_argument("--no-tools", action="store_true")
    args = parser.parse_args(argv)
    behaviour = Behaviour(
        ttft=args.ttft_ms / 1e3,
        itl=args.itl_ms / 1e3,
        prefill_rate=args.prefill_rate,
        tokens_per_event=args.tokens_per_event,
        dialect=args.dialect,
    )

    async def serve() -> None:
        server = FakeServer(
            default=behaviour,
            max_model_len=args.max_model_len,
            tools=not args.no_tools,
            sparse_fraction=args.sparse_fraction,
            stalls=args.stalls,
            answer=recall_answer,
            port=args.port,
        )
        async with server:
            print(f"fake server on {server.url}", flush=True)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
