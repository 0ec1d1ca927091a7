"""Steps in which every response gets one more token and nothing else happens, as nearly all steps are.

In each step vLLM asks of each response whether it may go on, needs a block or has ended, and writes a report about it.
With a small model that takes longer than the kernels. Here vLLM is asked about a response only when it needs a block,
comes to its end, or waits. Otherwise the few numbers that change are counted for all at once (`stretch`), and are in
vLLM's records before vLLM looks at them, so that it can take any step itself.

Responses that wait enter some at a time, because a step that lets one in costs as much as one that lets in many.
"""

import logging
from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from trainer.rollout.accounting.last_blocks import countable
from trainer.rollout.accounting.stretch import Followed, Stretch, one_token_each, runs

logger = logging.getLogger(__name__)

# The versions whose records are known; any other one takes all steps itself.
VERSIONS = ("0.26.0", "0.31.0", "0.32.0")
NEVER, NOW = 2**62, 0
# Steady steps that take as long as one of vLLM's that reads prompts, and for how many a response waits at most.
COST_OF_ENTRY, LONGEST_WAIT = 2, 32


class _SteadyStep(SchedulerOutput):  # type: ignore[misc]
    """What vLLM's workers do in a step in which each of the responses gets a token."""

    stretch: Stretch
    responses: list[Followed]
    places: np.ndarray  # of the responses in the stretch


