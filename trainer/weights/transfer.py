"""Transports of the actor's weights to the engines. Each engine compares checksums of what it received."""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Protocol

from ray import ObjectRef

from trainer.cluster.calls import Call, outcomes, task
from trainer.cluster.nodes import Slot
from trainer.cluster.workers import WorkerGroup
from trainer.errors import ConfigError, WorkerError
from trainer.weights.buckets import BucketLayout, SharedPart

logger = logging.getLogger(__name__)


class WeightSender(Protocol):
    """A rank of the actor, as the controller calls it. Methods that gather weights are called on every rank."""

    def share_weights(self, begins: bool) -> SharedPart: ...
    def release_weights(self) -> None: ...
    def publish_weights(self) -> tuple[list[ObjectRef], int]: ...
    def open_channel(self, size: int) -> int: ...
    def join_channel(self, size: int) -> None: ...
    def weight_layouts(self) -> Sequence[BucketLayout]: ...
    def send_weights(self) -> None: ...
    def keep_weights(self) -> None: ...
    def publish_sent_weights(self) -> list[ObjectRef]: ...


class WeightReceiver(Protocol):
    """A rollout engine, as the controller calls it."""

    def copy_weights(self, part: SharedPart, begins: bool) -> None: ...
    def replace_weights(self, buckets: Sequence[ObjectRef]) -> None: ...
    def join_channel(self, address: str, port: int, rank: int, size: int) -> None: ...
    def receive_weights(self, layouts: Sequence[BucketLayout]) -> None: ...


class Transfer(Protocol):
    nbytes: int
    """Bytes that each engine received in the last push."""
    beside_sampling: bool
    """Whether engines may sample while `snapshot` runs."""

    def snapshot(self) -> None:
        """Takes a snapshot of the actor's current weights."""
        ...

    def push(self, ranks: Sequence[int]) -> dict[int, WorkerError]:
        """Sends the last snapshot to some engines and returns the failures by rank."""
        ...


class SharedGpus:
    """Every engine shares its GPU with an actor rank and copies from it there (CUDA IPC), some buckets at a time."""

    beside_sampling = False

    def __init__(self, actor: WorkerGroup[WeightSender], rollout: WorkerGroup[WeightReceiver]) -> None:
        self._actor = actor
        self._rollout = rollout
        self.nbytes = 0

    def snapshot(self) -> None:
        """Does nothing: the actor's weights do not change before the push."""

    def push(self, ranks: Sequence[int]) -> dict[int, WorkerError]:
        failures: dict[int, WorkerError] = {}
        self.nbytes, begins, ends = 0, True, False
        while not ends:
            parts = self._actor.call(WeightSender.share_weights, begins)
            ends = parts[0].ends
            self.nbytes += sum(bucket.layout.nbytes for bucket in parts[0].buckets)
            by_slot = {worker.spec.slot.rank: part for worker, part in zip(self._actor.workers, parts, strict=True)}
            copies = {
                rank: task(WeightReceiver.copy_weights, by_slot[self._rollout.workers[rank].spec.slot.rank], begins)
                for rank in ranks
                if rank not in failures
            }
            failures |= self._rollout.attempt(copies)[1]
            begins = False
        self._actor.call(WeightSender.release_weights)
        return failures


class ObjectStore:
    """Ray's object store. It keeps a snapshot until the next one, for engines that are restarted: one that is restarted
    while the next one is taken gets that."""

    beside_sampling = True

    def __init__(self, actor: WorkerGroup[WeightSender], rollout: WorkerGroup[WeightReceiver]) -> None:
        self._actor = actor
        self._rollout = rollout
        self._weights: list[ObjectRef] = []
        self._taking = Lock()
        self.nbytes = 0

    def snapshot(self) -> None:
        with self._taking:
            self._weights = []  # frees the old ones first
            self._weights, self.nbytes = self._actor.call(WeightSender.publish_weights)[0]

    def push(self, ranks: Sequence[int]) -> dict[int, WorkerError]:
        with self._taking:
            weights = self._weights
        return self._rollout.attempt(dict.fromkeys(ranks, task(WeightReceiver.replace_weights, weights)))[1]


