"""Steps in which every response gets one more token and nothing else happens, as nearly all steps are.

In each step vLLM asks of each response whether it may go on, needs a block or has ended, and writes a report about it.
With a small model that takes longer than the kernels. Here vLLM is asked about a response only when it needs a block,
comes to its end, or waits; otherwise the few numbers that change are counted up. vLLM's records are the same after
every step, so that it can take any of them itself.

Responses that wait enter some at a time, because a step that lets one in costs as much as one that lets in many.
"""

import logging
from collections import defaultdict
from copy import copy
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from trainer.rollout.accounting.last_blocks import countable

logger = logging.getLogger(__name__)

# The versions whose records are known; any other one takes all steps itself.
VERSIONS = ("0.26.0", "0.32.0")
NEVER, NOW = 2**62, 0
# Steady steps that take as long as one of vLLM's that reads prompts, and for how many a response waits at most.
COST_OF_ENTRY, LONGEST_WAIT = 2, 32


@dataclass(slots=True, eq=False)
class Followed:
    """vLLM's records of a response: of its scheduler, and the tokens and log-probs of its output processor. vLLM
    ends it once it has `most` tokens, those of the prompt included."""

    request: Any
    name: str
    ends: frozenset[int | None]
    most: int
    tokens: list[int]
    log_probs: list[float] | None


class _SteadyStep(SchedulerOutput):  # type: ignore[misc]
    """What vLLM's workers do in a step in which each of the responses gets a token."""

    responses: list[Followed]


