"""Fast path for decode-only steps, which are nearly all.

In each step vLLM checks for each response whether it may continue, needs a KV block or has ended, and reports it. With
small models that takes longer than the kernels. The fast path asks vLLM only when a response needs a block, ends, or
waits for admission. Otherwise a `DecodeRun` updates the counts of all responses at once. vLLM's records are up to date
whenever vLLM schedules, so any step can be one of vLLM's own.

Waiting responses are admitted together, because a step that admits one response costs as much as one that admits many.
"""

from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from trainer.rollout.vllm.decode_run import DecodeRun, Tracked, one_token_each, runs
from trainer.rollout.vllm.patches import has_uniform_blocks, outdated

NEVER, NOW = 2**62, 0
# Cost of a prefill in decode steps; longest wait for admission, in steps.
PREFILL_COST, LONGEST_WAIT = 2, 32


class _DecodeStep(SchedulerOutput):  # type: ignore[misc]
    """A step in which each response gets one token, as vLLM's workers receive it."""

    run: DecodeRun
    responses: list[Tracked]
    indices: np.ndarray  # of the responses in the run


class FastPath:
    """Replaces `schedule` and `update_from_output` of a vLLM scheduler."""

    def __init__(self, scheduler: Any, longest_wait: int = LONGEST_WAIT) -> None:
        """`scheduler` is supported, see `unsupported`. A response that could be admitted waits for at most
        `longest_wait` steps."""
        self.longest_wait = longest_wait
        self.steps = 0  # taken without vLLM
        # vLLM's asynchronous scheduler counts a scheduled token as an output placeholder until it is sampled.
        self.placeholders = int(isinstance(scheduler, AsyncScheduler))
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        (manager,) = self._cache.coordinator.single_type_managers
        self._block_size, self._blocks = int(manager.block_size), manager.req_to_blocks
        self._run: DecodeRun | None = None
        self._next_vllm_step = NOW
        # Running and waiting responses, if vLLM admitted none of the waiting ones in its last step.
        self._refused: tuple[int, int] | None = None
        self._waited = 0  # steps since a response could be admitted
        self._missed = 0  # tokens that waiting responses did not get meanwhile
        self._counts_common_prefix = False
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._free = scheduler._free_request
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output
        scheduler._free_request = self._untrack

    def track(self, request_id: str, tokens: list[int], log_probs: list[float] | None) -> None:
        """Appends the response's tokens and log-probs of decode-only steps to these lists, at the next `flush` at the
        latest. In all other steps vLLM's output processor appends them."""
        request = self._scheduler.requests[request_id]
        sampling = request.sampling_params
        stops = _stops(sampling.eos_token_id, tuple(sampling.stop_token_ids or ()))
        length = max_length(self._scheduler, request)
        request.tracked = Tracked(request, request_id, stops, length, tokens, log_probs)

    def flush(self) -> None:
        """Brings vLLM's records up to date."""
        if self._run is not None:
            self._run.flush_all()

    def _untrack(self, request: Any, *arguments: Any, **named: Any) -> Any:
        """vLLM's `_free_request` of a response that has ended; also breaks the reference cycle of the two records."""
        request.tracked = None
        return self._free(request, *arguments, **named)

    def schedule(self, *arguments: Any) -> Any:
        """vLLM's `Scheduler.schedule`."""
        if self._run is not None and self._is_decode_only(self._run):
            return self._decode_step(self._run)
        step = self.vllm_step(*arguments)
        self._predict(step)
        return step

    def vllm_step(self, *arguments: Any) -> Any:
        """A step that vLLM schedules. It also schedules the next one, unless `_predict` finds that it need not."""
        self.flush()
        scheduler, step = self._scheduler, self._schedule(*arguments)
        admitted = step.scheduled_new_reqs or step.scheduled_cached_reqs.resumed_req_ids
        has_budget = 0 < step.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens
        tried = has_budget and not step.preempted_req_ids
        self._refused = scheduler.get_request_counts() if tried and not admitted else None
        self.discard_prediction()
        return step

    def discard_prediction(self) -> None:
        """Discards the predicted schedule; vLLM schedules the next step."""
        self._next_vllm_step, self._run = NOW, None
        self._waited = self._missed = 0

    def _is_decode_only(self, run: DecodeRun) -> bool:
        scheduler = self._scheduler
        if scheduler.current_step + 1 >= self._next_vllm_step or self._admits():
            return False
        if scheduler.pause_state.name != "UNPAUSED":
            return False
        if len(run.responses) != len(scheduler.running):  # some ended or were aborted; none can have joined
            run.drop_ended()
        if not run.responses or run.placeholders() != self.placeholders:
            return False  # vLLM treats the first step after a pause in another way
        return len(run.at_block_boundary(run.scheduled)) <= int(self._cache.block_pool.get_num_free_blocks())

    def may_admit(self) -> bool:
        """Whether a response waits and might be admitted. Once vLLM found no room in its cache, only after another
        response has ended."""
        running, waiting = counts = self._scheduler.get_request_counts()
        return bool(waiting) and running < self._scheduler.max_num_running_reqs and counts != self._refused

    def _admits(self) -> bool:
        """Whether waiting responses are admitted now: after `longest_wait` steps, or once they have missed as many
        tokens as the running ones miss in a prefill. Call it once per step, because it counts."""
        if not self.may_admit():
            return False
        running, waiting = self._scheduler.get_request_counts()
        self._waited += 1
        self._missed += min(waiting, self._scheduler.max_num_running_reqs - running)
        return self._waited > self.longest_wait or self._missed >= PREFILL_COST * running

    def _predict(self, step: Any) -> None:
        """Begins a run after a step of vLLM, and notes when vLLM has to schedule the next one."""
        scheduler = self._scheduler
        if self.may_admit():
            return
        now, running, first = scheduler.current_step, [], NEVER
        for request in scheduler.running:
            response = getattr(request, "tracked", None)
            if response is None or request.is_prefill_chunk or request.request_id not in step.num_scheduled_tokens:
                return
            running.append(response)
            first = min(first, now + max(1, response.max_length - request.num_computed_tokens))
        if running:
            self._run, self._next_vllm_step = DecodeRun(running, self._block_size, self.placeholders), first
            self._counts_common_prefix = bool(step.num_common_prefix_blocks)

    def _decode_step(self, run: DecodeRun) -> _DecodeStep:
        self._scheduler.current_step += 1
        new_blocks = self._allocate(run)
        computed, outputs = run.counts()
        step: _DecodeStep = _DecodeStep.make_empty()
        step.run, step.responses, step.indices = run, run.responses, run.indices
        ids = run.request_ids
        block_ids = [new_blocks.get(request_id) for request_id in ids] if new_blocks else [None] * len(ids)
        self.fill(step, dict.fromkeys(ids, 1), computed, outputs, block_ids)
        run.scheduled += 1
        self.steps += 1
        return step

    def fill(self, step: Any, tokens: dict[str, int], computed: list[int], outputs: list[int], block_ids: Any) -> None:
        """Fills an empty step for vLLM's workers: by request id the tokens of the step, then for each request the
        computed and the output tokens before it, and the ids of its new KV blocks."""
        scheduler, ids = self._scheduler, list(tokens)
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = tokens, sum(tokens.values())
        cached = step.scheduled_cached_reqs
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens = ids, computed, outputs
        cached.new_block_ids = block_ids
        if self._counts_common_prefix:
            step.num_common_prefix_blocks = self._cache.get_num_common_prefix_blocks(ids[0])
        step.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        step.preempted_req_ids, scheduler.reset_preempted_req_ids = scheduler.reset_preempted_req_ids, set()
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(ids)

    def _allocate(self, run: DecodeRun) -> dict[str, tuple[list[int]]]:
        """The ids of newly allocated KV blocks, by request id."""
        step = run.scheduled
        needing = [
            response
            for response in run.at_block_boundary(step)
            if len(self._blocks[response.request_id]) * self._block_size < run.length_before(response, step)
        ]
        ids = {}
        for response, block in zip(needing, self._cache.block_pool.get_new_blocks(len(needing)), strict=True):
            run.flush(response)
            self._blocks[response.request_id].append(block)
            self._cache.cache_blocks(response.request, run.length_before(response, step) - 1)
            ids[response.request_id] = ([block.block_id],)
        return ids

    def update_from_output(self, step: Any, output: Any) -> Any:
        """vLLM's `Scheduler.update_from_output`."""
        if not isinstance(step, _DecodeStep) or step.run is not self._run:
            self.flush()
            return self._update(step, output)
        # The sampled token's log-prob comes first.
        log_probs = None if output.logprobs is None else output.logprobs.logprobs[:, 0]
        tokens, ids = one_token_each(output.sampled_token_ids), step.scheduled_cached_reqs.req_ids
        if output.req_ids != ids:
            order = np.fromiter(map(output.req_id_to_index.__getitem__, ids), np.int64, len(ids))
            tokens, log_probs = tokens[order], None if log_probs is None else log_probs[order]
        left_to_vllm = self._end_step(step, tokens, log_probs)
        if not left_to_vllm:
            return {}
        rest = copy(step)
        rest.num_scheduled_tokens = dict.fromkeys(left_to_vllm, 1)
        return self._update(rest, output)

    def _end_step(self, step: _DecodeStep, tokens: np.ndarray, log_probs: np.ndarray | None) -> list[str]:
        """Adds a token to each response that continues. Returns the ids of the others: they end with this token, or
        have ended or were aborted or preempted meanwhile."""
        run, number = step.run, step.run.sampled
        for response in run.at_block_boundary(number + 1):  # all tokens of a block are computed now
            self._cache.cache_blocks(response.request, run.length_before(response, number))
        running = np.fromiter(map(runs, step.responses), np.bool_, len(step.responses))
        ended = run.ended(step.indices, tokens)
        left_to_vllm = [step.responses[place] for place in np.flatnonzero(ended | ~running)]
        for response in left_to_vllm:
            if runs(response):
                run.hand_over(response)
        run.append(step.indices, tokens, log_probs)
        for response in run.at_block_boundary(number + 2):
            run.flush(response)
            response.request.update_block_hashes()
        return [response.request_id for response in left_to_vllm]


