"""Why nodes are missing at the deadline, in a message that stays short however many there are."""

import logging
from collections.abc import Collection, Sequence

from entrypoints.environments import Allocation
from entrypoints.hostlist import compress
from entrypoints.job.node import node_name
from entrypoints.logs import MOST_LINES
from entrypoints.wire.channel import MalformedError, shortened
from entrypoints.wire.handshake import StrangerError
from entrypoints.wire.network import resolve_within

_LONGEST_LIST = 2_000
"""Characters of the host list of all further nodes."""

log = logging.getLogger(__name__)


class Absences:
    """The reasons that the head learns while it waits for the other nodes."""

    def __init__(self, allocation: Allocation, port: int) -> None:
        self._allocation = allocation
        self._port = port
        self._causes: dict[int, str] = {}
        """The reason why each missing rank is missing, from nodes that hold the token."""
        self._claims: dict[int, str] = {}
        """Claims of strangers about missing ranks."""
        self._refused: dict[str, None] = {}
        """Refusals for ranks that are not missing; an ordered set."""
        self._logged: set[str] = set()
        self._answers: dict[str, list[str] | OSError] = {}
        """The name server's answer for each host."""

    def joined(self, rank: int) -> None:
        """Forget why this rank was missing."""
        self._causes.pop(rank, None)

    def lost(self, rank: int, name: str, why: str) -> None:
        """Remember why a node left again."""
        self._causes[rank] = f"joined, then lost: {why}"
        log.warning("%s disconnected: %s", name, why)

    def refused(self, rank: int, host: str, why: str, present: Collection[int]) -> None:
        """Remember why the head refused a node that holds the token. `present` are the ranks that are not missing."""
        self._log_once(f"refused {host}: {why}")
        if rank not in range(self._allocation.node_count):
            return
        if rank in present or rank == 0:
            if len(self._refused) < MOST_LINES:
                self._refused[f"{host} was refused as node {rank}: {why}"] = None
        else:
            self._causes[rank] = f"refused: {why}"

    def failed(self, error: StrangerError | MalformedError, address: str) -> None:
        """Remember a wrong proof, or a wrong message after a right one. They replace no cause that a node gave."""
        if isinstance(error, MalformedError):
            self._log_once(f"refused {address}, which holds the token: {error}")
            return
        self._log_once(f"refused {address}, which calls itself {node_name(error.rank, error.host)}: {error}")
        if error.rank in range(1, self._allocation.node_count):
            self._claims[error.rank] = f"{address} called itself this node: {error}"

    def _log_once(self, line: str) -> None:
        """Log a refusal, but never the same one twice: nodes try again, and strangers may flood the log."""
        if line in self._logged or len(self._logged) > MOST_LINES:
            return
        self._logged.add(line)
        log.warning("%s", line if len(self._logged) <= MOST_LINES else "further refusals are not logged")

    async def look_up(self, missing: Sequence[int], seconds: float) -> None:
        """Ask the name server for the hosts of the ranks that `lines` shows, within the given time."""
        hosts = [self._allocation.host(rank) for rank in self._ordered(missing)[:MOST_LINES]]
        self._answers = await resolve_within(seconds, filter(None, hosts), self._port)

    def lines(self, missing: Sequence[int]) -> list[str]:
        """Why each of these ranks is missing, those with a known cause first, and other possible reasons."""
        ordered = self._ordered(missing)
        lines = [f"{self._name(rank)}: {self._cause(rank)}" for rank in ordered[:MOST_LINES]]
        if further := ordered[MOST_LINES:]:
            names = compress([self._allocation.host(rank) or str(rank) for rank in further])
            lines.append(f"and {len(further)} more: {shortened(names, _LONGEST_LIST)}")
        return [*lines, *self._refused]

    def _ordered(self, missing: Sequence[int]) -> list[int]:
        return sorted(missing, key=lambda rank: (rank not in self._causes and rank not in self._claims, rank))

    def _name(self, rank: int) -> str:
        return node_name(rank, self._allocation.host(rank))

    def _cause(self, rank: int) -> str:
        if cause := self._causes.get(rank):
            return cause
        claim = self._claims.get(rank)
        return f"never connected{self._address(self._allocation.host(rank))}" + (f"; {claim}" if claim else "")

    def _address(self, host: str | None) -> str:
        match self._answers.get(host or ""):
            case None:
                return ""
            case TimeoutError():
                return "; its name server does not answer"
            case OSError():
                return "; name does not resolve"
            case addresses:
                return f"; its name resolves to {addresses[0]}"
