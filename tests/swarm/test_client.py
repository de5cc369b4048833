"""Dialects and failures of real servers (G1, F1, F5): what counts as output, and what never counts as an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from sparsekv.bench import virtual_time
from sparsekv.bench.fake_server import FRAMES, Behaviour, FakeServer, Served
from sparsekv.bench.swarm.chunks import ToolCalls, read_delta
from sparsekv.bench.swarm.client import Answer, Client, parse_retry_after, scrub
from sparsekv.bench.swarm.options import Limits

TTFT, ITL, TOKENS = 0.3, 0.05, 8
QUESTION = [{"role": "user", "content": "Where is the price computed? Answer in one line."}]


def ask(
    behaviour: Behaviour,
    limits: Limits | None = None,
    before: Callable[[FakeServer], Any] | None = None,
    key: str = "",
    server: FakeServer | None = None,
    **body: Any,
) -> tuple[Answer, Served | None]:
    """One request; `before` runs beside it."""

    async def main() -> tuple[Answer, Served | None]:
        fake = server or FakeServer()
        fake.script.append(behaviour)
        async with fake:
            client = Client(fake.url, {"Authorization": f"Bearer {key}"} if key else {}, limits or Limits())
            answer = Answer()
            request = {"model": "fake", "messages": QUESTION, "stream": True, "max_tokens": TOKENS}
            request |= {"stream_options": {"include_usage": True}}
            other = asyncio.create_task(before(fake)) if before else None
            await client.stream("/v1/chat/completions", json.dumps(request | body).encode(), answer)
            if other:
                await other
            await client.close()
            return answer, fake.log[0] if fake.log else None

    return virtual_time.run(main())


ANSWERED = sorted(FRAMES.keys() - {"error_event", "nothing"})


@pytest.mark.parametrize("dialect", ANSWERED)
def test_every_dialect_gives_the_same_times_and_counts(dialect: str) -> None:
    answer, served = ask(Behaviour(ttft=TTFT, itl=ITL, dialect=dialect))
    assert served is not None
    assert answer.status == "ok"
    # A split event is whole 2 ms after its first half.
    late = 0.002 if FRAMES[dialect].split else 0.0
    assert answer.first is not None
    assert answer.first - answer.sent == pytest.approx(TTFT + late, rel=0.01)
    assert len(answer.event_times) == TOKENS
    assert answer.event_times[-1] - answer.first == pytest.approx(ITL * (TOKENS - 1), rel=0.01)
    word = FRAMES[dialect].word
    assert (answer.text + answer.reasoning).split() == [word] * TOKENS
    if dialect != "usage_never":
        assert answer.usage.output_tokens == served.output_tokens == TOKENS
        assert answer.usage.input_tokens == served.prompt_tokens


def test_reasoning_is_output_but_not_the_answer() -> None:
    answer, _ = ask(Behaviour(ttft=TTFT, itl=ITL, dialect="reasoning_then_content"))
    assert answer.first is not None
    assert answer.first_answer is not None
    assert answer.first - answer.sent == pytest.approx(TTFT, rel=0.01)
    assert answer.first_answer - answer.first == pytest.approx(ITL * TOKENS / 2, rel=0.01)
    assert len(answer.reasoning.split()) == len(answer.text.split()) == TOKENS // 2


def test_only_reasoning_has_no_time_of_first_answer() -> None:
    answer, _ = ask(Behaviour(dialect="reasoning"))
    assert answer.first is not None
    assert answer.first_answer is None


def test_keep_alive_comments_hold_the_line_and_are_no_token() -> None:
    """60 s of comments before the first token, with a client that gives up after 20 s without a byte."""
    answer, _ = ask(Behaviour(ttft=60.0, keep_alive=5.0), Limits(idle=20.0))
    assert answer.status == "ok"
    assert answer.keep_alives >= 11
    assert answer.first is not None
    assert answer.first - answer.sent == pytest.approx(60.0, rel=0.01)


def test_silence_before_the_first_token_is_waited_out() -> None:
    answer, _ = ask(Behaviour(ttft=500.0))
    assert answer.status == "ok"
    assert answer.first is not None
    assert answer.first - answer.sent == pytest.approx(500.0, rel=0.01)


@pytest.mark.parametrize(
    ("behaviour", "limits", "status"),
    [
        (Behaviour(ttft=60.0), Limits(idle=20.0), "no_first_token"),
        (Behaviour(ttft=60.0, keep_alive=5.0), Limits(first_token=30.0), "no_first_token"),
        (Behaviour(itl=60.0), Limits(idle=20.0), "idle"),
        (Behaviour(cut_after=3), Limits(), "cut"),
        (Behaviour(cut_after=0), Limits(), "cut"),
        (Behaviour(dialect="error_event"), Limits(), "error_event"),
        (Behaviour(dialect="nothing"), Limits(), "empty"),
        (Behaviour(status=503, retry_after="7"), Limits(), "unavailable"),
        (Behaviour(status=429), Limits(), "too_many"),
        (Behaviour(status=500), Limits(), "server_error"),
        (Behaviour(status=422), Limits(), "refused"),
        (Behaviour(status=404), Limits(), "not_found"),
    ],
)
def test_what_is_no_answer(behaviour: Behaviour, limits: Limits, status: str) -> None:
    answer, _ = ask(behaviour, limits)
    assert answer.status == status
    assert answer.end >= answer.sent


def test_a_cut_stream_keeps_what_came() -> None:
    answer, served = ask(Behaviour(cut_after=3))
    assert served is not None
    assert len(answer.event_times) == 3 == served.output_tokens
    assert answer.usage.output_tokens is None


def test_a_server_that_stops_in_the_middle() -> None:
    async def stop(fake: FakeServer) -> None:
        await asyncio.sleep(TTFT + 2.5 * ITL)
        await fake.stop()

    answer, _ = ask(Behaviour(ttft=TTFT, itl=ITL), before=stop)
    assert answer.status == "cut"
    assert 3 <= len(answer.event_times) < TOKENS


def test_nobody_listens() -> None:
    async def main() -> Answer:
        fake = FakeServer()
        async with fake:
            url = fake.url
        client = Client(url, {}, Limits())
        answer = Answer()
        await client.stream("/v1/chat/completions", b"{}", answer)
        await client.close()
        return answer

    assert virtual_time.run(main()).status == "no_connection"


def test_a_prompt_that_does_not_fit_is_told_apart() -> None:
    answer, _ = ask(Behaviour(), server=FakeServer(max_model_len=16))
    assert answer.status == "too_long"
    assert "16 tokens" in answer.detail


def test_a_wrong_key() -> None:
    answer, _ = ask(Behaviour(), key="wrong-key-canary", server=FakeServer(api_key="right"))
    assert answer.status == "unauthorized"
    assert "canary" not in answer.detail


def test_tool_calls_come_in_fragments() -> None:
    calls = (("read_file", {"path": "a/b.py", "first_line": 10}), ("search", {"text": "tö中" * 5}))
    answer, served = ask(Behaviour(ttft=TTFT, itl=ITL, tool_calls=calls), tools=[{"type": "function"}])
    assert served is not None
    assert [(c["name"], json.loads(c["arguments"])) for c in answer.tool_calls] == list(calls)
    assert answer.finish_reason == "tool_calls"
    assert answer.first is not None
    assert answer.first - answer.sent == pytest.approx(TTFT, rel=0.01)
    assert answer.first_answer is None
    assert answer.usage.output_tokens == served.output_tokens


def test_fragments_without_an_index_or_id() -> None:
    calls = ToolCalls()
    calls.add([{"function": {"name": "search", "arguments": None}}])
    calls.add([{"index": 0, "function": {"arguments": "{}"}}])
    calls.add([{"index": 0, "id": None, "function": {}}])
    assert calls.finished() == [{"id": "call_0", "name": "search", "arguments": "{}"}]


def test_counts_of_several_tokens_an_event() -> None:
    answer, _ = ask(Behaviour(tokens_per_event=3, dialect="usage_always"))
    assert answer.counted == [3, 6, 8]
    assert answer.event_tokens == [3, 3, 2]


@pytest.mark.parametrize(
    "chunk",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": ""}}]},
        {"choices": [{"delta": {"content": []}}]},
        {"choices": [{"text": "", "token_ids": []}]},
        {"choices": [], "usage": {"prompt_tokens": 3}},
        {"usage": "odd"},
    ],
)
def test_what_generates_nothing(chunk: dict[str, Any]) -> None:
    assert not read_delta(chunk).generated


def test_usage_without_details() -> None:
    usage = read_delta({"usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}}).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (5, 2, None)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ("data: {nonsense\n\n", "text/event-stream", "bad_event"),
        ("<html>gateway</html>", "text/html", "not_a_stream"),
        ('{"choices": []}', "application/json", "not_a_stream"),
        ("", "text/event-stream", "cut"),
        ('data: 7\n\ndata: {"choices": [{"delta": {"content": "x"}}]}\n\n', "text/event-stream", "cut"),
        ('data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "abort"}]}\n\n', "text/event-stream", "aborted"),
        ("data: [DONE]\n\n", "text/event-stream", "empty"),
    ],
)
def test_bodies_that_are_no_answer(body: str, kind: str, status: str) -> None:
    async def main() -> Answer:
        async def handle(request: web.Request) -> web.Response:
            return web.Response(text=body, content_type=kind)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client, answer = Client(f"http://127.0.0.1:{port}", {}, Limits()), Answer()
        await client.stream("/v1/chat/completions", b"{}", answer)
        await client.close()
        await runner.cleanup()
        return answer

    assert virtual_time.run(main()).status == status


@pytest.mark.parametrize(("value", "seconds"), [("3", 3.0), ("0.5", 0.5), ("-2", 0.0), (None, None), ("soon", None)])
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds


def test_retry_after_as_a_date() -> None:
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = parse_retry_after("Wed, 21 Oct 2093 07:28:00 GMT")
    assert later is not None
    assert later > 1e9


def test_messages_lose_what_the_request_said() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "the secret plan is to plant tulips"}]}).encode()
    message = scrub("cannot parse 'the secret plan is to plant tulips'\nat line 3", body)
    assert "tulips" not in message
    assert "cannot parse" in message
    assert "\n" not in message
