"""Why calls to workers do not end: which rank stands where, and which ranks wait for it."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.cluster.stacks import Frame, StackFile, Standing, read_standing

logger = logging.getLogger(__name__)

# A call stalls if it takes this long and, if there was such a call before, this many times as long as the longest.
SECONDS, TIMES = 60.0, 3.0
# The share of its time limit after which the first call of a kind stalls: it may load or compile.
SHARE_AT_FIRST = 0.5
# Seconds for all nodes to say where their workers stand.
PATIENCE = 15.0
# Frames below this one belong to Ray.
_CALL = ("workers.py", "call")


@dataclass(frozen=True)
class Asked:
    """A worker that was asked to do something: its name and node, the method, and where its stacks can be read."""

    worker: str
    node_id: str
    method: str
    stack_file: ObjectRef


class Patience:
    """Learns how long calls take."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}

    def seconds(self, kind: str, limit: float) -> float:
        """After how many seconds a call of this kind, with a time limit, is taken for stalled."""
        longest = self._longest.get(kind)
        return max(SECONDS, SHARE_AT_FIRST * limit if longest is None else TIMES * longest)

    def learn(self, kind: str, seconds: float) -> None:
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))


class _Reader:
    """A Ray actor that reads the stacks of its node."""

    def read(self, *files: StackFile) -> list[Standing]:
        return [read_standing(file) for file in files]


def report(asked: Sequence[Asked], seconds: float) -> None:
    """Logs why these calls, the unfinished ones of a group, have not ended for so long."""
    logger.warning("no progress in %s for %.0f s:", asked[0].method, seconds)
    for line in explain(standings(asked)):
        logger.warning("  %s", line)


def explain(found: Mapping[Asked, Standing]) -> list[str]:
    """A line per worker that does not wait in a collective, then one per collective with the workers in it."""
    waiting = [one for one in found if _collective(found[one]) is not None]
    others = [one for one in found if one not in waiting]
    lines = [f"{one.worker} {place(found[one])}" for one in others]
    places: dict[str, list[Asked]] = {}
    for one in waiting:
        places.setdefault(place(found[one]), []).append(one)
    for where, own in places.items():
        names = own[0].worker if len(own) == 1 else f"{own[0].worker}, and {len(own) - 1} more:"
        lines.append(f"{names} {where}" + (f", for {others[0].worker}" if len(others) == 1 else ""))
    return lines


def standings(asked: Sequence[Asked]) -> dict[Asked, Standing]:
    """Where each worker stands. Nodes are asked side by side; one that does not answer says so."""
    by_node: dict[str, list[Asked]] = {}
    for one in asked:
        by_node.setdefault(one.node_id, []).append(one)
    readers = {node: _reader(node) for node in by_node}
    answers = {node: readers[node].read.remote(*(one.stack_file for one in own)) for node, own in by_node.items()}
    deadline = time.monotonic() + PATIENCE
    found: dict[Asked, Standing] = {}
    for node, own in by_node.items():
        try:
            read = ray.get(answers[node], timeout=max(0.0, deadline - time.monotonic()))
        except RayError:
            read = [Standing("is on a node that does not answer")] * len(own)
        found |= dict(zip(own, read, strict=True))
    for reader in readers.values():
        ray.kill(reader)
    return found


def _reader(node_id: str) -> ray.actor.ActorHandle:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_Reader).options(num_cpus=0, scheduling_strategy=here).remote()


def place(standing: Standing) -> str:
    """Where a worker stands, as the rest of a sentence."""
    if standing.problem:
        return standing.problem
    frames = _own(standing)
    if not frames:
        return "has nothing to do"
    frame = _collective(standing)
    verb = "waits in" if frame is not None or not standing.busy else "computes in"
    inner = frame or frames[0]
    caller = next((one for one in frames if "/trainer/" in one.file and one != inner), None)
    return f"{verb} {inner}" + (f", called by {caller}" if caller else "")


def _own(standing: Standing) -> tuple[Frame, ...]:
    """The frames of the thread that does what the worker was asked for, without Ray's."""
    for frames in standing.threads:
        for at, frame in enumerate(frames):
            if frame.file.endswith(f"cluster/{_CALL[0]}") and frame.function == _CALL[1]:
                return frames[:at]
    return ()


def _collective(standing: Standing) -> Frame | None:
    """The collective in which any thread waits: the backward pass has a thread of its own on GPUs."""
    return next(filter(None, (_torch_distributed(frames) for frames in standing.threads)), None)


def _torch_distributed(frames: Sequence[Frame]) -> Frame | None:
    """The function of torch.distributed that was called, if the innermost frames are its; its logging aside."""
    inside = list(takewhile(lambda frame: "/torch/distributed/" in frame.file, frames))
    return next((frame for frame in reversed(inside) if not frame.file.endswith("c10d_logger.py")), None)