def empty_step() -> Any:
    """A step without requests."""
    return SchedulerOutput.make_empty()


@lru_cache
def _stops(end_token_id: int | None, stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The same set for all responses with the same stop tokens."""
    return frozenset({*stop_token_ids} if end_token_id is None else {end_token_id, *stop_token_ids})


def max_length(scheduler: Any, request: Any) -> int:
    """The number of tokens, prompt included, at which vLLM ends the request."""
    return int(min(request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len))


def unsupported(scheduler: Any, reports_text: bool) -> str | None:
    """Why the fast path does not support the scheduler, or None. With `reports_text` vLLM searches each token's text
    for stop strings."""
    if reason := outdated("decode fast path"):
        return reason
    if reports_text:
        return "stop strings are searched in every token's text"
    if type(scheduler) not in (Scheduler, AsyncScheduler):
        return f"{type(scheduler).__name__} is none of vLLM's own schedulers"
    if scheduler.num_spec_tokens:
        return "with drafts on a CPU a response gets several tokens in a step"
    if scheduler.connector is not None or scheduler.needs_kv_cache_zeroing:
        return "the KV cache is shared with a connector, or is zeroed"
    if not has_uniform_blocks(scheduler.kv_cache_manager):
        return "some layers do not attend to all earlier tokens"
    return None
