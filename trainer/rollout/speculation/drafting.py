"""Drafts in the steps of a vLLM engine: its scheduler gets them as tokens that a step verifies.

vLLM schedules a step before it has the tokens of the one before. Drafts need these, so an engine changes over between
steps without drafts, one ahead of the tokens, and steps with drafts, one after the other.
"""

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from trainer.rollout.accounting.drafted_steps import DraftedSteps
from trainer.rollout.accounting.steady_steps import SteadySteps, most_tokens
from trainer.rollout.occupancy import Drafts
from trainer.rollout.speculation.drafts import Drafter, Row, tokens_a_step
from trainer.rollout.speculation.payoff import Payoff

LOOKED_AT = 2  # places among the responses where it looks at two neighbours, which may answer the same prompt


class Drafting:
    """Stands before `schedule` and `update_from_output` of a vLLM scheduler, outside of all other shortcuts.

    Whoever takes the engine's steps asks it before each whether it `turns`, and lets no step be under way when it does.
    """

    def __init__(
        self, core: Any, most: int, agreed: Callable[[bool], bool], filled: bool, steady: SteadySteps | None
    ) -> None:
        """Drafts at most `most` tokens in a step of vLLM's engine core. `agreed` makes all ranks of an engine do what
        the first one wants. With `filled`, one of the drafts of a step has `most` tokens, as CUDA graphs ask.
        `steady` follows the responses, if there is a shortcut through vLLM's accounting."""
        self._core = core
        self._scheduler = core.scheduler
        self._steady = steady
        self._quick = None if steady is None else DraftedSteps(core.scheduler, steady)
        self._ahead = core.batch_queue_size  # steps that vLLM has under way
        self._most = most
        self._agreed = agreed
        self._filled = filled
        self._drafter = Drafter(most)
        self._payoff = Payoff()
        self._counted = Drafts()
        self._on = False
        self._ended = time.perf_counter()  # the last step
        self._last: dict[str, tuple[list[int], int]] = {}  # by response: what the last step sampled and had drafted
        self._schedule, self._update = self._scheduler.schedule, self._scheduler.update_from_output
        self._schedule_drafts = self._schedule if steady is None else steady.whole_step
        self._scheduler.schedule, self._scheduler.update_from_output = self.schedule, self.update_from_output

    def take_drafts(self) -> Drafts:
        """What was drafted since the last call."""
        taken, self._counted = self._counted, Drafts()
        return taken

    def turns(self) -> bool:
        """Whether the engine changes over now."""
        if not self._payoff.is_due(self._on):
            return False
        pays = self._agreed(self.pays())
        self._payoff.decide(self._on, pays)
        return pays != self._on

    def pays(self) -> bool:
        """Whether a response gets more tokens in a step with drafts than in the steps without them of the same time."""
        responses = len(self._scheduler.running)
        if self._on:
            return self._payoff.paid(responses)
        return self._payoff.will_pay(responses, self._promise())

    def _promise(self) -> float:
        """Tokens a step that responses would have got with drafts, by what a few of them said last."""
        if self._steady is not None:
            self._steady.write()
        running = self._scheduler.running
        every = max(1, len(running) // LOOKED_AT)
        looked_at = [request for place in range(0, len(running), every) for request in running[place : place + 2]]
        told = [(request.prompt_token_ids or [], request.output_token_ids) for request in looked_at]
        return tokens_a_step(told, self._most)

    def turn(self) -> None:
        """Changes over; no step is under way."""
        self._on = not self._on
        self._drafter, self._last = Drafter(self._most), {}
        self._core.batch_queue_size = 1 if self._on else self._ahead

    def schedule(self, *arguments: Any) -> Any:
        """As vLLM's `Scheduler.schedule`, with a draft for each response whose next token is due."""
        if not self._on:
            return self._schedule(*arguments)
        due = [request for request in self._scheduler.running if _is_due(request)]
        drafts = self._drafter.draft([self._row(request) for request in due])
        if self._filled and (longest := max(drafts, key=len, default=[])):
            longest.extend(longest[-1:] * (self._most - len(longest)))
        drafts = [draft[: self._room(request)] for request, draft in zip(due, drafts, strict=True)]
        if self._quick is not None and (step := self._quick.schedule(due, drafts)):
            return step
        for request, draft in zip(due, drafts, strict=True):
            request.spec_token_ids = draft
        return self._schedule_drafts(*arguments)

    def _room(self, request: Any) -> int:
        """Tokens that the response may have before its last one."""
        return most_tokens(self._scheduler, request) - int(request.num_tokens) - 1

    def _row(self, request: Any) -> Row:
        new, drafted = self._last.get(request.request_id, ([], 0))
        return Row(
            request.request_id, new, drafted, lambda: (request.prompt_token_ids or [], list(request.output_token_ids))
        )

    def update_from_output(self, step: Any, found: Any) -> Any:
        """As vLLM's `Scheduler.update_from_output`; counts what it brought and how long it took."""
        left = step if self._quick is None else self._quick.update(step, found)
        outputs = {} if left is None else self._update(left, found)
        self._count(step, found)
        return outputs

    def _count(self, step: Any, found: Any) -> None:
        drafts = step.scheduled_spec_decode_tokens
        began, self._ended = self._ended, time.perf_counter()
        if not self._on or drafts:  # a step that had nothing to verify costs less
            self._payoff.times.add(self._on, len(step.num_scheduled_tokens), self._ended - began)
        self._payoff.count(_tokens_of_a_response(found) if self._on else 1.0)
        if self._on:
            self._note(drafts, found)
        elif not self._scheduler.running:
            self._payoff.look_soon()

    def _note(self, drafts: dict[str, list[int]], found: Any) -> None:
        drafted = {name: len(draft) for name, draft in drafts.items()}
        places = found.req_id_to_index
        self._counted += Drafts(
            sum(drafted.values()), sum(len(found.sampled_token_ids[places[name]]) - 1 for name in drafted)
        )
        self._last = {name: (found.sampled_token_ids[place], drafted.get(name, 0)) for name, place in places.items()}


def _tokens_of_a_response(found: Any) -> float:
    """Tokens that a response got on average, those aside whose prompt is not read to its end."""
    sampled = [tokens for tokens in found.sampled_token_ids if tokens]
    return sum(map(len, sampled)) / max(1, len(sampled))


def _is_due(request: Any) -> bool:
    """Whether the next step computes only the last token of a response, and samples the one after it."""
    return (
        request.status == RequestStatus.RUNNING
        and not request.num_output_placeholders
        and request.num_computed_tokens == request.num_tokens - 1
        and request.num_output_tokens > 0
    )
