"""Swarms against the fake server, in virtual time: what is measured must be what the server was told to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparsekv.bench import virtual_time
from sparsekv.bench.fake_server import Behaviour, FakeServer
from sparsekv.bench.metrics import Run, Window, load
from sparsekv.bench.report import plots
from sparsekv.bench.swarm import run, sampler
from sparsekv.bench.swarm.options import Plan, SwarmOptions, Ui
from sparsekv.bench.swarm.repository import scan
from sparsekv.bench.swarm.run import Outcome, Request, SwarmLoad, run_load_async

FILES = 24


@pytest.fixture(scope="session")
def code_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some Python files that are long enough for a few agents."""
    root = tmp_path_factory.mktemp("shop")
    for number in range(FILES):
        lines = [f"def price_{number}_{i}(order, rate):\n    return order.total * rate + {i}\n" for i in range(60)]
        (root / f"module_{number}.py").write_text("\n".join(lines))
    return root


@dataclass
class Finished:
    """A run that is over, and the server's own account of it."""

    outcome: Outcome
    server: FakeServer
    run: Run

    def window(self, name: str) -> Window:
        return next(w for w in self.run.windows if w.name == name)

    def metrics(self, name: str) -> dict[str, Any]:
        return next(w["metrics"] for w in self.outcome.summary["windows"] if w["name"] == name)

    @property
    def reasons(self) -> set[str]:
        return {reason["code"] for reason in self.outcome.summary["verdict"]["reasons"]}


@pytest.fixture(autouse=True)
def _cheap_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time each wake-up costs the same, so the probe wakes up less often; nothing is drawn."""
    monkeypatch.setattr(run, "PARTIAL_SECONDS", (1e9,))
    monkeypatch.setattr(sampler, "PROBE", 0.5)
    monkeypatch.setattr(plots, "draw_all", lambda run: [])


@pytest.fixture
def run_swarm(tmp_path: Path, code_base: Path) -> Callable[..., Finished]:
    """Runs a small swarm; keyword arguments are options, `server` is the server, `beside` runs beside it."""

    def go(server: FakeServer | None = None, beside: Any = None, **changes: Any) -> Finished:
        fake = server or FakeServer(default=Behaviour(ttft=0.25, itl=0.1, prefill_rate=10000))
        defaults: dict[str, Any] = {
            "agents": 3, "context": 1024, "turns": 2, "answer_tokens": 24, "decode_seconds": 4.0, "decode_tokens": 300, "min_window": 4.0,
            "ramp_seconds": 0.6, "plan": Plan.SCRIPTED,
        }  # fmt: skip

        async def main() -> Outcome:
            async with fake:
                options = SwarmOptions(url=fake.url, repo=code_base, **(defaults | changes))
                repository = scan(options.repo)
                request = Request(tmp_path / "runs", Ui.NONE)
                work = run_load_async(options, request, lambda sender, changed: SwarmLoad(options, sender, repository, changed))
                if beside is None:
                    return await work
                other = asyncio.create_task(beside(fake))
                try:
                    return await work
                finally:
                    other.cancel()

        outcome = virtual_time.run(main())
        return Finished(outcome, fake, load(outcome.folder))

    return go
