"""Batches of prompts; the next one is read while the current one is used."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.data.dataset import Dataset, Prompt, PromptSampler


class Prefetcher:
    """Reads one batch ahead of a sampler. The sampler's state is the same as without reading ahead.

    Only one thread reads the dataset at a time.
    """

    def __init__(self, dataset: Dataset, sampler: PromptSampler) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._ahead: tuple[Sequence[int], Future[list[Prompt]]] | None = None

    def next_batch(self) -> list[Prompt]:
        """The prompts that the sampler draws next. Raises the errors of reading them."""
        wanted = self._sampler.next_batch()
        if self._ahead is None or self._ahead[0] != wanted:  # at the start, and after the sampler's state was loaded
            self._read(wanted)
        assert self._ahead is not None
        prompts = self._ahead[1].result()
        self._read(self._sampler.peek())
        return prompts

    def _read(self, indices: Sequence[int]) -> None:
        self._ahead = indices, self._thread.submit(lambda: [self._dataset[index] for index in indices])
