"""Why calls to workers do not end: which rank stands where, and which ranks wait for it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ray import ObjectRef

from trainer.cluster.stalls.stacks import Frame, Standing

# Frames below these belong to Ray, or to the loop of a process that a worker has started.
_ENTRIES = (
    ("cluster/workers.py", "call"),
    ("cluster/workers.py", "start"),
    ("processes/process.py", "_guarded"),
    ("processes/process.py", "_together"),
)
# Lines of an explanation in the log; the page has all.
LINES = 10


@dataclass(frozen=True)
class Asked:
    """A worker that was asked to do something: its name, its node's id and address, the method, and its probe."""

    worker: str
    node_id: str
    method: str
    probe: ObjectRef | None
    address: str = ""


@dataclass(frozen=True)
class Explanation:
    """`culprits` are the workers that others wait for; `lines` say it all, the culprits first."""

    culprits: tuple[Asked, ...]
    lines: tuple[str, ...]


def explain(found: Mapping[Asked, Standing], ended: Sequence[Asked] = ()) -> Explanation:
    """A line per worker that does not wait in a collective or is behind in one, then a line per collective with the
    workers in it. `ended` are the workers whose calls have ended while these still run."""
    waiting = [one for one in found if _collective(found[one]) is not None]
    late = _behind({one: found[one] for one in waiting})
    others = [one for one in found if one not in waiting]
    culprits = others or list(late)
    lines = [f"{one.worker} {place(found[one])}" for one in others]
    lines += [f"{one.worker} {place(found[one])}; {late[one]}" for one in late]
    places: dict[str, list[Asked]] = {}
    for one in waiting:
        if one not in late:
            places.setdefault(place(found[one]), []).append(one)
    for where, own in places.items():
        names = own[0].worker if len(own) == 1 else f"{own[0].worker}, and {len(own) - 1} more:"
        lines.append(f"{names} {where}" + (f", for {culprits[0].worker}" if len(culprits) == 1 else ""))
    if waiting and not culprits:
        absent = _absent({one: found[one] for one in waiting}, ended)
        lines = [f"{one.worker} has ended its call, but others wait for it" for one in absent] + lines
        culprits = absent
        if not absent:
            lines.append("all ranks wait in the same collective: look at the network between them")
    return Explanation(tuple(culprits), tuple(lines))


def place(standing: Standing) -> str:
    """Where a worker stands, as the rest of a sentence."""
    if standing.problem:
        return standing.problem
    frames = own_frames(standing)
    if not frames:
        return "has nothing to do"
    frame = _collective(standing)
    working = [(pid, child) for pid, child in standing.children if child.problem or own_frames(child)]
    if working and frame is None:
        return f"waits for its process {working[0][0]}, which {place(working[0][1])}"
    return position(frames, standing.busy, frame)


def position(frames: Sequence[Frame], busy: bool = False, collective: Frame | None = None) -> str:
    """The frame in which a thread waits or computes, with the caller that is the trainer's or the user's own, as the
    rest of a sentence."""
    verb = "waits in" if collective is not None or not busy else "computes in"
    inner = collective or frames[0]
    caller = next((one for one in frames if _is_own(one) and one != inner), None)
    return f"{verb} {inner}" + (f", called by {caller}" if caller else "")


def _is_own(frame: Frame) -> bool:
    """Whether it is the trainer's or the user's code, and of no library."""
    return "/trainer/" in frame.file or not re.search(r"/python3\.|/site-packages/|/torch/|^<", frame.file)


def own_frames(standing: Standing) -> tuple[Frame, ...]:
    """The frames of the thread that does what the worker was asked for, without those of the loop below."""
    for frames in standing.threads:
        for at, frame in enumerate(frames):
            if any(frame.file.endswith(file) and frame.function == function for file, function in _ENTRIES):
                return frames[:at]
    return ()


def _behind(waiting: Mapping[Asked, Standing]) -> dict[Asked, str]:
    """The workers that have begun fewer collectives of a process group than its other ranks."""
    groups: dict[tuple[str, str, int], dict[Asked, int]] = {}
    for one, standing in waiting.items():
        for group in standing.groups:
            role = one.worker.partition(" rank ")[0]
            groups.setdefault((role, group.name, group.size), {})[one] = group.begun
    found: dict[Asked, str] = {}
    for begun in groups.values():
        most = max(begun.values())
        for one, count in begun.items():
            if count < most:
                found[one] = f"this is its collective {count} in the process group, the others are in {most}"
    return found


def _absent(waiting: Mapping[Asked, Standing], ended: Sequence[Asked]) -> list[Asked]:
    """The workers whose calls have ended, of the largest process group in which these wait."""
    one, standing = next(iter(waiting.items()))
    group = max(standing.groups, key=lambda group: group.size, default=None)
    if group is None:
        return []
    here = {own.rank for other in waiting.values() for own in other.groups if own.name == group.name}
    role = one.worker.partition(" rank ")[0]
    names = [f"{role} rank {rank} " for rank in range(group.size) if rank not in here]
    return [other for other in ended if other.worker.startswith(tuple(names))]


def _collective(standing: Standing) -> Frame | None:
    """The collective in which any thread waits: the backward pass has a thread of its own on GPUs."""
    return next(filter(None, (_torch_distributed(frames) for frames in standing.threads)), None)


def _torch_distributed(frames: Sequence[Frame]) -> Frame | None:
    """The function of torch.distributed that was called, if the innermost frames are its; its logging aside."""
    inside = list(takewhile(lambda frame: "/torch/distributed/" in frame.file, frames))
    return next((frame for frame in reversed(inside) if not frame.file.endswith("c10d_logger.py")), None)
