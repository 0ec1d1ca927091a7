"""The sync from an actor on one GPU to an engine on another, its parts, and the bandwidth of the link.

The link is measured between the same two processes: plain broadcasts of as many bytes, in the process group that the
weights take. Without GPUs all this goes over gloo.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.common import synchronize, timed
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.roles.actor import ActorWorker
from trainer.roles.rollout import RolloutWorker
from trainer.rollout.engines import Engines
from trainer.weights.buckets import BucketLayout
from trainer.weights.channel import WeightChannel


class Timed:
    """A mixin for workers: times their methods in the worker's process, without Ray."""

    _channel: WeightChannel | None

    def timed(self, method: str, *arguments: Any) -> tuple[Any, float]:
        """The result of the method and its seconds."""
        begin = time.perf_counter()
        result = getattr(self, method)(*arguments)
        synchronize()
        return result, time.perf_counter() - begin

    def link_seconds(self, nbytes: int, repeats: int) -> float:
        """Median seconds of a plain broadcast of this many bytes, after one warm-up; both ends call it."""
        assert self._channel is not None
        assert self._channel._group is not None
        data = torch.ones(nbytes, dtype=torch.uint8, device=self._channel._device)
        times = []
        for _ in range(repeats + 1):
            synchronize()
            begin = time.perf_counter()
            self._channel._group.broadcast([data], dist.BroadcastOptions()).wait()
            synchronize()
            times.append(time.perf_counter() - begin)
        return median(times[1:])


class TimedActor(Timed, ActorWorker):
    def settle(self) -> None:
        """Waits until the sent weights are copied to CPU; training has time for that between two steps."""
        for _, copies in self._kept:
            copies.take()

    def link_within(self, kind: str, nbytes: int, repeats: int) -> float:
        """Median seconds in which every rank of the actor has this many bytes, after two warm-ups.

        `broadcast`: the first rank had them all before; `all_gather`: each rank had its part.
        """
        data = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        part = data[: nbytes // self.place.world_size].clone()
        times = []
        for _ in range(repeats + 2):
            dist.barrier()
            synchronize()
            begin = time.perf_counter()
            if kind == "broadcast":
                dist.broadcast(data, src=0)
            else:
                dist.all_gather_into_tensor(data[: len(part) * self.place.world_size], part)
            synchronize()
            times.append(time.perf_counter() - begin)
        return median(times[2:])


class TimedRollout(Timed, RolloutWorker):
    """An engine whose calls are timed."""


def measure(
    actor: WorkerGroup[TimedActor], rollout: WorkerGroup[TimedRollout], config: Config, repeats: int
) -> dict[str, Any]:
    """Median seconds of a sync and its parts after one warm-up, and their ratio to bytes over bandwidth."""
    engines = Engines(rollout, actor, config, on_shared_gpus=False)
    first = timed(engines.start)
    nbytes = int(engines.sync_weights()["rollout/synced_bytes"])

    sending = actor.start_one(0, Timed.link_seconds, nbytes, repeats)
    link = min(actor.wait([sending, rollout.start_one(0, Timed.link_seconds, nbytes, repeats)]))
    whole = []
    for _ in range(repeats):
        actor.call(TimedActor.settle)
        whole.append(timed(engines.sync_weights))
    layouts = engines._transfer._layouts
    parts = [_parts(actor, rollout, layouts) for _ in range(repeats)]
    medians = {name: median(part[name] for part in parts) for name in parts[0]}
    sync = median(whole)
    return {
        "way": engines.transport[0],
        "bytes": nbytes,
        "first_seconds": round(first, 3),
        "sync_seconds": round(sync, 4),
        "parts": {name: round(seconds, 4) for name, seconds in medians.items()},
        "link_gb_per_second": round(nbytes / link / 1e9, 1),
        "bytes_over_bandwidth_seconds": round(link, 4),
        "pack_and_send_ratio": round(medians["pack_and_send"] / link, 2),
        "receive_and_load_ratio": round(medians["receive_and_load"] / link, 2),
        "sync_ratio": round(sync / link, 2),
    }


def measure_latecomer(actor: WorkerGroup[TimedActor], rollout: WorkerGroup[TimedRollout]) -> dict[str, Any]:
    """Seconds until an engine has the last broadcast weights from the actor's copy, like a restarted engine."""
    begin = time.perf_counter()
    (weights,) = actor.call(TimedActor.publish_sent_weights)
    published = time.perf_counter()
    rollout.call(TimedRollout.replace_weights, weights)
    return {
        "way": "from the actor's copy",
        "publish_seconds": round(published - begin, 3),
        "replace_seconds": round(time.perf_counter() - published, 3),
    }


def _parts(
    actor: WorkerGroup[TimedActor], rollout: WorkerGroup[TimedRollout], layouts: Sequence[BucketLayout]
) -> dict[str, float]:
    """Seconds of each part of one sync; the engine receives while the actor sends."""
    actor.call(TimedActor.settle)
    begin = time.perf_counter()
    sending = [actor.start_one(rank, Timed.timed, "send_weights") for rank in range(len(actor))]
    receiving = rollout.start_one(0, Timed.timed, "receive_weights", layouts)
    (_, send), *_, (_, receive) = actor.wait([*sending, receiving])
    rest = time.perf_counter() - begin - max(send, receive)
    return {"pack_and_send": send, "receive_and_load": receive, "rest": rest}
