"""vLLM's asynchronous scheduler with fair prefill: a huge prompt does not freeze the others.

`--scheduler-cls sparsekv.engine.scheduler.SparseScheduler`. No patch: it sorts `running`, shows vLLM's own `schedule`
only those waiting requests that may start, and lowers the tokens of single requests in a hook that `schedule` asks for
each of them (`v1/core/sched/scheduler.py`: `_reserve_prefill_lookahead`, for hybrid models `_mamba_block_aligned_split`
before it). Decodes are left alone; every prefill gets what `PrefillPlanner` grants. Requests start as `Admission` allows.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from .admission import Admission
from .config import PROFILE_ENV, active_config
from .prefill_plan import MIN_CHUNK, Prefill, PrefillPlanner, SchedulerSettings
from .step_cost import StepCost, StepLoad

logger = init_logger(__name__)

MIN_BLOCK = 128
"""Where vLLM's blocks are smaller than so many tokens, chunks are made of as many blocks as that takes."""

LOOK_BEHIND = 32
"""Waiting requests looked at behind those that memory does not allow to start."""

LOG_WAITING_EVERY_S = 10.0


class SparseScheduler(AsyncScheduler):
    """Decodes first, prefill within a latency target, shares of it by need and age, starts by what fits."""

    settings: ClassVar[SchedulerSettings | None] = None
    """Set by a subclass in place of the profile's section `scheduler`."""
    clock: Callable[[], float] = staticmethod(time.perf_counter)
    """Seconds; virtual ones in a simulation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.policy != SchedulingPolicy.FCFS:
            raise ValueError(f"SparseScheduler orders requests itself: --scheduling-policy must be fcfs, not {self.policy.value}")
        settings = self.settings or (active_config().scheduler if os.environ.get(PROFILE_ENV) else SchedulerSettings())
        self._max_active = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)
        self._max_step_tokens = self.max_num_scheduled_tokens
        self._check_batch()
        self.cost = StepCost()
        self._planner = PrefillPlanner(settings, self.cost, -(-MIN_BLOCK // self.block_size) * self.block_size)
        self._admission = Admission(self.kv_cache_manager, self.max_model_len, self.vllm_config.max_concurrent_batches)
        self._grants: dict[str, int] = {}
        """Prefill tokens of this step, by request."""
        self._uncached: dict[str, int] = {}
        """Prompt tokens a waiting request has to compute, as first looked up."""
        self._overtaken: dict[str, int] = {}
        """Tokens of younger requests that started before a waiting one."""
        self._steps: deque[tuple[SchedulerOutput, StepLoad, float]] = deque()
        self._last_done = self._last_log = float("-inf")
        self._log_capacity(settings)

    # ---- the step

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        # The youngest is last, and the last is whom vLLM preempts: the oldest always gets to its end.
        self.running.sort(key=_age)
        started = self._plan()
        # vLLM would go on to requests that may not start yet where one turns out to need a load first.
        hidden = [(queue, _show_only(queue, started)) for queue in (self.waiting, *self._holding_queues())]
        output = super().schedule(*args, **kwargs)
        for queue, requests in hidden:
            for request in requests:
                queue.add_request(request)
        self.max_num_scheduled_tokens = self._max_step_tokens
        self._steps.append((output, self._load(output), self.clock()))
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self._learn(scheduler_output)
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _plan(self) -> list[Request]:
        """Sets the grants of this step; returns the waiting requests that start in it, in order."""
        decodes = [r for r in self.running if not r.is_prefill_chunk]
        load = StepLoad(sum(map(_step_tokens, decodes)), sum(r.num_computed_tokens for r in decodes))
        places = self._max_active - len(self.running) - self.num_waiting_for_streaming_input
        loaded = sorted((r for queue in self._holding_queues() for r in queue if self._can_start(r)), key=_age)[: max(places, 0)]
        starting = self._startable(places - len(loaded))
        requests = sorted([*(r for r in self.running if r.is_prefill_chunk), *loaded, *starting], key=_age)
        prefills = [Prefill(r.request_id, self._computed(r), r.num_tokens - self._computed(r), urgent=r in loaded) for r in requests]
        self._grants = self._planner.plan(load, prefills, self._max_step_tokens - load.decode_tokens)
        for prefill in prefills:
            if prefill.remaining == 1 and prefill.request_id in self._grants:
                # vLLM pads the step of a request that resumes its decode to the width of speculation, or leaves it out.
                self._grants[prefill.request_id] += self.num_spec_tokens
        # A resumed decode that vLLM leaves unpadded must not leave its room to others.
        self.max_num_scheduled_tokens = min(load.decode_tokens + sum(self._grants.values()), self._max_step_tokens)
        self._count_overtaken([r for r in starting if r.request_id in self._grants])
        return [r for r in (*loaded, *starting) if r.request_id in self._grants]

    def _startable(self, places: int) -> list[Request]:
        """Waiting requests that could start in this step, at most `places`.

        The one with least to compute comes first, but no request is overtaken by more work than its own.
        """
        candidates = [r for r in self.waiting if self._can_start(r)]
        if places <= 0 or not candidates:
            return []
        self._admission.begin([*self.running, *(r for queue in self._holding_queues() for r in queue)])
        candidates.sort(key=lambda r: (0 if self._is_due(r) else self._to_compute(r), _age(r)))
        found: list[Request] = []
        for request in candidates[: places + LOOK_BEHIND]:
            if len(found) == places:
                break
            if self._admission.admit(request):
                found.append(request)
            elif self._is_due(request):
                break
        if len(found) < min(places, len(candidates)):
            self._log_waiting(len(candidates) - len(found))
        return found

    def _is_due(self, request: Request) -> bool:
        return self._overtaken.get(request.request_id, 0) >= self._to_compute(request)

    def _count_overtaken(self, started: list[Request]) -> None:
        for request in started:
            tokens = self._uncached.pop(request.request_id, 0)
            self._overtaken.pop(request.request_id, None)
            for other in self.waiting:
                if other not in started and _age(other) < _age(request):
                    self._overtaken[other.request_id] = self._overtaken.get(other.request_id, 0) + tokens

    # ---- single requests

    def _holding_queues(self) -> list[RequestQueue]:
        """Requests that hold blocks while they wait, for a load or after one; vLLM starts them before all others."""
        return [self.kv_holding_waiting] if hasattr(self, "kv_holding_waiting") else [self.skipped_waiting]

    def _can_start(self, request: Request) -> bool:
        """What vLLM would find when it looks at a waiting request (`_handle_blocked_waiting_request`)."""
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in self.finished_recving_kv_req_ids
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return request.structured_output_request is not None and request.structured_output_request.grammar is not None
        return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)

    def _computed(self, request: Request) -> int:
        """Tokens it need not compute any more."""
        if request.num_computed_tokens:
            return min(request.num_computed_tokens, request.num_tokens - 1)
        return request.num_tokens - self._to_compute(request)

    def _to_compute(self, request: Request) -> int:
        """Tokens a waiting request has to compute, by the rows that are cached."""
        if request.request_id not in self._uncached:
            self._uncached[request.request_id] = request.num_tokens - self._admission.cached_tokens(request)
        return self._uncached[request.request_id]

    def _granted(self, request: Request, tokens: int) -> int:
        if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
            return tokens
        return min(tokens, self._grants.get(request.request_id, 0))

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        num_new_tokens = self._granted(request, num_new_tokens)
        if not num_new_tokens:
            return 0
        # vLLM cuts a chunk down to whole blocks unless a step is smaller than a block. What this request's step is, the grant says.
        step_tokens, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, num_new_tokens
        tokens = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        self.max_num_scheduled_tokens = step_tokens
        # A recurrent state is kept only where a chunk ends.
        interval = self.cache_config.prefix_cache_retention_interval
        start = request.num_computed_tokens + sum(args) + sum(kwargs.values())
        return min(tokens, interval - start % interval) if interval and tokens else tokens

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, self._granted(request, num_new_tokens))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._uncached.pop(request.request_id, None)
        self._overtaken.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    # ---- what steps cost

    def _load(self, output: SchedulerOutput) -> StepLoad:
        """The work of a step just scheduled; its requests have been advanced already."""
        tokens = context = 0
        chunks = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            start = self.requests[request_id].num_computed_tokens - scheduled
            if request_id in self._grants:
                chunks.append((start, scheduled))
            else:
                tokens += scheduled
                context += start
        return StepLoad(tokens, context, tuple(chunks))

    def _learn(self, output: SchedulerOutput) -> None:
        """A step ran from its scheduling, or from the end of the one before it if that was later, until now."""
        done = self.clock()
        while self._steps:
            scheduled, load, at = self._steps.popleft()
            if scheduled is output:
                if output.total_num_scheduled_tokens:
                    self.cost.observe(load, (done - max(at, self._last_done)) * 1e3)
                break
        self._last_done = done

    # ---- limits, told at the start and while requests wait

    def _check_batch(self) -> None:
        """A step must hold all decodes and the smallest chunk: else prompts would wait for ever.

        Raises:
            ValueError: names the least batch that does.
        """
        width = 1 + self.num_spec_tokens
        needed = self._max_active * width + MIN_CHUNK
        if self._max_step_tokens < needed:
            raise ValueError(
                f"a step of {self._max_step_tokens} tokens does not hold {self._max_active} decodes x {width} tokens "
                f"and {MIN_CHUNK} of a prompt: set max_num_batched_tokens to at least {needed}"
            )

    def _log_capacity(self, settings: SchedulerSettings) -> None:
        states = self._admission.max_requests
        if states is not None and states < self._max_active:
            logger.warning("%d requests run at once, not %d: the recurrent states of more do not fit", states, self._max_active)
        logger.info("prefill keeps steps with decodes to %g ms and others to %g ms", settings.itl_target_ms, settings.idle_step_ms)

    def _log_waiting(self, count: int) -> None:
        now = self.clock()
        if now - self._last_log >= LOG_WAITING_EVERY_S:
            self._last_log = now
            logger.info("%d requests wait for memory: %s", count, self._admission.refusal)


def _age(request: Request) -> tuple[float, str]:
    return request.arrival_time, request.request_id


def _step_tokens(request: Request) -> int:
    """Tokens vLLM schedules for a decoding request: one and its drafts."""
    return max(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens, 0)


def _show_only(queue: RequestQueue, shown: Iterable[Request]) -> list[Request]:
    """Leaves those of the queue's requests that are `shown`, in that order; returns the others."""
    queued = list(queue)
    kept = [r for r in shown if r in queued]
    queue.remove_requests(queued)
    for request in kept:
        queue.add_request(request)
    return [r for r in queued if r not in kept]
