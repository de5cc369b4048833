"""One run from the first check to the report: whatever ends it, its folder can be read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsekv.bench.report.environment import command_script, describe, program, public_command
from sparsekv.bench.report.folder import RunFolder
from sparsekv.bench.report.write import write_report
from sparsekv.profiles.errors import ExitCode, SparsekvError

from .agent import Agent
from .client import Client
from .display import Display
from .gpus import Gpus
from .options import Plan, SwarmOptions, Ui
from .phases import PhaseRecord, Swarm
from .records import RequestRecord
from .repository import Repository, scan
from .sampler import COLUMNS, Sampler
from .sender import AgentView, Clock, Sender
from .server import Server, api_key, base_url, is_local, probe

IDLE_SECONDS = 2.0
PARTIAL_SECONDS = (10.0, 20.0, 40.0)
"""Between partial reports; the last one repeats."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for, besides the load itself."""

    out: Path
    ui: Ui = Ui.NONE
    key_file: Path | None = None
    profile_name: str | None = None
    profile_text: str = ""
    """The resolved profile, to be kept with the run."""


@dataclass
class Outcome:
    folder: Path
    summary: dict[str, Any]
    interrupted: bool


class Load:
    """What a run drives: agents of a swarm, or a replay. `phases` and `failures` are kept up to date."""

    kind: str
    views: list[AgentView]
    phases: list[PhaseRecord]
    failures: dict[int, str]
    info: dict[str, Any]

    async def run(self) -> None:
        """The whole load; returns when it is over."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What only shows while it runs."""
        return {}


def run_swarm(options: SwarmOptions, request: Request) -> Outcome:
    """Runs a swarm; see `run_load` for what it raises."""
    repository = scan(options.repo)
    return run_load(options, request, lambda sender, changed: SwarmLoad(options, sender, repository, changed))


class SwarmLoad(Load):
    """Agents on a repository."""

    kind = "swarm"

    def __init__(self, options: SwarmOptions, sender: Sender, repository: Repository, changed: Callable[[], None]) -> None:
        by_model = sender.server.tools and options.plan is not Plan.SCRIPTED
        preamble = _preamble(options, repository, by_model=by_model)
        count = options.agents + bool(options.intruder_tokens)
        agents = [Agent(i, sender, repository, options, preamble, by_model=by_model) for i in range(count)]
        self._intruder = agents.pop() if options.intruder_tokens else None
        self._swarm = Swarm(agents, sender, options, changed)
        self.phases, self.failures = self._swarm.phases, self._swarm.failures
        self.views = [agent.view for agent in (*agents, *([self._intruder] if self._intruder else []))]
        self.info = {
            "roles": {str(agent.view.index): agent.view.role for agent in agents},
            "plan": "model" if by_model else "scripted",
            "repository": {
                "name": repository.name,
                "files": len(repository.files),
                "chars": repository.chars,
                "reasons": dict(repository.reasons),
                "skipped": repository.skipped,
            },
        }

    async def run(self) -> None:
        await self._swarm.run(self._intruder)

    def facts(self) -> dict[str, Any]:
        return {"rewinds": [a.rewinds for a in self._swarm.agents], "reread": [a.script.passes for a in self._swarm.agents]}


def run_load(options: SwarmOptions, request: Request, make: Callable[[Sender, Callable[[], None]], Load]) -> Outcome:
    """Probes the server, creates the folder, runs the load and writes the report.

    Raises:
        SparsekvError: before anything was sent, if the run cannot work; after it, if its folder could not be written.
    """
    return asyncio.run(run_load_async(options, request, make))


async def run_load_async(options: SwarmOptions, request: Request, make: Callable[[Sender, Callable[[], None]], Load]) -> Outcome:
    """The same within a running event loop."""
    base = base_url(options.url)
    key = api_key(request.key_file)
    client = Client(base, {"Authorization": f"Bearer {key}"} if key else {}, options.limits)
    gpus = Gpus() if is_local(base) else _NoGpus()
    try:
        server = await probe(client, options)
        stem = f"{request.profile_name or server.model.rstrip('/').rsplit('/', 1)[-1]}-{options.agents}x{options.context or 'trace'}"
        folder = RunFolder.create(request.out, stem, COLUMNS)
        try:
            return await _Run(options, request, client, server, gpus, folder, local=is_local(base)).go(make)
        finally:
            folder.close()
    finally:
        gpus.close()
        await client.close()


class _NoGpus(Gpus):
    """For a server elsewhere: this machine's GPUs have no part in it."""

    def __init__(self) -> None:
        self._handles = []


