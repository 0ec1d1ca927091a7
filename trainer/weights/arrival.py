"""Whether an engine's weights are those that were sent."""

from collections.abc import Iterable

from trainer.errors import WorkerError
from trainer.weights.buckets import Bucket, SentBucket

_HINT = (
    "the engine would sample from another policy than the one that is trained; report this with the engine's version"
)


def checked(sent: SentBucket) -> Bucket:
    """The bucket, opened. Raises WorkerError if it does not hold what was packed into it."""
    bucket = sent.open()
    check_arrived(int(bucket.sum), int(bucket.packed_sum))
    return bucket


def check_arrived(found: int, packed: int) -> None:
    """Raises WorkerError if the words of a bucket do not sum to what they did when they were packed."""
    if found != packed:
        raise WorkerError(f"weights changed on the way: sum {found}, not {packed}", hint=_HINT)


def check_in_place(inside: int, given: int) -> None:
    """Raises WorkerError if what an engine computes with does not sum to what it was given."""
    if inside != given:
        raise WorkerError(f"the engine computes with weights that sum to {inside}, not to {given}", hint=_HINT)


def check_complete(names: Iterable[str], arrived: set[str]) -> None:
    """Raises WorkerError if a weight of the engine's was not among those sent."""
    if missing := [name for name in names if name not in arrived]:
        raise WorkerError(f"{len(missing)} weights were not sent, the first is {missing[0]}", hint=_HINT)