class SteadySteps:
    """Stands before `schedule` and `update_from_output` of a vLLM scheduler."""

    def __init__(self, scheduler: Any, longest_wait: int) -> None:
        """`scheduler` is suited, see `reason_against`. A response that could enter waits for `longest_wait` steps at
        most."""
        self.longest_wait = longest_wait
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        (manager,) = self._cache.coordinator.single_type_managers
        self._block = int(manager.block_size)
        self.expected = int(isinstance(scheduler, AsyncScheduler))  # tokens that vLLM counts before they are sampled
        self._running: list[Followed] = []
        self._due: dict[int, list[Followed]] = {}  # by step: responses that need a block then
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
        """Steady steps append to `tokens` and `log_probs`, vLLM's output processor in all others."""
        request = self._scheduler.requests[name]
        sampling = request.sampling_params
        ends = frozenset((sampling.eos_token_id, *(sampling.stop_token_ids or ())))
        request.followed = Followed(request, name, ends, most_tokens(self._scheduler, request), tokens, log_probs)

    def _forget(self, request: Any, *arguments: Any, **others: Any) -> Any:
        """As vLLM's `_free_request`, for a response that has ended. Otherwise the two records would keep each other
        alive."""
        request.followed = None
        return self._free(request, *arguments, **others)

    def schedule(self, *arguments: Any) -> Any:
        """As vLLM's `Scheduler.schedule`."""
        if self._is_steady():
            return self._steady_step()
        step = self.whole_step(*arguments)
        self._look_ahead(step)
        return step

    def whole_step(self, *arguments: Any) -> Any:
        """A step that vLLM takes itself. It takes the next one, too, unless `_look_ahead` foresees that it need not."""
        scheduler, step = self._scheduler, self._schedule(*arguments)
        admitted = step.scheduled_new_reqs or step.scheduled_cached_reqs.resumed_req_ids
        looked = 0 < step.total_num_scheduled_tokens < scheduler.max_num_scheduled_tokens and not step.preempted_req_ids
        self._refused = scheduler.get_request_counts() if looked and not admitted else None
        self.leave_next_to_vllm()
        return step

    def leave_next_to_vllm(self) -> None:
        """Forgets what was foreseen of the responses."""
        self._next_of_vllm, self._running, self._due = NOW, [], {}
        self._waited = self._missed = 0

    def _is_steady(self) -> bool:
        scheduler, step = self._scheduler, self._scheduler.current_step + 1
        if step >= self._next_of_vllm or self._admits() or scheduler.pause_state.name != "UNPAUSED":
            return False
        if len(self._running) != len(scheduler.running):  # some have ended or were aborted; none can have joined
            self._running = [one for one in self._running if runs(one)]
        if not self._running or self._running[0].request.num_output_placeholders != self.expected:
            return False  # vLLM treats the first step after a pause in another way
        needing = sum(map(runs, self._due.get(step, ())))
        return bool(needing <= self._cache.block_pool.get_num_free_blocks())

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
        """Notes after a step of vLLM when each response needs a block, and when vLLM has to take the next step."""
        scheduler = self._scheduler
        if self.may_admit():
            return
        now, running, due, first = scheduler.current_step, [], defaultdict(list), NEVER
        for request in scheduler.running:
            response = getattr(request, "followed", None)
            if response is None or request.is_prefill_chunk or request.request_id not in step.num_scheduled_tokens:
                return
            computed = request.num_computed_tokens
            running.append(response)
            due[now + 1 + -computed % self._block].append(response)
            first = min(first, now + max(1, response.most - computed))
        self._running, self._due, self._next_of_vllm = running, due, first
        self._tells_common_prefix = bool(step.num_common_prefix_blocks)

    def _steady_step(self) -> _SteadyStep:
        scheduler, responses = self._scheduler, self._running
        scheduler.current_step += 1
        blocks = self._take_blocks(scheduler.current_step)
        names, computed, outputs = [], [], []
        for response in responses:
            request = response.request
            names.append(response.name)
            computed.append(request.num_computed_tokens)
            outputs.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens += 1
            request.num_output_placeholders += self.expected
            request.num_in_flight_tokens += 1
        step: _SteadyStep = _SteadyStep.make_empty()
        step.responses = responses
        self.tell(step, dict.fromkeys(names, 1), computed, outputs, [blocks.get(name) for name in names])
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

    def _take_blocks(self, now: int) -> dict[str, Any]:
        """The ids of the blocks that vLLM gives to the responses that need one now, by name."""
        needing = [response for response in self._due.pop(now, ()) if runs(response)]
        self._due[now + self._block] = needing
        taken = {}
        for response in needing:
            blocks = self._cache.allocate_slots(response.request, 1, num_lookahead_tokens=0)
            taken[response.name] = blocks.get_block_ids(allow_none=True)
        return taken

    def update_from_output(self, step: Any, found: Any) -> Any:
        """As vLLM's `Scheduler.update_from_output`."""
        if not isinstance(step, _SteadyStep):
            return self._update(step, found)
        sampled, places = found.sampled_token_ids, found.req_id_to_index
        log_probs = None if found.logprobs is None else found.logprobs.logprobs[:, 0].tolist()  # the sampled come first
        left_to_vllm = []
        for response in step.responses:
            request, name = response.request, response.name
            if not runs(response):  # ended, aborted or taken back meanwhile
                left_to_vllm.append(name)
                continue
            place, held = places[name], len(request._all_token_ids)
            (token,) = sampled[place]
            if held % self._block == 0:  # a block is full, because the tokens so far are all computed now
                self._cache.cache_blocks(request, held)
            if token in response.ends or held + 1 >= response.most:
                left_to_vllm.append(name)
                continue
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            response.tokens.append(token)
            if response.log_probs is not None and log_probs is not None:
                response.log_probs.append(log_probs[place])
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= self.expected
            if (held + 1) % self._block == 0:
                request.update_block_hashes()
        if not left_to_vllm:
            return {}
        rest = copy(step)
        rest.num_scheduled_tokens = dict.fromkeys(left_to_vllm, 1)
        return self._update(rest, found)


def most_tokens(scheduler: Any, request: Any) -> int:
    """The tokens of a request, those of its prompt included, at which vLLM ends it."""
    return int(min(request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len))


def runs(response: Followed) -> bool:
    """Whether it is one of those that get tokens: it has not ended, was not aborted or taken back."""
    return bool(response.request.status == RequestStatus.RUNNING)


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
