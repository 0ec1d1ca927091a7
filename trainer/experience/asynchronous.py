"""Asynchronous sampling: responses continue while the weights change."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from trainer.data.dataset import PromptSampler, SamplerState
from trainer.experience.collector import Collector, Experience, Phase
from trainer.experience.pace import Pace
from trainer.experience.sampled_ahead import SampledStep
from trainer.experience.trajectory import Trajectory

ROUNDING = 1e-6  # 0.3 of 10 prompts are 3, not 2.9999999999999996


class AsynchronousPipeline:
    """Returns the experience of each step, in order, while a thread keeps the engines sampling.

    The thread extends all unfinished responses by `rollout.segment_length` tokens at a time. Between two segments the
    engines may receive new weights; each token records the version of the weights that sampled it. Engines that sample
    in flight go on with the responses as they stand; others read them again. A step's responses start when at most
    `trainer.max_staleness` updates remain before that step, so no token is older and none is discarded. A fraction,
    like 0.5, lets that share of the step's prompts start one update earlier.

    Engines that share their GPUs with the trainers sample until a step has all its responses, and stand still until
    they have new weights. Responses of later steps fill the engines meanwhile, and continue afterwards.

    Steps get their prompts in the sampler's order and wait for all responses. Taking responses as they finish would
    favour short ones and could not be resumed.
    """

    def __init__(
        self, collector: Collector, sampler: PromptSampler, phase: Phase, on_shared_gpus: bool = False
    ) -> None:
        self._collector = collector
        self._sampler = sampler
        self._phase = phase
        self._on_shared_gpus = on_shared_gpus
        self._held = False
        self._segment = collector.config.rollout.segment_length
        self._max_staleness = collector.config.trainer.max_staleness
        self._pace = Pace(self._max_staleness, silent=on_shared_gpus)
        self._under_way: deque[SampledStep] = deque()
        self._finished: deque[SampledStep] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="sample")
        self._first_step = self._next_step = self._last_step = 0
        self._first_version = 0
        self._at_work = False
        self._pauses = 0
        self._closed = False
        self._failure: Exception | None = None
        self._taken: SampledStep | None = None

    def take(self, step: int, last_step: int) -> Experience:
        """The experience of a step. The first one starts the thread, which samples up to the last step."""
        if self._thread.ident is None:  # not started; a thread that failed is not alive either
            self._next_step, self._last_step = max(step, self._next_step), last_step
            self._first_step, self._first_version = step, self._collector.engines.version
            self._thread.start()
        began = time.monotonic()
        with self._phase("generate"), self._changed:
            self._changed.wait_for(lambda: self._finished or self._failure)
            if not self._finished and self._failure is not None:
                raise self._failure
            batch = self._taken = self._finished.popleft()
            self._pace.taken(batch.step, time.monotonic() - began)
            if self._on_shared_gpus:
                self._held = True
                self._wait_for_idle()
        return self._collector.experience(batch.prompts, batch.rows, self._phase)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the engines to finish their segment, and keeps them idle inside the context."""
        with self._phase("generate"), self._changed:
            self._wait_for_idle()
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1 + self._held
                self._held = False
                self._move_finished()  # responses in flight also grow while a validation samples
                self._changed.notify_all()

    def _wait_for_idle(self) -> None:
        """Keeps the engines from another segment. The caller has the lock."""
        self._pauses += 1
        self._changed.wait_for(lambda: not self._at_work)

    def sampler_state(self) -> SamplerState:
        """The sampler's state after the last experience taken; a resumed run draws the unfinished prompts again."""
        return self._taken.place if self._taken else self._sampler.state_dict()

    def sampled_ahead(self, step: int) -> list[SampledStep]:
        """The responses of steps after this one, as far as they are sampled: waits until the engines have finished
        their segment. None if environments answer some, or failed to, because what those hold cannot be written."""
        with self._changed:
            self._wait_for_idle()  # a mere wait could last until nothing is left to sample
            try:
                ahead = [
                    batch for batch in (self._taken, *self._finished, *self._under_way) if batch and batch.step > step
                ]
                if any(row.environment or row.answering or row.scored for batch in ahead for row in batch.rows):
                    return []
                return [replace(batch, rows=[row.copy() for row in batch.rows]) for batch in ahead]
            finally:
                self._pauses -= 1
                self._changed.notify_all()

    def restore(self, steps: Sequence[SampledStep]) -> None:
        """Continues the responses of these steps, which earlier engines have begun. Call it before the first `take`."""
        for batch in steps:
            self._sampler.load_state_dict(batch.place)
            self._under_way.append(batch)
            self._next_step = batch.step + 1
        self._move_finished()

    def close(self) -> None:
        """Ends the thread after its segment and discards unfinished responses."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _may_begin(self) -> bool:
        """Whether there is a next step of which some responses may start."""
        return self._next_step <= self._last_step and self._share(self._next_step) > 0

    def _share(self, step: int) -> float:
        """The share of a step's prompts whose responses would be fresh enough when that step learns from them. 1 or
        more is all, 0 or less is none."""
        learned = self._collector.engines.version - self._first_version
        return self._first_step + learned + 1 + self._max_staleness - step

    def _active(self) -> list[Trajectory]:
        """Unfinished responses that may continue, or start."""
        return [row for batch in self._under_way for row in self._started(batch) if not row.done]

    def _started(self, batch: SampledStep) -> list[Trajectory]:
        samples = self._collector.config.rollout.samples_per_prompt
        prompts = self._share(batch.step) * len(batch.rows) / samples
        return batch.rows[: max(0, int(prompts + ROUNDING)) * samples]

    def _run(self) -> None:
        try:
            while self._enter():
                try:
                    self._work()
                finally:
                    self._leave()
        except Exception as error:  # noqa: BLE001 - raised where the experience is taken
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _enter(self) -> bool:
        """Waits for work; False if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (not self._pauses and (self._active() or self._may_begin())))
            self._at_work = not self._closed
            return self._at_work

    def _leave(self) -> None:
        with self._changed:
            self._at_work = False
            self._move_finished()
            self._changed.notify_all()

    def _move_finished(self) -> None:
        while self._under_way and all(row.done for row in self._under_way[0].rows):
            self._pace.ends(self._under_way[0].step)
            self._finished.append(self._under_way.popleft())

    def _work(self) -> None:
        """Starts responses for every step that may start, then extends all unfinished responses by a segment."""
        while self._may_begin():
            prompts = self._collector.draw()
            place = self._sampler.state_dict()
            rows = self._collector.begin(prompts, self._next_step, first_row=0)
            self._under_way.append(SampledStep(self._next_step, prompts, rows, place))
            self._pace.begins(self._next_step)
            self._next_step += 1
        active = self._active()
        if active:
            self._collector.conversations.advance(active, self._segment)
