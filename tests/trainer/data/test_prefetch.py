"""Reading ahead changes only when prompts are read."""

import threading

import pytest

from trainer.data.batches.prefetch import Prefetcher
from trainer.data.dataset import Prompt, PromptSampler


class Numbers:
    """Ten prompts; records which ones were read, and can fail."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.broken = -1
        self.done = threading.Event()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Prompt:
        self.read.append(index)
        if index == self.broken:
            raise ValueError(f"row {index} is damaged")
        if len(self.read) == 6:
            self.done.set()
        return Prompt(index, (index,), "", "", "")


def sampler() -> PromptSampler:
    return PromptSampler(10, 3, shuffle=True, seed=0)


def test_the_next_batch_is_read_ahead() -> None:
    plain, numbers, prefetched = sampler(), Numbers(), sampler()
    prefetcher = Prefetcher(numbers, prefetched)
    first = [prompt.index for prompt in prefetcher.next_batch()]
    assert numbers.done.wait(10)
    assert first == plain.next_batch()
    assert (
        prefetched.state_dict() == plain.state_dict()
    )  # a checkpoint taken now draws the batch that is read ahead again
    assert numbers.read == [*first, *plain.peek()]
    for _ in range(9):  # over the ends of epochs
        assert [prompt.index for prompt in prefetcher.next_batch()] == plain.next_batch()


def test_a_restored_sampler_draws_the_same_prompts() -> None:
    plain, prefetched = sampler(), sampler()
    prefetcher = Prefetcher(Numbers(), prefetched)
    prefetcher.next_batch()
    state = {"epoch": 2, "position": 4, "size": 10, "seed": 0}
    prefetched.load_state_dict(state)
    plain.load_state_dict(state)
    assert [prompt.index for prompt in prefetcher.next_batch()] == plain.next_batch()


def test_an_error_is_raised_where_the_batch_is_taken() -> None:
    numbers, plain = Numbers(), sampler()
    prefetcher = Prefetcher(numbers, sampler())
    plain.next_batch()
    numbers.broken = plain.next_batch()[1]
    prefetcher.next_batch()
    with pytest.raises(ValueError, match="is damaged"):
        prefetcher.next_batch()
