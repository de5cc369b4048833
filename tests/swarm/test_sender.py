"""Sending again: when, how often, and never where it is of no use (F1, F5)."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from sparsekv.bench import virtual_time
from sparsekv.bench.fake_server import Behaviour, FakeServer
from sparsekv.bench.swarm.client import Answer, Client
from sparsekv.bench.swarm.conversation import ChatConversation
from sparsekv.bench.swarm.options import Limits, SwarmOptions
from sparsekv.bench.swarm.records import RequestRecord
from sparsekv.bench.swarm.sender import AgentFailed, AgentView, Clock, Sender
from sparsekv.bench.swarm.server import Server


def ask(
    *behaviours: Behaviour, limits: Limits | None = None, beside: Any = None, max_model_len: int = 8192, max_tokens: int = 4
) -> tuple[Answer | None, list[RequestRecord], AgentView]:
    """One question to a server that behaves as told, request by request."""
    records: list[RequestRecord] = []
    view = AgentView(0)

    async def main() -> Answer | None:
        fake = FakeServer(max_model_len=max_model_len)
        fake.script.extend(behaviours)
        async with fake:
            options = SwarmOptions(url=fake.url, repo=None, limits=limits or Limits())  # type: ignore[arg-type]
            client = Client(fake.url, {}, options.limits)
            server = Server("fake", max_model_len, "0.0.fake", metrics=True, tools=False)
            sender = Sender(client, server, options, Clock(), records.append)
            conversation = ChatConversation("Answer.")
            conversation.add_user("Where is it?")
            other = asyncio.create_task(beside(fake)) if beside else None
            try:
                return await sender.ask(view, conversation, "locate", max_tokens)
            except AgentFailed:
                return None
            finally:
                if other:
                    await other
                await client.close()

    return virtual_time.run(main()), records, view


@pytest.mark.parametrize("status", [429, 503])
def test_waits_as_long_as_the_server_asks(status: int) -> None:
    answer, records, view = ask(Behaviour(status=status, retry_after="7"))
    assert answer is not None
    assert answer.status == "ok"
    assert [r.status for r in records] == ["too_many" if status == 429 else "unavailable", "ok"]
    assert records[1].sent - records[0].end == pytest.approx(7.0, abs=0.01)
    assert [r.attempt for r in records] == [0, 1]
    assert view.errors == 1


def test_an_endless_retry_after_is_cut() -> None:
    _, records, _ = ask(Behaviour(status=503, retry_after="86400"))
    assert records[1].sent - records[0].end == pytest.approx(Limits().retry_after, abs=0.01)


def test_pauses_grow() -> None:
    _, records, _ = ask(*[Behaviour(status=500)] * 4)
    pauses = [after.sent - before.end for before, after in itertools.pairwise(records)]
    assert len(pauses) == 4
    assert all(late > early for early, late in itertools.pairwise(pauses))


def test_gives_up_after_its_attempts() -> None:
    answer, records, view = ask(*[Behaviour(status=500)] * 9, limits=Limits(attempts=3))
    assert answer is None
    assert [r.status for r in records] == ["server_error"] * 3
    assert view.state == "failed"


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_is_permanent_is_not_sent_again(status: int) -> None:
    answer, records, _ = ask(*[Behaviour(status=status)] * 3)
    assert answer is None
    assert len(records) == 1


@pytest.mark.parametrize(("window", "fits"), [(15, True), (14, False), (8, False)])
def test_around_the_context_limit(window: int, fits: bool) -> None:
    """A prompt of 11 tokens and 4 of answer: one token too many is permanent."""
    answer, records, _ = ask(max_model_len=window)
    assert (answer is not None) is fits
    assert [r.status for r in records] == (["ok"] if fits else ["too_long"])


def test_a_restart_in_the_middle_of_an_answer() -> None:
    """The cut answer does not count; the question is asked again once the server is back."""

    async def restart(fake: FakeServer) -> None:
        await asyncio.sleep(1.0)
        await fake.restart(downtime=30.0)

    answer, records, _ = ask(Behaviour(ttft=0.5, itl=0.4), beside=restart)
    assert answer is not None
    assert [r.status for r in records] == ["cut", "ok"]
    assert not records[0].ok
    assert records[1].sent > 30.0
    assert records[1].output_tokens == 4


def test_a_server_that_does_not_come_back() -> None:
    async def stop(fake: FakeServer) -> None:
        await asyncio.sleep(0.6)
        await fake.stop()

    answer, records, _ = ask(Behaviour(ttft=0.5, itl=0.4), beside=stop, limits=Limits(server_wait=20.0, attempts=2))
    assert answer is None
    assert [r.status for r in records] == ["cut", "no_connection"]


def test_a_stopped_stream_has_the_count_so_far() -> None:
    """Cancelled by us after some events: what came is on record, and it is no answer."""
    records: list[RequestRecord] = []

    async def main() -> None:
        async with FakeServer(default=Behaviour(ttft=0.5, itl=0.1, tokens_per_event=2)) as fake:
            options = SwarmOptions(url=fake.url, repo=None)  # type: ignore[arg-type]
            client = Client(fake.url, {}, options.limits)
            server = Server("fake", 8192, "0.0.fake", metrics=True, tools=False)
            conversation = ChatConversation("Answer.")
            sender = Sender(client, server, options, Clock(), records.append)
            task = asyncio.create_task(sender.ask(AgentView(0), conversation, "locate", 64))
            await asyncio.sleep(0.95)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    virtual_time.run(main())
    (record,) = records
    assert record.status == "stopped"
    assert not record.ok
    assert record.output_tokens == 10
    assert record.event_tokens == [2] * 5
