"""Speculative decoding in a vLLM engine: its scheduler gets drafts as tokens that a step verifies.

vLLM schedules a step before it has the tokens of the previous one, and drafts need these tokens. So an engine switches
between steps without drafts, one of them ahead, and steps with drafts, one after the other.
"""

import math
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from trainer.rollout.occupancy import Drafts
from trainer.rollout.vllm.decode_run import Tracked, runs
from trainer.rollout.vllm.drafts import Backoff, Drafter, Update, acceptance_length
from trainer.rollout.vllm.fast_path import FastPath, empty_step, max_length

PROBES = 2  # places in the batch where two neighbours, which may answer the same prompt, are probed


class Speculation:
    """Replaces `schedule` and `update_from_output` of a vLLM scheduler, outside of the fast path.

    The caller checks before each step whether the engine `should_switch`, finishes all steps under way, and switches.
    """

    def __init__(
        self,
        core: Any,
        max_drafted: int,
        agree: Callable[[bool], bool],
        pads_one: bool,
        fast_path: FastPath | None,
    ) -> None:
        """Drafts at most `max_drafted` tokens of a response in a step of vLLM's engine core. `agree` returns on all
        ranks of an engine the decision of the first. `pads_one` extends one draft of a step to `max_drafted` tokens,
        as the CUDA graphs need."""
        self.is_drafting = False
        self.backoff = Backoff()
        self.drafted_steps = None if fast_path is None else DraftedSteps(core.scheduler, fast_path)
        self._core = core
        self._scheduler = core.scheduler
        self._fast_path = fast_path
        self._steps_ahead = core.batch_queue_size
        self._max_drafted = max_drafted
        self._agree = agree
        self._pads_one = pads_one
        self._drafter = Drafter(max_drafted)
        self._drafts = Drafts()
        self._step_ended = time.perf_counter()
        self._last: dict[str, tuple[list[int], int]] = {}  # by request id: sampled tokens, number of drafted ones
        self._schedule, self._update = self._scheduler.schedule, self._scheduler.update_from_output
        self._schedule_drafts = self._schedule if fast_path is None else fast_path.vllm_step
        self._scheduler.schedule, self._scheduler.update_from_output = self.schedule, self.update_from_output

    def take_drafts(self) -> Drafts:
        """What was drafted since the last call."""
        taken, self._drafts = self._drafts, Drafts()
        return taken

    def should_switch(self) -> bool:
        """Whether the engine switches to drafts or back before the next step."""
        if not self.backoff.is_due(self.is_drafting):
            return False
        pays = self._agree(self.pays())
        self.backoff.decide(self.is_drafting, pays)
        return pays != self.is_drafting

    def pays(self) -> bool:
        """Whether drafts give a response more tokens than steps without drafts in the same time."""
        responses = len(self._scheduler.running)
        if self.is_drafting:
            return self.backoff.paid(responses)
        return self.backoff.will_pay(responses, self._probe())

    def _probe(self) -> float:
        """The acceptance length that a few running responses would have had."""
        if self._fast_path is not None:
            self._fast_path.flush()
        running = self._scheduler.running
        every = max(1, len(running) // PROBES)
        probed = [request for place in range(0, len(running), every) for request in running[place : place + 2]]
        return acceptance_length([_read(request) for request in probed], self._max_drafted)

    def switch(self) -> None:
        """Switches to drafts or back. No step may be under way."""
        self.is_drafting = not self.is_drafting
        self._drafter, self._last = Drafter(self._max_drafted), {}
        self._core.batch_queue_size = 1 if self.is_drafting else self._steps_ahead

    def schedule(self, *arguments: Any) -> Any:
        """vLLM's `Scheduler.schedule`, with a draft for each response that decodes."""
        if not self.is_drafting:
            return self._schedule(*arguments)
        decoding = [request for request in self._scheduler.running if _decodes(request)]
        drafts = self._drafter.draft([self._last_step(request) for request in decoding])
        if self._pads_one and (longest := max(drafts, key=len, default=[])):
            longest.extend(longest[-1:] * (self._max_drafted - len(longest)))
        drafts = [draft[: self._room(request)] for request, draft in zip(decoding, drafts, strict=True)]
        if self.drafted_steps is not None and (step := self.drafted_steps.schedule(decoding, drafts)):
            return step
        for request, draft in zip(decoding, drafts, strict=True):
            request.spec_token_ids = draft
        return self._schedule_drafts(*arguments)

    def _room(self, request: Any) -> int:
        """Tokens that the response may have before its last one."""
        return max_length(self._scheduler, request) - int(request.num_tokens) - 1

    def _last_step(self, request: Any) -> Update:
        sampled, drafted = self._last.get(request.request_id, ([], 0))
        return Update(request.request_id, sampled, drafted, lambda: _read(request))

    def update_from_output(self, step: Any, output: Any) -> Any:
        """vLLM's `Scheduler.update_from_output`; counts and times the step."""
        left_to_vllm = step if self.drafted_steps is None else self.drafted_steps.end(step, output)
        results = {} if left_to_vllm is None else self._update(left_to_vllm, output)
        drafts = step.scheduled_spec_decode_tokens
        began, self._step_ended = self._step_ended, time.perf_counter()
        if not self.is_drafting or drafts:  # a step with nothing to verify takes less time
            self.backoff.times.add(self.is_drafting, len(step.num_scheduled_tokens), self._step_ended - began)
        if not self.is_drafting:
            self.backoff.count(1.0)
            if not self._scheduler.running:
                self.backoff.reset()
            return results
        sampled = {request_id: output.sampled_token_ids[row] for request_id, row in output.req_id_to_index.items()}
        lengths = [len(tokens) for tokens in sampled.values() if tokens]  # unfinished prompts have none
        self.backoff.count(sum(lengths) / max(1, len(lengths)))
        accepted = sum(len(sampled[request_id]) - 1 for request_id in drafts)
        self._drafts += Drafts(sum(map(len, drafts.values())), accepted)
        self._last = {request_id: (tokens, len(drafts.get(request_id, ()))) for request_id, tokens in sampled.items()}
        return results


def _read(request: Any) -> tuple[list[int], list[int]]:
    return request.prompt_token_ids or [], list(request.output_token_ids)


def _decodes(request: Any) -> bool:
    """Whether only the last token of a running response is not computed."""
    return (
        request.status.name == "RUNNING"
        and not request.num_output_placeholders
        and request.num_computed_tokens == request.num_tokens - 1
        and request.num_output_tokens > 0
    )


class DraftedSteps:
    """The fast path for steps that verify a draft of each response. vLLM's records are up to date after each step."""

    def __init__(self, scheduler: Any, fast_path: FastPath) -> None:
        """`fast_path` tracks the scheduler's responses."""
        self.count = 0
        self._scheduler = scheduler
        self._fast_path = fast_path
        self._cache = scheduler.kv_cache_manager
        (manager,) = self._cache.coordinator.single_type_managers
        self._block_size = int(manager.block_size)
        self._blocks, self._cached_blocks = manager.req_to_blocks, manager.num_cached_block  # by request id
        self._step: Any = None  # the last one
        self._verified: list[tuple[Tracked, int]] = []  # its responses, and the tokens scheduled for each

    def schedule(self, requests: Sequence[Any], drafts: Sequence[list[int]]) -> Any:
        """The step that verifies a draft of each request and of no other, or None if vLLM has to schedule it.

        Only the last token of each request is not computed, and no draft reaches the request's maximum length.
        """
        scheduler, fast_path = self._scheduler, self._fast_path
        if len(requests) != len(scheduler.running) or not requests or fast_path.may_admit():
            return None
        if scheduler.pause_state.name != "UNPAUSED" or not all(hasattr(request, "tracked") for request in requests):
            return None
        counts = [1 + len(draft) for draft in drafts]
        if sum(counts) > scheduler.max_num_scheduled_tokens:
            return None
        missing = [self._missing_blocks(request, count) for request, count in zip(requests, counts, strict=True)]
        if sum(missing) > self._cache.block_pool.get_num_free_blocks():
            return None
        scheduler.current_step += 1
        ids = [request.request_id for request in requests]
        computed = [request.num_computed_tokens for request in requests]
        outputs = [request.num_output_tokens for request in requests]
        block_ids = [
            self._allocate(request, count) if blocks else None
            for request, count, blocks in zip(requests, counts, missing, strict=True)
        ]
        for request, count in zip(requests, counts, strict=True):
            if not fast_path.placeholders:  # the asynchronous scheduler caches blocks after the step
                self._cache_blocks(request, request.num_tokens)
            request.num_computed_tokens += count
            request.num_output_placeholders += fast_path.placeholders * count
            request.num_in_flight_tokens += count
        step = self._step = empty_step()
        self._verified = [(request.tracked, count) for request, count in zip(requests, counts, strict=True)]
        step.scheduled_spec_decode_tokens = {name: draft for name, draft in zip(ids, drafts, strict=True) if draft}
        fast_path.fill(step, dict(zip(ids, counts, strict=True)), computed, outputs, block_ids)
        fast_path.discard_prediction()
        self.count += 1
        return step

    def _missing_blocks(self, request: Any, count: int) -> int:
        """KV blocks that the request lacks for `count` more tokens."""
        needed: int = math.ceil((request.num_computed_tokens + count) / self._block_size)
        return max(0, needed - len(self._blocks[request.request_id]))

    def _allocate(self, request: Any, count: int) -> Any:
        blocks = self._cache.allocate_slots(request, count, num_lookahead_tokens=0)
        return blocks and blocks.get_block_ids(allow_none=True)

    def end(self, step: Any, output: Any) -> Any:
        """Ends a step. Returns the part that vLLM has to account for: all of it if vLLM scheduled it, None if nothing
        is left."""
        if step is not self._step:
            return step
        (verified, self._verified), self._step, left_to_vllm = (self._verified, []), None, {}
        for response, count in verified:
            row = output.req_id_to_index[response.request_id]
            sampled = output.sampled_token_ids[row]
            if not self._extend(response, count, sampled):
                left_to_vllm[response.request_id] = count
            elif response.log_probs is not None and output.logprobs is not None:
                log_probs = output.logprobs.slice_request(row, len(sampled)).logprobs
                response.log_probs.extend(log_probs[:, 0].tolist())  # the sampled token comes first
        if not left_to_vllm:
            return None
        rest = copy(step)
        rest.num_scheduled_tokens = left_to_vllm
        return rest

    def _extend(self, response: Tracked, count: int, sampled: list[int]) -> bool:
        """Adds the sampled tokens and returns True, unless the response ends with them or was stopped meanwhile."""
        request, length = response.request, response.request.num_tokens
        new_length = length + len(sampled)
        if not runs(response) or new_length >= response.max_length or not response.stops.isdisjoint(sampled):
            return False
        request._output_token_ids.extend(sampled)
        request._all_token_ids.extend(sampled)
        response.tokens.extend(sampled)
        request.num_computed_tokens -= count - len(sampled)
        request.num_output_placeholders -= self._fast_path.placeholders * count
        request.num_in_flight_tokens -= count
        if new_length // self._block_size > length // self._block_size:
            request.update_block_hashes()
        if self._fast_path.placeholders:
            self._cache_blocks(request, request.num_computed_tokens)
        return True

    def _cache_blocks(self, request: Any, tokens: int) -> None:
        """Shares the KV blocks that the request's first tokens fill."""
        if tokens // self._block_size > self._cached_blocks.get(request.request_id, 0):
            self._cache.cache_blocks(request, tokens)
