"""When an engine of vLLM drafts, and what: its scheduler gets the drafts as tokens that a step verifies.

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
from trainer.rollout.speculation.step_times import StepTimes

# Steps without drafts before the engine looks whether they would pay, which double up to `PAUSE` while they would not.
# After they did not, it looks again later and later.
FIRST_PAUSE, PAUSE, LONGEST_PAUSE = 16, 256, 1024
WINDOW = 16  # steps with drafts after which it looks whether they paid
MARGIN = 1.1  # by which drafts must promise to pay
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
        self._quick = None if steady is None else DraftedSteps(core.scheduler, steady)
        self._ahead = core.batch_queue_size  # steps that vLLM has under way
        self._most = most
        self._agreed = agreed
        self._filled = filled
        self._drafter = Drafter(most)
        self._times = StepTimes()
        self._counted = Drafts()
        self._pause = self._setback = FIRST_PAUSE
        self._on = False
        self._steps = 0  # since it was decided
        self._gained = 0.0  # tokens that a response got in them on average
        self._promised = 1.0  # tokens a step when drafts last began
        self._kept = 1.0  # share of the promised tokens that came
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
        if self._steps < (WINDOW if self._on else self._pause):
            return False
        pays = self._agreed(self.pays())
        self._steps, self._gained = 0, 0.0
        if self._on:
            self._pause = self._setback = FIRST_PAUSE if pays else min(2 * self._setback, LONGEST_PAUSE)
        else:
            self._pause = min(2 * self._pause, PAUSE)
        return pays != self._on

    def pays(self) -> bool:
        """Whether a response gets more tokens in a step with drafts than in the steps without them of the same time."""
        cost = self._times.cost(len(self._scheduler.running))
        if self._on:
            gain = self._gained / self._steps
            self._kept = min(1.0, gain / self._promised)
            return gain > cost
        self._promised = self._promise()
        pays = self._kept * self._promised > MARGIN * cost
        self._kept += (1 - self._kept) / 4  # text changes: it is tried again in the end
        return pays

    def _promise(self) -> float:
        """Tokens a step that responses would have got with drafts, by what a few of them said last."""
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
        began, self._ended = self._ended, time.perf_counter()
        if not self._on or step.scheduled_spec_decode_tokens:  # a step that had nothing to verify costs less
            self._times.add(self._on, len(step.num_scheduled_tokens), self._ended - began)
        self._steps += 1
        if self._on:
            self._count(step.scheduled_spec_decode_tokens, found)
        elif not self._scheduler.running:  # the next responses are looked at soon
            self._steps, self._pause = 0, FIRST_PAUSE
        return outputs

    def _count(self, drafts: dict[str, list[int]], found: Any) -> None:
        sampled = [tokens for tokens in found.sampled_token_ids if tokens]
        if sampled:
            self._gained += sum(map(len, sampled)) / len(sampled)
        drafted = {name: len(draft) for name, draft in drafts.items()}
        places = found.req_id_to_index
        self._counted += Drafts(
            sum(drafted.values()), sum(len(found.sampled_token_ids[places[name]]) - 1 for name in drafted)
        )
        self._last = {name: (found.sampled_token_ids[place], drafted.get(name, 0)) for name, place in places.items()}


def _is_due(request: Any) -> bool:
    """Whether the next step computes only the last token of a response, and samples the one after it."""
    return (
        request.status == RequestStatus.RUNNING
        and not request.num_output_placeholders
        and request.num_computed_tokens == request.num_tokens - 1
        and request.num_output_tokens > 0
    )
