"""Keepers: a process on each node that keeps copies of other nodes' ranks in its memory."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from trainer.cluster.nodes import Slot
from trainer.cluster.workers import WorkerGroup
from trainer.errors import WorkerError

# Ray's object store carries each part from process to process, and may be small.
PART_BYTES = 64 * 2**20

W = TypeVar("W")

# A part of a file: offset and length in bytes.
Span = tuple[int, int]


class Keeper:
    """Files in the memory of this process, by the step that they belong to and their name."""

    def __init__(self) -> None:
        self._files: dict[int, dict[str, bytearray]] = defaultdict(dict)

    def append(self, step: int, name: str, part: bytes, offset: int) -> None:
        """Adds the part of a file that starts at `offset`; 0 replaces the file."""
        if offset == 0:
            self._files[step][name] = bytearray()
        self._files[step][name] += part

    def read(self, step: int, name: str, spans: Sequence[Span] | None) -> list[bytes]:
        """Parts of a file; all of it if `spans` is None. Raises WorkerError if this process does not have the file."""
        file = self._files.get(step, {}).get(name)
        if file is None:
            raise WorkerError(f"no copy of {name} of step {step} in memory")
        return [bytes(file[start : start + length]) for start, length in spans or [(0, len(file))]]

    def keep_only(self, step: int) -> None:
        """Removes the files of other steps."""
        self._files = defaultdict(dict, {step: self._files[step]} if step in self._files else {})


@dataclass(frozen=True)
class KeeperLink:
    """A keeper as a rank of `role` calls it; both methods raise WorkerError if the keeper's process or the file is
    lost."""

    name: str
    handle: Any
    role: str

    def write(self, step: int, name: str, data: memoryview) -> None:
        """Sends a file, part by part."""
        for offset in range(0, max(1, len(data)), PART_BYTES):
            self._call("append", step, f"{self.role}/{name}", bytes(data[offset : offset + PART_BYTES]), offset)

    def read(self, step: int, name: str, spans: Sequence[Span] | None = None) -> list[bytes]:
        """Parts of a file, or all of it."""
        parts: list[bytes] = self._call("read", step, f"{self.role}/{name}", spans)
        return parts

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return ray.get(self.handle.call.remote(method, arguments, {}))
        except RayActorError as error:
            raise WorkerError(f"{self.name} died, and with it the copies that it kept") from error


def start_keepers(slots: Sequence[Slot], timeout: float) -> WorkerGroup[Keeper]:
    """A keeper on each node of the slots, once all of them have started."""
    keepers = WorkerGroup[Keeper]("keeper", timeout)
    for slot in {slot.node.id: slot for slot in slots}.values():
        keepers.add(slot, Keeper, {}, 0.0)
    keepers.call(Keeper.keep_only, 0)
    return keepers


def links(keepers: WorkerGroup[Keeper], group: WorkerGroup[W]) -> list[KeeperLink]:
    """The keeper of each rank of a group: that of another node, if there are several."""
    nodes = [slot.node.id for slot in keepers.slots]
    chosen = [keepers.workers[(nodes.index(slot.node.id) + 1) % len(nodes)] for slot in group.slots]
    return [KeeperLink(worker.name, worker.handle, group.role) for worker in chosen]
