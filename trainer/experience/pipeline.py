"""Collects the experience of a step right before the step, or one step ahead."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import Protocol

from trainer.data.dataset import PromptSampler
from trainer.experience.collector import Experience, Phase


class CollectsExperience(Protocol):
    def collect(self, step: int, phase: Phase) -> Experience: ...


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
        self._next: Future[Experience] | None = None
        self._place = sampler.state_dict()

    def take(self, step: int, last_step: int) -> Experience:
        """The experience of a step. With `ahead`, also starts to collect that of the next step, if there is one."""
        if self._next is None:
            experience = self._collector.collect(step, self._phase)
        else:
            with self._phase("generate"):
                experience = self._next.result()
            self._next = None
        self._place = self._sampler.state_dict()
        if self._thread is not None and step < last_step:
            # Phases measure how long the controller waits, and it does not wait here.
            self._next = self._thread.submit(self._collector.collect, step + 1, lambda _name: nullcontext())
        return experience

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Waits until no engine samples. A failure of the sampling is raised by the next `take`."""
        if self._next is not None:
            with self._phase("generate"):
                wait([self._next])
        yield

    def sampler_state(self) -> dict[str, int]:
        """The sampler's state after the last experience taken; a resumed run draws the unfinished prompts again."""
        return self._place if self._next is not None else self._sampler.state_dict()

    def close(self) -> None:
        """Waits for the collection that runs ahead and discards it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
