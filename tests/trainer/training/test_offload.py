"""Offloaded tensors."""

import torch

from trainer.training.memory.offload import Offload


def held_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_contents_are_present_while_needed_and_take_no_memory_otherwise() -> None:
    weight = torch.arange(6.0)
    view = weight[2:]
    offload = Offload(lambda: [weight])
    assert held_bytes(weight) == 0
    with offload.needed(written=False):
        assert view.tolist() == [2, 3, 4, 5]
        with offload.needed(written=False):
            pass
        assert held_bytes(weight) == 24  # the outer block still needs it
    assert held_bytes(weight) == 0


def test_writes_are_kept_only_if_announced() -> None:
    weight = torch.zeros(3)
    offload = Offload(lambda: [weight])
    with offload.needed(written=False), offload.needed(written=True):
        weight += 1
    with offload.needed(written=False):
        weight += 1  # not announced, so it is not copied back
    with offload.needed(written=False):
        assert weight.tolist() == [1, 1, 1]


def test_tensors_created_while_needed_are_kept_without_a_write() -> None:
    states: list[torch.Tensor] = []
    offload = Offload(lambda: states)
    with offload.needed(written=False):
        states.append(torch.ones(2))
    assert held_bytes(states[0]) == 0
    with offload.needed(written=False):
        assert states[0].tolist() == [1, 1]
