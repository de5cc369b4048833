"""Sends the items of a run to one server and keeps what came back, line by line, so that a stopped run goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsekv.bench.recall.plan import Item
from sparsekv.bench.recall.score import correct
from sparsekv.bench.swarm.client import PERMANENT, Answer, Client
from sparsekv.bench.swarm.options import Limits
from sparsekv.profiles.errors import ExitCode, SparsekvError

ATTEMPTS = 3


@dataclass(frozen=True)
class Record:
    """One answered question; what failed on the way is no answer and has no record."""

    arm: str
    load: int
    """Contexts that were asked about at once."""
    key: str
    cell: str
    task: str
    context: str
    length: int
    depth: float | None
    actual_depth: float
    turn: int
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    seconds: float
    reply: str
    right: bool


class Records:
    """A JSON-lines file; reopened, it knows what it holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: list[Record] = []
        if path.is_file():
            # A line that was cut short by a crash is asked again.
            lines = path.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            if len(whole) < len(lines):
                path.write_text("".join(whole))
            self.all = [Record(**json.loads(line)) for line in whole]
        self.have = {(record.arm, record.load, record.key) for record in self.all}

    def add(self, record: Record) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self.all.append(record)
        self.have.add((record.arm, record.load, record.key))


async def ask_all(
    base: str,
    model: str,
    headers: dict[str, str],
    arm: str,
    load: int,
    contexts: Sequence[Sequence[Item]],
    records: Records,
    progress: Callable[[int, int], None],
) -> None:
    """Asks what `records` does not have yet: the questions about a context one after the other, `load` contexts at once.

    Raises:
        SparsekvError: the server refuses the requests, or stays unable to answer.
    """
    client = Client(base, headers, Limits(first_token=1800.0, idle=600.0))
    missing = [[item for item in items if (arm, load, item.key) not in records.have] for items in contexts]
    total = sum(map(len, contexts))
    done = total - sum(map(len, missing))
    gate = asyncio.Semaphore(load)

    async def about(items: Sequence[Item]) -> None:
        nonlocal done
        async with gate:
            for item in items:
                records.add(await _ask(client, model, arm, load, item))
                done += 1
                progress(done, total)

    progress(done, total)
    try:
        async with asyncio.TaskGroup() as group:
            for items in missing:
                if items:
                    group.create_task(about(items))
    except* SparsekvError as problems:
        raise problems.exceptions[0] from None
    finally:
        await client.close()


async def _ask(client: Client, model: str, arm: str, load: int, item: Item) -> Record:
    body = {
        "model": model,
        "messages": item.messages(),
        "max_tokens": item.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for attempt in range(ATTEMPTS):
        answer = Answer()
        await client.stream("/v1/chat/completions", json.dumps(body).encode(), answer)
        # A model may end its turn at once; an empty reply is a wrong answer, not a failure.
        if answer.status in ("ok", "empty"):
            return Record(
                arm, load, item.key, item.cell, item.task, item.context.seed, item.length, item.depth, round(item.question.depth, 4),
                item.turn, answer.usage.input_tokens, answer.usage.cached_tokens, answer.usage.output_tokens,
                round(answer.end - answer.sent, 4), answer.text, correct(item.task, item.question.answer, answer.text),
            )  # fmt: skip
        if answer.status in PERMANENT:
            break
        await asyncio.sleep(2.0 * (attempt + 1))
    raise SparsekvError(
        f"arm {arm}: a request about a context of {item.length} tokens fails: {answer.status} {answer.detail}".rstrip(),
        hint="what was answered so far is kept; the same command goes on from there",
        exit_code=ExitCode.ENVIRONMENT,
    )


def read_rate(metrics: str) -> dict[str, float]:
    """Totals of the engine's own series from the text of its /metrics, labels as part of the name."""
    totals: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("sparsekv_decode_"):
            name, _, value = line.rpartition(" ")
            family, _, labels = name.partition("{")
            path = "path=" + labels.split('path="', 1)[1].split('"', 1)[0] if 'path="' in labels else ""
            key = f"{family}{{{path}}}" if path else family
            totals[key] = totals.get(key, 0.0) + float(value)
    return totals


def tokens_read(totals: dict[str, float]) -> dict[str, float]:
    """What share of the context sparse steps read, the mass that the sketch expected there, and the steps of each kind."""
    context, chosen = (totals.get(f"sparsekv_decode_{name}_tokens_total", 0.0) for name in ("context", "selected"))
    selections, mass = (totals.get(f"sparsekv_decode_{name}_total", 0.0) for name in ("selections", "selected_mass"))
    found = {f"{kind}_steps": totals.get(f"sparsekv_decode_requests_total{{path={kind}}}", 0.0) for kind in ("sparse", "dense")}
    if context and selections:
        found |= {"share_read": chosen / context, "estimated_mass": mass / selections}
    return found


