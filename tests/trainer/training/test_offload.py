"""Tensors that lie elsewhere until they are needed."""

import torch

from trainer.training.offload import Offload


def held_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_contents_are_there_while_they_are_needed_and_take_no_memory_between() -> None:
    weight = torch.arange(6.0)
    view = weight[2:]
    offload = Offload(lambda: [weight])
    assert held_bytes(weight) == 0
    with offload.needed(written=False):
        assert view.tolist() == [2, 3, 4, 5]
        with offload.needed(written=False):
            pass
        assert held_bytes(weight) == 24  # the outer one still needs it
    assert held_bytes(weight) == 0


def test_what_is_written_stays_and_what_was_only_to_be_read_is_as_it_was() -> None:
    weight = torch.zeros(3)
    offload = Offload(lambda: [weight])
    with offload.needed(written=False), offload.needed(written=True):
        weight += 1
    with offload.needed(written=False):
        weight += 1  # against what was announced: nobody copies it back
    with offload.needed(written=False):
        assert weight.tolist() == [1, 1, 1]


def test_tensors_that_were_made_within_are_kept_even_where_nothing_was_written() -> None:
    states: list[torch.Tensor] = []
    offload = Offload(lambda: states)
    with offload.needed(written=False):
        states.append(torch.ones(2))
    assert held_bytes(states[0]) == 0
    with offload.needed(written=False):
        assert states[0].tolist() == [1, 1]