class SteadySteps:
    """Stands before `schedule` and `update_from_output` of a vLLM scheduler."""

    def __init__(self, scheduler: Any, longest_wait: int) -> None:
        """`scheduler` is suited, see `reason_against`. A response that could enter waits for `longest_wait` steps at
        most."""
        self.longest_wait = longest_wait
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        (manager,) = self._cache.coordinator.single_type_managers
        self._block, self._held = int(manager.block_size), manager.req_to_blocks
        self.expected = int(isinstance(scheduler, AsyncScheduler))  # tokens that vLLM counts before they are sampled
        self._stretch: Stretch | None = None
        self._next_of_vllm = NOW  # the first step that vLLM has to take
        # Running and waiting responses, if vLLM let none of those that wait in with its last step.
        self._refused: tuple[int, int] | None = None
        self._waited = 0  # steps since a response could enter
        self._missed = 0  # tokens that those which could enter did not get meanwhile
        self._tells_common_prefix = False
        self.taken = 0
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._free = scheduler._free_request
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output
        scheduler._free_request = self._forget

    def follow(self, name: str, tokens: list[int], log_probs: list[float] | None) -> None:
        """Steady steps append to `tokens` and `log_probs`, after `write` at the latest; vLLM's output processor does in
        all others."""
        request = self._scheduler.requests[name]
        sampling = request.sampling_params
        ends = _ends(sampling.eos_token_id, tuple(sampling.stop_token_ids or ()))
        request.followed = Followed(request, name, ends, most_tokens(self._scheduler, request), tokens, log_probs)

    def write(self) -> None:
        """Brings vLLM's records up to the steps so far."""
        if self._stretch is not None:
            self._stretch.write_all()

    def _forget(self, request: Any, *arguments: Any, **others: Any) -> Any:
        """As vLLM's `_free_request`, for a response that has ended. Otherwise the two records would keep each other
        alive."""
        request.followed = None
        return self._free(request, *arguments, **others)

    def schedule(self, *arguments: Any) -> Any:
        """As vLLM's `Scheduler.schedule`."""
        if self._stretch is not None and self._is_steady(self._stretch):
            return self._steady_step(self._stretch)
        step = self.whole_step(*arguments)
        self._look_ahead(step)
        return step

    def whole_step(self, *arguments: Any) -> Any:
        """A step that vLLM takes itself. It takes the next one, too, unless `_look_ahead` foresees that it need not."""
        self.write()
        scheduler, step = self._scheduler, self._schedule(*arguments)
        admitted = step.scheduled_new_reqs or step.scheduled_cached_reqs.resumed_req_ids
        looked = 0 < step.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens and not step.preempted_req_ids
        self._refused = scheduler.get_request_counts() if looked and not admitted else None
        self.leave_next_to_vllm()
        return step

    def leave_next_to_vllm(self) -> None:
        """Forgets what was foreseen of the responses."""
        self._next_of_vllm, self._stretch = NOW, None
        self._waited = self._missed = 0

    def _is_steady(self, stretch: Stretch) -> bool:
        scheduler = self._scheduler
        if scheduler.current_step + 1 >= self._next_of_vllm or self._admits():
            return False
        if scheduler.pause_state.name != "UNPAUSED":
            return False
        if len(stretch.responses) != len(scheduler.running):  # some have ended or were aborted; none can have joined
            stretch.narrow()
        if not stretch.responses or stretch.placeholders() != self.expected:
            return False  # vLLM treats the first step after a pause in another way
        return len(stretch.at_block(stretch.begun)) <= int(self._cache.block_pool.get_num_free_blocks())

    def may_admit(self) -> bool:
        """Whether a response waits and there may be a place for it: not before another one has ended, once vLLM found
        no room in its cache."""
        running, waiting = counts = self._scheduler.get_request_counts()
        return bool(waiting) and running < self._scheduler.max_num_running_reqs and counts != self._refused

    def _admits(self) -> bool:
        """Whether responses that wait enter now: after `longest_wait` steps, or once they have missed as many tokens as
        those at work miss in the step that lets them in. Called once for each step, because it counts."""
        if not self.may_admit():
            return False
        running, waiting = self._scheduler.get_request_counts()
        self._waited += 1
        self._missed += min(waiting, self._scheduler.max_num_running_reqs - running)
        return self._waited > self.longest_wait or self._missed >= COST_OF_ENTRY * running

    def _look_ahead(self, step: Any) -> None:
        """Begins a stretch after a step of vLLM, and notes when vLLM has to take the next one."""
        scheduler = self._scheduler
        if self.may_admit():
            return
        now, running, first = scheduler.current_step, [], NEVER
        for request in scheduler.running:
            response = getattr(request, "followed", None)
            if response is None or request.is_prefill_chunk or request.request_id not in step.num_scheduled_tokens:
                return
            running.append(response)
            first = min(first, now + max(1, response.most - request.num_computed_tokens))
        if running:
            self._stretch, self._next_of_vllm = Stretch(running, self._block, self.expected), first
            self._tells_common_prefix = bool(step.num_common_prefix_blocks)

    def _steady_step(self, stretch: Stretch) -> _SteadyStep:
        self._scheduler.current_step += 1
        blocks = self._take_blocks(stretch)
        computed, outputs = stretch.counts()
        names = stretch.names
        step: _SteadyStep = _SteadyStep.make_empty()
        step.stretch, step.responses, step.places = stretch, stretch.responses, stretch.places
        told = [blocks.get(name) for name in names] if blocks else [None] * len(names)
        self.tell(step, dict.fromkeys(names, 1), computed, outputs, told)
        stretch.begun += 1
        self.taken += 1
        return step

    def tell(self, step: Any, tokens: dict[str, int], computed: list[int], outputs: list[int], blocks: Any) -> None:
        """Writes into an empty step what vLLM tells its workers: for each response the tokens of the step, by name,
        those computed and sampled before, and the ids of its new blocks."""
        scheduler, names = self._scheduler, list(tokens)
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = tokens, sum(tokens.values())
        cached = step.scheduled_cached_reqs
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens = names, computed, outputs
        cached.new_block_ids = blocks
        if self._tells_common_prefix:
            step.num_common_prefix_blocks = self._cache.get_num_common_prefix_blocks(names[0])
        step.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        step.preempted_req_ids, scheduler.reset_preempted_req_ids = scheduler.reset_preempted_req_ids, set()
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(names)

    def _take_blocks(self, stretch: Stretch) -> dict[str, tuple[list[int]]]:
        """The ids of the blocks that vLLM gives to the responses that need one now, by name."""
        step = stretch.begun
        needing = [
            response
            for response in stretch.at_block(step)
            if len(self._held[response.name]) * self._block < stretch.held(response, step)
        ]
        taken = {}
        for response, block in zip(needing, self._cache.block_pool.get_new_blocks(len(needing)), strict=True):
            stretch.write(response)
            self._held[response.name].append(block)
            self._cache.cache_blocks(response.request, stretch.held(response, step) - 1)
            taken[response.name] = ([block.block_id],)
        return taken

    def update_from_output(self, step: Any, found: Any) -> Any:
        """As vLLM's `Scheduler.update_from_output`."""
        if not isinstance(step, _SteadyStep) or step.stretch is not self._stretch:
            self.write()
            return self._update(step, found)
        log_probs = None if found.logprobs is None else found.logprobs.logprobs[:, 0]  # the sampled token's come first
        tokens, names = one_token_each(found.sampled_token_ids), step.scheduled_cached_reqs.req_ids
        if found.req_ids != names:
            order = np.fromiter(map(found.req_id_to_index.__getitem__, names), np.int64, len(names))
            tokens, log_probs = tokens[order], None if log_probs is None else log_probs[order]
        left_to_vllm = self._end_step(step, tokens, log_probs)
        if not left_to_vllm:
            return {}
        rest = copy(step)
        rest.num_scheduled_tokens = dict.fromkeys(left_to_vllm, 1)
        return self._update(rest, found)

    def _end_step(self, step: _SteadyStep, tokens: np.ndarray, log_probs: np.ndarray | None) -> list[str]:
        """Notes a token of each response that goes on. Returns the names of the others: they end with it, have ended,
        were aborted or taken back meanwhile."""
        stretch, number = step.stretch, step.stretch.found
        for response in stretch.at_block(number + 1):  # all tokens of a block are computed now
            self._cache.cache_blocks(response.request, stretch.held(response, number))
        running = np.fromiter(map(runs, step.responses), np.bool_, len(step.responses))
        ended = stretch.ended(step.places, tokens)
        left_to_vllm = [step.responses[place] for place in np.flatnonzero(ended | ~running)]
        for response in left_to_vllm:
            if runs(response):
                stretch.leave_to_vllm(response)
        stretch.add(step.places, tokens, log_probs)
        for response in stretch.at_block(number + 2):
            stretch.write(response)
            response.request.update_block_hashes()
        return [response.name for response in left_to_vllm]


