"""Steps in which every response gets the drafted tokens that it accepts and one more, and nothing else happens.

The few numbers that change are counted up, and vLLM's records are the same after every step.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from trainer.rollout.accounting.steady_steps import SteadySteps
from trainer.rollout.accounting.stretch import Followed, runs


@dataclass(slots=True)
class _Draft:
    response: Followed
    tokens: list[int]


class _DraftedStep(SchedulerOutput):  # type: ignore[misc]
    """What vLLM's workers do in a step in which each of the responses verifies its draft."""

    drafts: list[_Draft]


class DraftedSteps:
    """Takes the place of `schedule` and `update_from_output` of a vLLM scheduler for such steps."""

    def __init__(self, scheduler: Any, steady: SteadySteps) -> None:
        """`steady` follows the scheduler's responses."""
        self._scheduler = scheduler
        self._steady = steady
        self._cache = scheduler.kv_cache_manager
        (manager,) = self._cache.coordinator.single_type_managers
        self._block = int(manager.block_size)
        self._held, self._cached = manager.req_to_blocks, manager.num_cached_block  # by name
        self.taken = 0

    def schedule(self, requests: Sequence[Any], drafts: Sequence[list[int]]) -> Any:
        """The step that verifies a draft of each request, and of no other, or None if vLLM has to take it.

        The last token of each request is the only one that is not computed. No draft reaches its end.
        """
        scheduler = self._scheduler
        if len(requests) != len(scheduler.running) or not requests or self._steady.may_admit():
            return None
        if scheduler.pause_state.name != "UNPAUSED" or not all(hasattr(request, "followed") for request in requests):
            return None
        kept = [_Draft(request.followed, draft) for request, draft in zip(requests, drafts, strict=True)]
        tokens = {draft.response.name: 1 + len(draft.tokens) for draft in kept}
        if sum(tokens.values()) > scheduler.max_num_scheduled_tokens:
            return None
        needed = [self._missing(draft) for draft in kept]
        if sum(needed) > self._cache.block_pool.get_num_free_blocks():
            return None
        return self._step(kept, tokens, needed)

    def _missing(self, draft: _Draft) -> int:
        """Blocks that the response lacks for the tokens of the step."""
        request = draft.response.request
        end: int = request.num_computed_tokens + 1 + len(draft.tokens)
        return max(0, math.ceil(end / self._block) - len(self._held[draft.response.name]))

    def _step(self, drafts: list[_Draft], tokens: dict[str, int], needed: list[int]) -> _DraftedStep:
        self._scheduler.current_step += 1
        computed, outputs, blocks = [], [], []
        for draft, missing in zip(drafts, needed, strict=True):
            request, count = draft.response.request, 1 + len(draft.tokens)
            found = self._cache.allocate_slots(request, count, num_lookahead_tokens=0) if missing else None
            blocks.append(found and found.get_block_ids(allow_none=True))
            if not self._steady.expected:  # the asynchronous scheduler caches after the step
                self._cache_blocks(draft.response, len(request._all_token_ids))
            computed.append(request.num_computed_tokens)
            outputs.append(len(request._output_token_ids))
            request.num_computed_tokens += count
            request.num_output_placeholders += self._steady.expected * count
            request.num_in_flight_tokens += count
        step: _DraftedStep = _DraftedStep.make_empty()
        step.drafts = drafts
        step.scheduled_spec_decode_tokens = {draft.response.name: draft.tokens for draft in drafts if draft.tokens}
        self._steady.tell(step, tokens, computed, outputs, blocks)
        self._steady.leave_next_to_vllm()
        self.taken += 1
        return step

    def update(self, step: Any, found: Any) -> Any:
        """What the step has left for vLLM, or None if vLLM has to account for all of it."""
        if not isinstance(step, _DraftedStep):
            return step
        left_to_vllm = {}
        places, log_probs = found.req_id_to_index, found.logprobs
        for draft in step.drafts:
            place = places[draft.response.name]
            if not self._extended(draft, found.sampled_token_ids[place]):
                left_to_vllm[draft.response.name] = step.num_scheduled_tokens[draft.response.name]
            elif draft.response.log_probs is not None and log_probs is not None:
                new = log_probs.slice_request(place, len(found.sampled_token_ids[place])).logprobs
                draft.response.log_probs.extend(new[:, 0].tolist())  # the sampled come first
        if not left_to_vllm:
            return None
        rest = copy(step)
        rest.num_scheduled_tokens = left_to_vllm
        return rest

    def _extended(self, draft: _Draft, new: list[int]) -> bool:
        """Notes the tokens, if the response goes on after them."""
        response, request, count = draft.response, draft.response.request, 1 + len(draft.tokens)
        held = len(request._all_token_ids)
        if not runs(response) or held + len(new) >= response.most or not response.ends.isdisjoint(new):
            return False
        request._output_token_ids.extend(new)
        request._all_token_ids.extend(new)
        response.tokens.extend(new)
        request.num_computed_tokens -= count - len(new)
        request.num_output_placeholders -= self._steady.expected * count
        request.num_in_flight_tokens -= count
        if (held + len(new)) // self._block > held // self._block:
            request.update_block_hashes()
        if self._steady.expected:
            self._cache_blocks(response, request.num_computed_tokens)
        return True

    def _cache_blocks(self, response: Followed, tokens: int) -> None:
        """Lets others share the blocks that the first tokens of the response fill."""
        if tokens // self._block > self._cached.get(response.name, 0):
            self._cache.cache_blocks(response.request, tokens)
