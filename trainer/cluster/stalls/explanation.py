"""Explains hung calls: what each rank is doing and who waits for it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ray import ObjectRef

from trainer.cluster.stalls.hosts import HostState
from trainer.cluster.stalls.network import cut_off
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
_NEEDED = "others wait for it"


@dataclass(frozen=True)
class Asked:
    """A call to a worker: its name, its node's id and address, the method, and its probe."""

    worker: str
    node_id: str
    method: str
    probe: ObjectRef | None
    address: str = ""


@dataclass(frozen=True)
class Explanation:
    """`culprits` are the workers that others wait for; `lines` explain the hang, the culprits first."""

    culprits: tuple[Asked, ...]
    lines: tuple[str, ...]


def explain(
    standings: Mapping[Asked, Standing],
    ended: Sequence[Asked] = (),
    hosts: Mapping[str, HostState | None] | None = None,
) -> Explanation:
    """A line per worker that does not wait in a collective or is behind in one, then a line per collective with the
    workers in it. `ended` are the workers whose calls have ended while these still run, `hosts` their nodes by address.

    If all wait, a node that others cannot reach comes first, then workers that are behind or have left, then the only
    node with a problem.
    """
    waiting = [call for call in standings if _collective(standings[call]) is not None]
    others = [call for call in standings if call not in waiting]
    states = {address: host for address, host in (hosts or {}).items() if host}
    cut = {} if others else cut_off({address: host.connections for address, host in states.items()})
    reasons = {call: cut[call.address] for call in waiting if call.address in cut}
    if not cut:
        reasons = _behind({call: standings[call] for call in waiting})
    left = [call for call in ended if call.address in cut]
    if waiting and not others and not reasons and not left:
        left = _absent({call: standings[call] for call in waiting}, ended)
    if waiting and not others and not reasons and not left:
        reasons = _beside_a_problem(waiting, states)
    culprits = others or [*reasons, *left]
    lines = [f"{call.worker} {place(standings[call])}" for call in others]
    lines += [
        f"{names} {reason}"
        for names, reason in _together(reasons, lambda call: f"{place(standings[call])}; {reasons[call]}")
    ]
    lines += [
        f"{names} {reason}"
        for names, reason in _together(left, lambda call: "has ended its call, but " + cut.get(call.address, _NEEDED))
    ]
    for names, where in _together(
        [call for call in waiting if call not in reasons], lambda call: place(standings[call])
    ):
        lines.append(f"{names} {where}" + (f", for {culprits[0].worker}" if len(culprits) == 1 else ""))
    if not culprits and waiting:
        lines.append("all ranks wait in the same collective: look at the network between them")
    return Explanation(tuple(culprits), tuple(lines))


def _together(workers: Iterable[Asked], sentence: Callable[[Asked], str]) -> Iterator[tuple[str, str]]:
    """Workers grouped by the predicate that `sentence` gives for them."""
    of_sentence: dict[str, list[str]] = {}
    for call in workers:
        of_sentence.setdefault(sentence(call), []).append(call.worker)
    for said, names in of_sentence.items():
        yield (names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} more:"), said


def _beside_a_problem(waiting: Sequence[Asked], states: Mapping[str, HostState]) -> dict[Asked, str]:
    """The workers on the only node with a problem."""
    troubled = [(address, host.problems[0]) for address, host in states.items() if host.problems]
    if len(troubled) != 1 or len(states) == 1:
        return {}
    ((address, problem),) = troubled
    return {call: f"its node is the only one with a problem: {problem}" for call in waiting if call.address == address}


def place(standing: Standing) -> str:
    """What a worker is doing, as the predicate of a sentence."""
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
    caller = next((frame for frame in frames if _is_own(frame) and frame != inner), None)
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
    for call, standing in waiting.items():
        for group in standing.groups:
            role = call.worker.partition(" rank ")[0]
            groups.setdefault((role, group.name, group.size), {})[call] = group.begun
    reasons: dict[Asked, str] = {}
    for begun in groups.values():
        most = max(begun.values())
        for call, count in begun.items():
            if count < most:
                reasons[call] = f"this is its collective {count} in the process group, the others are in {most}"
    return reasons


def _absent(waiting: Mapping[Asked, Standing], ended: Sequence[Asked]) -> list[Asked]:
    """The workers whose calls have ended, of the largest process group in which these wait."""
    caller, standing = next(iter(waiting.items()))
    group = max(standing.groups, key=lambda group: group.size, default=None)
    if group is None:
        return []
    here = {joined.rank for other in waiting.values() for joined in other.groups if joined.name == group.name}
    role = caller.worker.partition(" rank ")[0]
    names = [f"{role} rank {rank} " for rank in range(group.size) if rank not in here]
    return [other for other in ended if other.worker.startswith(tuple(names))]


def _collective(standing: Standing) -> Frame | None:
    """The collective in which any thread waits: the backward pass has a thread of its own on GPUs."""
    return next(filter(None, (_torch_distributed(frames) for frames in standing.threads)), None)


def _torch_distributed(frames: Sequence[Frame]) -> Frame | None:
    """The function of torch.distributed that was called, if the innermost frames are its; its logging aside."""
    inside = list(takewhile(lambda frame: "/torch/distributed/" in frame.file, frames))
    return next((frame for frame in reversed(inside) if not frame.file.endswith("c10d_logger.py")), None)