class Broadcast:
    """Broadcasts from the actor's first rank to all engines in a separate process group.

    If an engine dies, those that the broadcast did not reach, and restarted engines, get the same weights through the
    object store from a CPU copy that the actor keeps. The next push forms a new process group.

    The first rank sends each bucket while all ranks gather the next one. An engine that is waited for holds up the
    gathering, for at most half of the workers' timeout.
    """

    beside_sampling = False

    def __init__(self, actor: WorkerGroup[WeightSender], rollout: WorkerGroup[WeightReceiver]) -> None:
        self._actor = actor
        self._rollout = rollout
        self._layouts: Sequence[BucketLayout] = ()
        self._formed = False
        self._sent = True
        self.nbytes = 0

    def snapshot(self) -> None:
        if not self._layouts:
            self._layouts = self._actor.call(WeightSender.weight_layouts)[0]
            self.nbytes = sum(layout.nbytes for layout in self._layouts)
        self._sent = False

    def push(self, ranks: Sequence[int]) -> dict[int, WorkerError]:
        missed = list(ranks)
        if self._sent:
            self._formed = False  # only restarted engines are pushed to again
        else:
            self._sent = True
            missed = self._send()
        if not missed:
            return {}
        weights = self._actor.call_one(0, WeightSender.publish_sent_weights)
        return self._rollout.attempt(dict.fromkeys(missed, task(WeightReceiver.replace_weights, weights)))[1]

    def _send(self) -> list[int]:
        """Sends to all engines and returns the ranks that were not reached."""
        everyone = range(len(self._rollout))
        self._formed = self._formed or self._form()
        if not self._formed:
            self._actor.call(WeightSender.keep_weights)
            return list(everyone)
        sending = [self._actor.start_one(rank, WeightSender.send_weights) for rank in range(len(self._actor))]
        receive = task(WeightReceiver.receive_weights, self._layouts)
        failures = self._rollout.attempt(dict.fromkeys(everyone, receive))[1]
        self._formed = self._went_well(sending, failures)
        # Not waited for: it ends with the copies to CPU, beside the engines' work. Later calls of the actor follow it.
        self._actor.start_one(0, WeightSender.release_weights)
        return list(failures)

    def _form(self) -> bool:
        """Forms the process group. True if all engines joined."""
        size = len(self._rollout) + 1
        port = self._actor.call_one(0, WeightSender.open_channel, size)
        address = self._actor.workers[0].spec.slot.node.address
        joining = self._actor.start_one(0, WeightSender.join_channel, size)
        joins = {
            rank: task(WeightReceiver.join_channel, address, port, rank + 1, size) for rank in range(len(self._rollout))
        }
        return self._went_well([joining], self._rollout.attempt(joins)[1])

    def _went_well(self, calls: Sequence[Call[None]], failures: Mapping[int, WorkerError]) -> bool:
        """Whether the actor's and the engines' calls succeeded. Logs a failure, because the fallback is slower."""
        ends = [outcome for _, outcome in outcomes(calls, self._actor.timeout)]
        failed = [*failures.values(), *(outcome for outcome in ends if isinstance(outcome, WorkerError))]
        if failed:
            logger.warning(
                "engines that the broadcast did not reach get the weights through Ray's object store: %s",
                failed[0],
            )
        return not failed


TRANSPORTS: Mapping[str, Callable[[WorkerGroup[WeightSender], WorkerGroup[WeightReceiver]], Transfer]] = {
    "CUDA IPC": SharedGpus,
    "NCCL": Broadcast,
    "gloo": Broadcast,
    "Ray's object store": ObjectStore,
}


def choose_transport(
    setting: str, actor: Sequence[Slot], engines: Sequence[Slot], on_shared_gpus: bool, deterministic: bool = False
) -> tuple[str, str]:
    """The transport for this run, a key of TRANSPORTS, and the reason. `setting` is `rollout.weight_transfer`.

    Raises ConfigError for an impossible broadcast.
    """
    if on_shared_gpus:
        return "CUDA IPC", "engines and actor share GPUs"
    if setting == "object_store":
        return "Ray's object store", "rollout.weight_transfer=object_store"
    if engines[0].device == "cpu":
        broadcast = setting == "broadcast"
        return ("gloo", "rollout.weight_transfer=broadcast") if broadcast else ("Ray's object store", "there is no GPU")
    if deterministic:
        return "Ray's object store", "with trainer.deterministic, vLLM sets NCCL up in another way than the actor"
    peers = [actor[0].rank, *(slot.rank for slot in engines)]
    if len(set(peers)) == len(peers):
        return "NCCL", "every engine and the actor's first rank have their own GPU"
    if setting == "broadcast":
        raise ConfigError(
            "rollout.weight_transfer=broadcast: some engines share a GPU with each other or with the actor's first "
            "rank, which NCCL refuses",
            hint="set rollout.weight_transfer=auto, or change device_mapping.rollout and rollout.engines_per_gpu",
        )
    return "Ray's object store", "some engines share a GPU, which NCCL refuses"
