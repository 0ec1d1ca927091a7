"""Checks that an engine's weights are the ones that were sent."""

from collections.abc import Iterable

from trainer.errors import WorkerError
from trainer.weights.buckets import Bucket, SentBucket

_HINT = "the engine would not sample from the trained policy; report this with the versions of torch and of the engine"


def checked(sent: SentBucket) -> Bucket:
    """Opens a bucket. Raises WorkerError if its contents changed since it was packed."""
    bucket = sent.open()
    check_arrived(int(bucket.sum), int(bucket.packed_sum))
    return bucket


def check_arrived(arrived: int, packed: int) -> None:
    """Raises WorkerError if the checksum of a bucket is not the one it was packed with."""
    if arrived != packed:
        raise WorkerError(f"weights changed on the way: their checksum is {arrived}, not {packed}", hint=_HINT)


def check_in_place(inside: int, given: int) -> None:
    """Raises WorkerError if the weights inside an engine do not have the checksum of those it received."""
    if inside != given:
        raise WorkerError(f"the weights inside the engine have the checksum {inside}, not {given}", hint=_HINT)


def check_count(copied: int, given: int) -> None:
    """Raises WorkerError unless a shard copied from each of the matrices that it received."""
    if copied != given:
        raise WorkerError(f"the engine copied from {copied} adapter matrices, not from {given}", hint=_HINT)


def check_complete(names: Iterable[str], arrived: set[str]) -> None:
    """Raises WorkerError if the engine has a weight that was not sent."""
    if missing := [name for name in names if name not in arrived]:
        raise WorkerError(f"{len(missing)} weights were not sent, the first is {missing[0]}", hint=_HINT)
