"""What agents, a newcomer and the prompt itself notice while a huge prompt is computed beside them, in virtual time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler

from .cost import Hardware
from .virtual_engine import Record, VirtualEngine, document

Builder = Callable[[], Scheduler]


@dataclass(frozen=True)
class Scene:
    """Agents decode; a huge prompt arrives, and while it is computed short questions do."""

    agents: int = 7
    context: int = 32_768
    """Tokens of each agent's conversation when the huge prompt arrives."""
    prompt: int = 250_000
    question: int = 100
    questions: int = 5
    """They arrive one after the other, spread over the time the prompt takes."""
    undisturbed_s: float = 20.0
    """The agents' rate is taken over so long before the prompt arrives."""


@dataclass(frozen=True)
class Interference:
    """Seconds, and ratios of them. Newcomer: the slowest of the questions."""

    decode_rate_kept: float
    """Tokens per second of the agents while the prompt is computed, over those just before."""
    itl_p50: float
    itl_p99: float
    """Time between two tokens of an agent while the prompt is computed."""
    itl_max: float
    newcomer_ttft: float
    newcomer_ttft_idle: float
    """Of the same question on an engine with nothing else to do."""
    longest_step: float
    big_ttft: float
    undisturbed_itl: float


def measure(build: Builder, hardware: Hardware, scene: Scene, seed: int = 0) -> Interference:
    """Runs the scene once; the scheduler of `build` learns from the agents' own prompts what steps cost."""
    engine = VirtualEngine(build(), hardware, seed)
    agents = [
        engine.submit(f"agent{i}", document(1 + i, scene.context), max_tokens=200_000, at=0.0) for i in range(scene.agents)
    ]
    _run_until(engine, lambda: all(a.token_times for a in agents))
    begin = engine.now
    engine.run(until=begin + scene.undisturbed_s)
    rate = _tokens(agents, begin, engine.now) / (engine.now - begin)

    start, first_step = engine.now, len(engine.steps)
    big = engine.submit("big", document(100, scene.prompt), max_tokens=1)
    newcomers = _ask(engine, scene, big)
    _run_until(engine, lambda: bool(big.token_times) and all(n.token_times for n in newcomers))
    end = big.token_times[0]
    gaps = sorted(b - a for agent in agents for a, b in _gaps(agent) if b > start and a < end)
    return Interference(
        decode_rate_kept=_tokens(agents, start, end) / (end - start) / rate,
        itl_p50=statistics.median(gaps),
        itl_p99=gaps[int(0.99 * (len(gaps) - 1))],
        itl_max=gaps[-1],
        newcomer_ttft=max(n.ttft for n in newcomers),
        newcomer_ttft_idle=alone(build, hardware, scene.question, seed),
        longest_step=max(s.end - s.start for s in engine.steps[first_step:]),
        big_ttft=big.ttft,
        undisturbed_itl=scene.agents / rate,
    )


def alone(build: Builder, hardware: Hardware, tokens: int, seed: int = 0) -> float:
    """Time to the first token of a prompt on an engine that has served others and has nothing else to do."""
    engine = VirtualEngine(build(), hardware, seed)
    for i, length in enumerate((100, 4000, 20_000)):
        engine.submit(f"before{i}", document(200 + i, length), max_tokens=50)
        engine.run()
    record = engine.submit("alone", document(300, tokens), max_tokens=1)
    engine.run()
    return record.ttft


def _ask(engine: VirtualEngine, scene: Scene, big: Record) -> list[Record]:
    """Submits the questions, each when the prompt has got a certain way, and gives those records."""
    asked: list[Record] = []
    for i in range(scene.questions):
        goal = big.request.num_tokens * (i + 0.5) / scene.questions
        _run_until(engine, lambda goal=goal: big.request.num_computed_tokens >= goal)  # type: ignore[misc]
        asked.append(engine.submit(f"question{i}", document(400 + i, scene.question), max_tokens=20))
    return asked


def _run_until(engine: VirtualEngine, reached: Callable[[], bool], poll_s: float = 0.005) -> None:
    while not reached():
        engine.run(until=engine.now + poll_s)


def _tokens(records: list[Record], begin: float, end: float) -> int:
    return sum(begin < t <= end for r in records for t in r.token_times)


def _gaps(record: Record) -> list[tuple[float, float]]:
    steps = sorted(set(record.token_times))
    return list(itertools.pairwise(steps))
