"""A scheduler class of vLLM, with real requests and a real KV cache manager, driven in virtual time without a model.

The loop is vLLM's `EngineCore.step_with_batch_queue`: while one step runs, the next is scheduled already.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sparsekv.engine.step_cost import StepLoad

from .build import PIPELINE
from .cost import Hardware

POLL_S = 1e-3
"""An engine with nothing to run looks again so soon."""


@dataclass
class Record:
    """What happened to one request; times in virtual seconds."""

    request: Request
    arrived: float
    token_times: list[float] = field(default_factory=list)
    """One per token; tokens of one step share it."""
    ended: float | None = None
    aborted: bool = False

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Times between the steps that gave it tokens."""
        steps = sorted(set(self.token_times))
        return [b - a for a, b in itertools.pairwise(steps)]


@dataclass(frozen=True)
class Step:
    start: float
    end: float
    load: StepLoad


class VirtualEngine:
    """Feeds arrivals and aborts to a scheduler and lets steps take what `hardware` says."""

    def __init__(self, scheduler: Scheduler, hardware: Hardware, seed: int = 0, acceptance: float = 0.7) -> None:
        init_none_hash(sha256)
        self.scheduler = scheduler
        self.hardware = hardware
        self.now = 0.0
        self.records: dict[str, Record] = {}
        self.steps: list[Step] = []
        self.on_end: Callable[[Record], None] = lambda record: None
        """Called when a request has ended; it may submit more."""
        self.check: Callable[[SchedulerOutput], None] = lambda output: None
        """Called after each `schedule`."""
        self._rng = random.Random(seed)
        self._acceptance = acceptance
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._in_flight: deque[tuple[SchedulerOutput, list[str], float]] = deque()
        self._loaded: set[str] = set()
        self._device_free = 0.0
        self._hasher = get_request_block_hasher(scheduler.hash_block_size, sha256)
        scheduler.clock = lambda: self.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        at: float | None = None,
        abort_at: float | None = None,
        tier_tokens: int = 0,
    ) -> Record:
        """A request that arrives at `at` (now, if not given) and is cancelled at `abort_at`.

        Args:
            tier_tokens: leading tokens of the prompt that a slower tier holds.
        """
        arrived = self.now if at is None else at
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=arrived,
            block_hasher=self._hasher,
        )
        record = self.records[request_id] = Record(request, arrived)
        self.at(arrived, lambda: self.scheduler.add_request(request))
        if tier_tokens:
            self.scheduler.connector.held[request_id] = tier_tokens
        if abort_at is not None:
            self.at(abort_at, lambda: self.abort(request_id))
        return record

    def abort(self, request_id: str) -> None:
        for request in self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
            record = self.records[request.request_id]
            record.aborted = True
            self._end(record)

    def run(self, until: float = float("inf"), max_steps: int = 1_000_000) -> None:
        """Runs to `until`, or until all requests have ended.

        Raises:
            RuntimeError: `max_steps` did not suffice.
        """
        for _ in range(max_steps):
            self._happen()
            if self.now >= until:
                return
            if self.scheduler.has_requests() and len(self._in_flight) < PIPELINE and self._launch():
                continue
            if self._in_flight:
                self._finish()
            elif not self._events:
                return
            else:
                self.now = self._events[0][0]
        raise RuntimeError(f"{self.scheduler.get_num_unfinished_requests()} requests left after {max_steps} steps at {self.now:.1f} s")

    def _happen(self) -> None:
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def _launch(self) -> bool:
        """Schedules a step; False if it is empty."""
        output = self.scheduler.schedule()
        self.check(output)
        for request_id in self._started_loads():
            self.at(self.now + self.scheduler.load_ms / 1e3, functools.partial(self._load_done, request_id))
        load, sampling = self._read(output)
        if not output.total_num_scheduled_tokens:
            self._in_flight.append((output, sampling, max(self._device_free, self.now + POLL_S)))
            return False
        start = max(self.now, self._device_free)
        self._device_free = start + self.hardware.step_ms(load, self._rng) / 1e3
        self._in_flight.append((output, sampling, self._device_free))
        self.steps.append(Step(start, self._device_free, load))
        return True

    def _load_done(self, request_id: str) -> None:
        self._loaded.add(request_id)

    def _started_loads(self) -> list[str]:
        if self.scheduler.connector is None:
            return []
        started, self.scheduler.connector.started = self.scheduler.connector.started, []
        return started

    def _read(self, output: SchedulerOutput) -> tuple[StepLoad, list[str]]:
        decode_tokens = decode_context = 0
        chunks, sampling = [], []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            start = request.num_computed_tokens - tokens
            if start < max(request.num_prompt_tokens, request.num_tokens - 1):
                chunks.append((start, tokens))
            else:
                decode_tokens += tokens
                decode_context += start
            if not request.is_prefill_chunk:
                sampling.append(request_id)
        return StepLoad(decode_tokens, decode_context, tuple(chunks)), sampling

    def _finish(self) -> None:
        """Takes the result of the oldest step in flight."""
        output, sampling, end = self._in_flight.popleft()
        self.now = max(self.now, end)
        self._happen()
        ids = list(output.num_scheduled_tokens)
        sampled = [self._sample(output, request_id) if request_id in sampling else [] for request_id in ids]
        loaded, self._loaded = self._loaded, set()
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(finished_recving=loaded) if loaded else None,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                record = self.records[item.request_id]
                record.token_times += [self.now] * len(item.new_token_ids)
                if item.finish_reason is not None:
                    self._end(record)

    def _sample(self, output: SchedulerOutput, request_id: str) -> list[int]:
        """A token, and of the drafts as many as are accepted in a row."""
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        accepted = next((i for i in range(drafts) if self._rng.random() >= self._acceptance), drafts)
        return [self._rng.randrange(1000) for _ in range(1 + accepted)]

    def _end(self, record: Record) -> None:
        record.ended = self.now
        self.on_end(record)


def document(name: int, tokens: int) -> list[int]:
    """Token ids that no other name shares; a longer document of the same name continues a shorter one."""
    return list(range(name << 32, (name << 32) + tokens))


def conversation(record: Record, question: list[int]) -> list[int]:
    """The prompt of the next turn."""
    return [*record.request.all_token_ids, *question]
