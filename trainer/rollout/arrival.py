"""Whether an engine's weights are those that were sent."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from trainer.errors import EngineError
from trainer.training.weights import checksum

_HINT = (
    "the engine would sample from another policy than the one that is trained; report this with the engine's version"
)


class Bucket(Protocol):
    """Some weights and the sum that they were sent with."""

    @property
    def checksum(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class TravelledBucket(Bucket, Protocol):
    """Some weights that came from another process, as `trainer.training.weights.WeightBucket` is one."""

    def arrived_sum(self) -> int: ...


def checked(bucket: TravelledBucket) -> TravelledBucket:
    """The bucket itself. Raises EngineError if it does not hold what was put into it."""
    if (found := bucket.arrived_sum()) != bucket.checksum:
        raise EngineError(f"weights changed on the way: sum {found}, not {bucket.checksum}", hint=_HINT)
    return bucket


def check_copied(weights: Iterable[Tensor], sent: int) -> None:
    """Raises EngineError if weights that were copied do not sum to those that were sent."""
    if (found := checksum(list(weights))) != sent:
        raise EngineError(f"the engine's weights sum to {found}, those sent to {sent}", hint=_HINT)


def check_in_place(inside: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Raises EngineError if what an engine computes with does not sum to what it was given."""
    found, wanted = checksum(inside), checksum(given)
    if found != wanted:
        raise EngineError(f"the engine computes with adapters that sum to {found}, not to {wanted}", hint=_HINT)


def check_complete(names: Iterable[str], arrived: set[str]) -> None:
    """Raises EngineError if a weight of the engine's was not among those sent."""
    if missing := [name for name in names if name not in arrived]:
        raise EngineError(f"{len(missing)} weights were not sent, the first is {missing[0]}", hint=_HINT)
