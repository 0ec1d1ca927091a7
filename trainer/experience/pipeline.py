"""Collects the experience of a step right before the step, or one step ahead."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from trainer.data.dataset import PromptSampler, SamplerState
from trainer.experience.collector import Experience, Phase, completed
from trainer.experience.sampled_ahead import SampledStep


class CollectsExperience(Protocol):
    def collect(self, step: int, phase: Phase) -> Experience: ...


@dataclass(frozen=True)
class _Collected:
    """The experience of a step, and the sampler's state after its prompts."""

    step: int
    experience: Experience
    place: SamplerState


class Pipeline:
    """Returns the experience of each step, in order.

    With `ahead`, engines sample for the next step while actor and critic learn from this one, so the sampling policy
    is one update older than the learning one. New weights wait until the engines are done (`paused`).
    """

    def __init__(self, collector: CollectsExperience, sampler: PromptSampler, phase: Phase, ahead: bool) -> None:
        self._collector = collector
        self._sampler = sampler
        self._phase = phase
        self._thread = ThreadPoolExecutor(1, "collect") if ahead else None
        self._next: Future[_Collected] | None = None
        self._taken: _Collected | None = None

    def take(self, step: int, last_step: int) -> Experience:
        """The experience of a step. With `ahead`, also starts to collect that of the next step, if there is one.

        A step that is taken again gets the same experience.
        """
        if self._taken is not None and self._taken.step == step:
            return self._taken.experience
        if self._next is None:
            self._taken = self._collect(step, self._phase)
        else:
            with self._phase("generate"):
                self._taken = self._next.result()
            self._next = None
        if self._thread is not None and step < last_step:
            # Phases measure how long the controller waits, and it does not wait here.
            self._next = self._thread.submit(self._collect, step + 1, lambda _name: nullcontext())
        return self._taken.experience

    def _collect(self, step: int, phase: Phase) -> _Collected:
        return _Collected(step, self._collector.collect(step, phase), self._sampler.state_dict())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Waits until no engine samples. A failure of the sampling is raised by the next `take`."""
        if self._next is not None:
            with self._phase("generate"):
                wait([self._next])
        yield

    def sampler_state(self) -> SamplerState:
        """The sampler's state after the last experience taken; a resumed run draws the unfinished prompts again."""
        return self._taken.place if self._taken else self._sampler.state_dict()

    def sampled_ahead(self, step: int) -> list[SampledStep]:
        """The experience of the step after this one, if it is there. It needs its scores, so this waits for them.

        Nothing else: the weights of a checkpoint after this step are those that sample the steps after the next, and
        without `ahead` the next one too.
        """
        done = self._next.result() if self._next and self._next.done() and not self._next.exception() else None
        ahead = [
            collected for collected in (self._taken, done) if collected and collected.step == step + 1 and self._thread
        ]
        return [
            SampledStep(
                collected.step,
                collected.experience.prompts,
                collected.experience.responses,
                collected.place,
                scores.result(),
            )
            for collected in ahead
            if not (scores := collected.experience.scores).exception()  # the run ends with it at its step
        ]

    def restore(self, steps: Sequence[SampledStep]) -> None:
        """Continues after these steps, which earlier engines have sampled."""
        for sampled in steps:
            assert sampled.scores is not None
            self._sampler.load_state_dict(sampled.place)
            self._next = Future()
            self._next.set_result(
                _Collected(
                    sampled.step, Experience(sampled.prompts, sampled.rows, completed(sampled.scores)), sampled.place
                )
            )

    def close(self) -> None:
        """Waits for the collection that runs ahead and discards it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
