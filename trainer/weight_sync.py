"""How the actor's weights get to the engines; each engine sums up what it got and compares."""

from collections.abc import Sequence
from typing import Protocol

from ray import ObjectRef

from trainer.cluster import WorkerGroup, outcomes
from trainer.errors import EngineError


class Transfer(Protocol):
    nbytes: int
    """How much each engine got the last time."""

    def fetch(self) -> None:
        """Takes the actor's weights as they are now."""
        ...

    def give(self, ranks: Sequence[int]) -> dict[int, EngineError]:
        """Gives the weights that were fetched last to some engines; the failures, by rank."""
        ...


class SharedGpus:
    """Every engine shares its GPU with an actor rank and copies from it there (CUDA IPC)."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        self._actor = actor
        self._rollout = rollout
        self.nbytes = 0

    def fetch(self) -> None:
        """Nothing to take: the actor does not change while engines sample."""

    def give(self, ranks: Sequence[int]) -> dict[int, EngineError]:
        shared = self._actor.call("share_weights")
        self.nbytes = sum(bucket.layout.nbytes for bucket in shared[0])
        per_rank = len(self._rollout) // len(self._actor)
        _, failures = self._rollout.attempt("copy_weights", {rank: (shared[rank // per_rank],) for rank in ranks})
        self._actor.call("release_weights")
        return failures


class ObjectStore:
    """Through Ray's object store, which keeps them until the next are fetched, for engines that are started anew."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        self._actor = actor
        self._rollout = rollout
        self._weights: list[ObjectRef] = []
        self.nbytes = 0

    def fetch(self) -> None:
        self._weights = []  # frees the old ones first
        self._weights, self.nbytes = self._actor.call("publish_weights")[0]

    def give(self, ranks: Sequence[int]) -> dict[int, EngineError]:
        return self._rollout.attempt("replace_weights", dict.fromkeys(ranks, (self._weights,)))[1]


class Broadcast:
    """From the actor's first rank to all engines at once, in a process group of their own.

    Engines that it did not reach, because one of them died, and engines that are started anew get the same weights
    through the object store: the actor keeps a copy on CPU. The process group is then formed again with the next.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup) -> None:
        self._actor = actor
        self._rollout = rollout
        self._formed = False
        self._sent = True
        self.nbytes = 0

    def fetch(self) -> None:
        self._announced = self._actor.call("pack_weights")[0]
        self.nbytes = sum(bucket.layout.nbytes for bucket in self._announced)
        self._sent = False

    def give(self, ranks: Sequence[int]) -> dict[int, EngineError]:
        missed = list(ranks)
        if self._sent:
            self._formed = False  # these are new ones
        else:
            self._sent = True
            missed = self._send()
        if not missed:
            return {}
        weights = self._actor.wait([self._actor.start_one(0, "publish_sent_weights")])[0]
        return self._rollout.attempt("replace_weights", dict.fromkeys(missed, (weights,)))[1]

    def _send(self) -> list[int]:
        """Sends to all engines; those that it did not reach."""
        self._formed = self._formed or self._form()
        everyone = range(len(self._rollout))
        if not self._formed:
            return list(everyone)
        sending = self._actor.start_one(0, "send_weights")
        failures = self._rollout.attempt("receive_weights", dict.fromkeys(everyone, (self._announced,)))[1]
        (sent,) = outcomes([sending], self._actor.timeout)
        self._formed = not failures and not isinstance(sent, EngineError)
        return list(failures)

    def _form(self) -> bool:
        """Makes the process group; whether all came."""
        size = len(self._rollout) + 1
        port = self._actor.wait([self._actor.start_one(0, "open_channel", size)])[0]
        address = self._actor.workers[0].recipe.slot.node.address
        joining = self._actor.start_one(0, "join_channel", size)
        places = {rank: (address, port, rank + 1, size) for rank in range(len(self._rollout))}
        failures = self._rollout.attempt("join_channel", places)[1]
        (joined,) = outcomes([joining], self._actor.timeout)
        return not failures and not isinstance(joined, EngineError)


def weight_transfer(setting: str, actor: WorkerGroup, rollout: WorkerGroup, on_shared_gpus: bool) -> Transfer:
    """The way for this run: shared GPUs if they are shared, else what `rollout.weight_transfer` says."""
    if on_shared_gpus:
        return SharedGpus(actor, rollout)
    return Broadcast(actor, rollout) if setting == "broadcast" else ObjectStore(actor, rollout)