class _Run:
    """Keeps the folder up to date while a load runs."""

    def __init__(
        self, options: SwarmOptions, request: Request, client: Client, server: Server, gpus: Gpus, folder: RunFolder, *, local: bool
    ) -> None:
        self._options, self._request, self._client, self._server = options, request, client, server
        self._gpus, self._folder, self._local = gpus, folder, local
        self._load: Load | None = None
        self._broken: OSError | None = None
        self._stop: Callable[[], object] = lambda: None

    async def go(self, make: Callable[[Sender, Callable[[], None]], Load]) -> Outcome:
        idle = await self._idle_power()
        clock = Clock()
        record_text = self._guarded(self._folder.append_text) if self._options.record_text else None
        sender = Sender(self._client, self._server, self._options, clock, self._record, record_text)
        load = self._load = make(sender, self._save)
        self._info = self._describe(load, idle)
        self._write_provenance()
        self._save()
        write_report(self._folder.path)
        phase = lambda: load.phases[-1].name if load.phases and load.phases[-1].end is None else ""  # noqa: E731
        append = self._guarded(self._folder.append_sample)
        sampler = Sampler(
            self._client, clock, load.views, phase, self._gpus, append, self._scraped, metrics=self._server.metrics, local=self._local
        )
        self._display = Display(self._request.ui, load.views, sampler, clock, phase, self._server.model, self._options.context)
        beside = [sampler.run(), self._display.run(), self._partial_reports()]
        state = await self._drive(load.run(), beside)
        await sampler.sample()
        self._info["state"] = state
        self._save()
        if self._broken is not None:
            raise SparsekvError(f"{self._folder.path} can no longer be written: {self._broken.strerror}", exit_code=ExitCode.ENVIRONMENT)
        summary = write_report(self._folder.path)
        return Outcome(self._folder.path, summary, state == "interrupted")

    async def _drive(self, load: Coroutine[Any, Any, None], beside: Sequence[Coroutine[Any, Any, None]]) -> str:
        """Runs the load with its companions; SIGINT and SIGTERM end it in good order. Returns the run's state."""
        main = asyncio.create_task(load)
        companions = [asyncio.create_task(each) for each in beside]
        loop = asyncio.get_running_loop()
        self._stop = main.cancel
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                    loop.add_signal_handler(number, main.cancel)
                    stack.callback(loop.remove_signal_handler, number)
            try:
                await main
                return "complete"
            except asyncio.CancelledError:
                return "interrupted"
            finally:
                for task in companions:
                    task.cancel()
                await asyncio.gather(*companions, return_exceptions=True)

    async def _idle_power(self) -> float | None:
        """Power of the GPUs before the load, for the energy above idle."""
        readings: list[float | None] = []
        while len(self._gpus) and len(readings) < 5:
            readings.append(self._gpus.sample().get("gpu_power_w"))
            await asyncio.sleep(IDLE_SECONDS / 5)
        known = [r for r in readings if r is not None]
        return sum(known) / len(known) if known else None

    async def _partial_reports(self) -> None:
        """Has the reports made by a process of low priority now and then, so that a run that is killed has them."""
        command = [sys.executable, "-m", "sparsekv.bench.report.write", str(self._folder.path)]
        number = 0
        while True:
            await asyncio.sleep(PARTIAL_SECONDS[min(number, len(PARTIAL_SECONDS) - 1)])
            number += 1
            child = await asyncio.create_subprocess_exec(
                *command, preexec_fn=lambda: os.nice(19), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                await child.wait()
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()

    def _record(self, record: RequestRecord) -> None:
        self._guarded(lambda r: self._folder.append("requests.jsonl", r.to_line()))(record)
        if record.failed:
            self._display.errors[record.status] = self._display.errors.get(record.status, 0) + 1

    def _scraped(self, moment: float, metrics: dict[str, float]) -> None:
        line = json.dumps({"t": round(moment, 3), "metrics": metrics}, separators=(",", ":"))
        self._guarded(lambda text: self._folder.append("server_metrics.jsonl", text))(line)

    def _guarded(self, write: Callable[[Any], None]) -> Callable[[Any], None]:
        """A disk that is full ends the run, once and in good order."""

        def guarded(value: Any) -> None:
            try:
                write(value)
            except OSError as error:
                self._broken = self._broken or error
                self._stop()

        return guarded

    def _save(self) -> None:
        if self._load is None or not hasattr(self, "_info"):
            return
        load = self._load
        self._info |= {
            "phases": [phase.to_json() for phase in load.phases],
            "failures": {str(agent): reason for agent, reason in load.failures.items()},
            **load.facts(),
        }
        self._guarded(lambda info: self._folder.write_json("run.json", info))(self._info)

    def _describe(self, load: Load, idle: float | None) -> dict[str, Any]:
        options = asdict(self._options) | {"repo": self._options.repo.resolve().name}  # no folder of this machine
        gpus = self._options.gpus if self._options.gpus is not None else (len(self._gpus) or None)
        return {
            "schema_version": 1,
            "kind": load.kind,
            "state": "running",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": public_command(program()),
            "options": options,
            "server": asdict(self._server) | {"gpus": gpus},
            "profile": self._request.profile_name,
            "idle_power_w": idle,
            **load.info,
        }

    def _write_provenance(self) -> None:
        self._folder.write_json("environment.json", describe(self._gpus.facts() if len(self._gpus) else [], local=self._local))
        self._folder.write("command.sh", command_script(program()))
        self._folder.write("profile.resolved.yaml", self._request.profile_text or "# no profile was named: give --profile\n")


def _preamble(options: SwarmOptions, repository: Repository, *, by_model: bool) -> str:
    """The opening that all agents share. Its mark is new in every run: without it a second run would find the first one's prefixes."""
    mark = "" if options.warm else f"Session {os.urandom(8).hex()}.\n"
    tools = " Use the tools to read it." if by_model else ""
    return f"{mark}You answer questions about the code base {repository.name}.{tools} Answer from what you have read, and name files."