@lru_cache
def _ends(end_token_id: int | None, stop_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The same set for all responses that end with the same tokens."""
    return frozenset({*stop_token_ids} if end_token_id is None else {end_token_id, *stop_token_ids})


def most_tokens(scheduler: Any, request: Any) -> int:
    """The tokens of a request, those of its prompt included, at which vLLM ends it."""
    return int(min(request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len))


def reason_against(scheduler: Any) -> str | None:
    """Why vLLM has to take all steps itself, or None."""
    if vllm.__version__.partition("+")[0] not in VERSIONS:  # "+" and what it was built for
        return f"vLLM {vllm.__version__} may keep other records than {' and '.join(VERSIONS)}"
    if type(scheduler) not in (Scheduler, AsyncScheduler):
        return f"{type(scheduler).__name__} is another scheduler than vLLM's usual ones"
    if scheduler.num_spec_tokens:
        return "drafts give several tokens a step"
    if scheduler.connector is not None or scheduler.needs_kv_cache_zeroing or not countable(scheduler.kv_cache_manager):
        return "its cache needs more than blocks of one size that hold all tokens"
    return None


def steady_steps(scheduler: Any, reports_text: bool) -> SteadySteps | None:
    """The shortcut, in place; None where it does not fit, which is logged. With `reports_text` every token is looked at
    for stop strings."""
    reason = "stop strings are searched in every token's text" if reports_text else reason_against(scheduler)
    if reason is not None:
        logger.info("vLLM accounts for every token of every response: %s", reason)
        return None
    return SteadySteps(scheduler, LONGEST_WAIT)
