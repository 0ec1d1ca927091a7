"""The head's side of the control channels: accepts nodes, watches them, and tells them how the job ended.

Each connection becomes a peer, a waiting task, or a recorded reason why a node is missing.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from entrypoints.errors import DetectionError, JobEndedError, LaunchError, NodeLostError, PeersMissingError
from entrypoints.job.absences import Absences
from entrypoints.job.hello import check_form, reason_to_refuse, unverified
from entrypoints.job.node import Node, node_name
from entrypoints.wire.channel import HEARTBEAT, Channel, ChannelLostError, MalformedError, Message, field
from entrypoints.wire.listener import Listener
from entrypoints.wire.network import LOOPBACK, addresses_for_peers, is_own, resolve_within

_LINGER = 20.0
"""Seconds that the head waits, after the command has ended, for tasks that have not connected yet."""
_GOODBYE = 1.0
"""Seconds in which the others must disconnect once they have the job's result."""
_LATE = 2 * HEARTBEAT
"""Seconds without a message after which a node may be lost."""
_OWN_PORT = "a --control-port of its own, equal on all of its nodes"
_SPARE_CONNECTIONS = 64
"""Connections without a proof, beyond one for each task of the job, that the head keeps open."""
_DNS_PATIENCE = 3.0
"""Seconds for resolving hosts' names: at the start, and of the missing ones before the deadline."""
_TRANSLATION = 5.0
"""Seconds in which the head's name must lead to this host if it is none of its own addresses."""
_LOOK_AGAIN = 0.5
"""Seconds between two attempts to reach this host by the head's name."""
_ASKED = 8
"""Other nodes to which the head looks up its route before it listens."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Peer:
    """Another node that is connected to the head."""

    rank: int
    hostname: str
    channel: Channel
    equipment: str
    """Its CPUs and GPUs, as text."""
    gpus: int
    fabric: Message
    """Its `Fabric.summary()`."""
    unfit: list[Message]
    """Its preflight's failures; any of them stops the job."""
    certificate: dict[str, str] | None
    """Its `NodeKey`'s certificate; None without TLS."""
    in_cluster: bool
    """Whether it takes part in the cluster that runs or forms. Other nodes are spares."""
    trouble: str = ""
    """Why its last start of Ray failed and was repeated, to be appended to a message."""
    ray_started: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    ray_stopped: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return node_name(self.rank, self.hostname)


class Meeting:
    """The connected nodes and the server that accepts them."""

    def __init__(self, node: Node, token: str, launch_id: str, hello: Message) -> None:
        self.peers: dict[int, Peer] = {}
        self._node = node
        self._launch_id = launch_id
        self._hello = hello
        """The head's own hello, with which the others must agree."""
        self._members: dict[Channel, asyncio.Task[None]] = {}
        """Channels that get the job's result (peers and further tasks of any node), each with its listening task."""
        self._absences = Absences(node.allocation, node.control_port)
        self._complete = asyncio.Event()
        self.loss = asyncio.Event()
        """Set when a node is lost and enough nodes are left."""
        self._everybody = asyncio.Event()
        self._over = False
        tasks = max(node.allocation.node_count, node.allocation.task_count or 0)
        self._listener = Listener(token, self._welcome, self._absences.failed, tasks + _SPARE_CONNECTIONS)

    async def open(self) -> None:
        """Listen where the other nodes look for this one. Raises PeersMissingError if the port is taken."""
        port = self._node.control_port
        try:
            self._listener.open(port, await self._own_addresses())
        except OSError as error:
            raise PeersMissingError(
                f"cannot listen on control port {port}: {error.strerror}",
                f"a second job on these nodes needs {_OWN_PORT}; `ss -tlnp` tells which process has this one",
            ) from error
        if self._node.allocation.node_count > 1 and self._node.allocation.head is not None:
            self._node.run_in_background(self._refuse_elsewhere(self._node.allocation.heads))

    async def _own_addresses(self) -> list[str]:
        """The addresses to listen on; empty for all."""
        allocation = self._node.allocation
        if allocation.node_count == 1:
            return [LOOPBACK]
        others = (allocation.hosts or ())[1 : 1 + _ASKED]
        if allocation.head is None:
            return []
        reachable = await addresses_for_peers(allocation.heads, others, self._node.control_port, self._dns_patience)
        log.debug("the control port is open at %s", ", ".join(reachable) or "all addresses")
        return reachable

    @property
    def _dns_patience(self) -> float:
        return min(_DNS_PATIENCE, self._node.seconds_left / 2)

    async def gather(self) -> list[Peer]:
        """Wait for all nodes and return them in order of rank.

        Raises PeersMissingError at the deadline, naming each missing node with the reason.
        """
        log.info("waiting for %d more nodes on port %d", self._wanted, self._node.control_port)
        patience = self._dns_patience
        if not await self._all_met(self._node.seconds_left - patience):
            # The deadline is near: look up the missing nodes' names while waiting for them.
            lookups = asyncio.create_task(self._absences.look_up(self._missing, patience))
            if not await self._all_met(self._node.seconds_left):
                await lookups
                self._go_on_without(self._missing)
            lookups.cancel()
        return [self.peers[rank] for rank in sorted(self.peers)]

    async def _all_met(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), seconds)
        return self._complete.is_set()

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._node.allocation.node_count) if rank not in self.peers]

    def _go_on_without(self, missing: list[int]) -> None:
        """Let the job start without the missing nodes. Raises PeersMissingError if it needs more than are there."""
        count, lines = self._node.allocation.node_count, self._absences.lines(missing)
        if self._node.options.min_nodes is None or len(self.peers) < self._enough:
            raise PeersMissingError(
                f"{len(missing)} of {count} nodes missing after {self._node.options.deadline:g} s\n"
                + "\n".join(f"  {line}" for line in lines),
                f"each node must reach the head on port {self._node.control_port} with the same token",
            )
        log.warning("continuing with %d of %d nodes", len(self.peers) + 1, count)
        for line in lines:
            log.warning("without %s", line)
        self._complete.set()

    def choose(self) -> list[Peer]:
        """The peers of the next cluster, in order of rank; the others are spares."""
        chosen = [self.peers[rank] for rank in sorted(self.peers)][: self._wanted]
        for peer in self.peers.values():
            peer.in_cluster = peer in chosen
        return chosen

    @property
    def _wanted(self) -> int:
        """The number of peers that the job uses; further ones are spares."""
        return self._node.allocation.node_count - self._node.options.spares - 1

    @property
    def _enough(self) -> int:
        """The number of peers that the job needs."""
        least = self._node.options.min_nodes
        return self._wanted if least is None else min(max(1, least) - 1, self._wanted)

    def misses_a_heartbeat(self) -> bool:
        """Whether a node was not heard for so long that it may be lost."""
        return any(peer.channel.silence > _LATE for peer in self.peers.values())

    def _lose(self, peer: Peer, error: LaunchError) -> None:
        """Handle the loss of a peer after all had met: end the job, unless enough nodes are left."""
        if self._over or self.peers.get(peer.rank) is not peer:
            return
        if len(self.peers) - 1 < self._enough or (peer.in_cluster and not self._node.options.survives_losses):
            self._node.fail(error)
            return
        del self.peers[peer.rank]
        peer.channel.send(exit=error.exit_code, cause=error.message)  # it may still be connected and wait for this
        if not peer.in_cluster:
            log.warning("a spare is lost: %s", error.message)
            return
        log.warning("continuing with %d nodes: %s", min(len(self.peers), self._wanted) + 1, error.message)
        self.loss.set()

    def _all_tasks_here(self) -> bool:
        return len(self._members) + 1 >= (self._node.allocation.task_count or 1)

    async def end(self, status: int, cause: str) -> None:
        """Tell all nodes how the job ended, and close."""
        if not cause and self._listener.is_open and not self._all_tasks_here():
            # After a short command, a late task would look for the head until its deadline.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._everybody.wait(), _LINGER)
        self._over = True
        await self._listener.close()
        for channel in self._members:
            channel.send(exit=status, cause=cause)
        if self._members:
            # Let them hang up: closing first could drop the message before they read it.
            await asyncio.wait(self._members.values(), timeout=_GOODBYE)
        await self._listener.end()

    async def _welcome(self, channel: Channel, hello: Message) -> None:
        try:
            check_form(hello)
        except MalformedError as error:
            channel.send(refused=str(error))
            raise
        if why := reason_to_refuse(self._hello, hello) or self._double(hello) or self._unfit(hello):
            channel.send(refused=why)
            self._absences.refused(hello["rank"], hello["hostname"], why, self.peers)
            return
        try:
            certificate = self._node.certify(hello["request"])
        except ValueError as error:
            channel.send(refused=str(error))
            raise MalformedError(str(error)) from error
        if caveat := unverified(self._hello, hello):
            log.warning("%s: %s", node_name(hello["rank"], hello["hostname"]), caveat)
        channel.send(welcome={"launch_id": self._launch_id})
        self._members[channel] = _current_task()
        if self._all_tasks_here():
            self._everybody.set()
        try:
            if hello["local_rank"] > 0:
                while True:  # such a task only waits for the end
                    await channel.receive()
            equipment = f"{hello['cpus']} CPUs, {hello['gpus']} GPUs"
            has = (equipment, hello["gpus"], hello["fabric"], hello["unfit"], certificate)
            in_time = not self._complete.is_set()
            await self._keep(Peer(hello["rank"], hello["hostname"], channel, *has, in_cluster=in_time))
        finally:
            del self._members[channel]

    def _double(self, hello: Message) -> str | None:
        """The reason to refuse a second node with the same rank; None for the first."""
        if hello["local_rank"] > 0:
            return None
        taken = {0: self._node.hostname} | {rank: peer.hostname for rank, peer in self.peers.items()}
        holder = taken.get(hello["rank"])
        if holder is None:
            return None
        return f"rank {hello['rank']} is already taken by {holder}; a second job on these nodes needs {_OWN_PORT}"

    def _unfit(self, hello: Message) -> str | None:
        """The reason to refuse an unfit node that the job can do without. Any other one stops the job later."""
        if not hello["unfit"] or not (self._complete.is_set() or self._node.options.spares):
            return None
        return "it is not fit: " + "; ".join(f"{finding['check']}: {finding['message']}" for finding in hello["unfit"])

    async def _keep(self, peer: Peer) -> None:
        """Listen to a peer until its channel is lost. Once all nodes have met, that is the loss of a node."""
        self.peers[peer.rank] = peer
        self._absences.joined(peer.rank)
        role = ", a spare" if self._complete.is_set() else ""
        log.info("%s joined from %s: %s%s", peer.name, peer.channel.peer_address, peer.equipment, role)
        if len(self.peers) >= self._wanted:
            self._complete.set()
        try:
            while True:
                self._hear(peer, await peer.channel.receive())
        except ChannelLostError as lost:
            if self._over:
                return
            if self._complete.is_set():
                self._lose(peer, NodeLostError(f"{peer.name} lost: {lost}"))
            else:
                del self.peers[peer.rank]
                self._absences.lost(peer.rank, peer.name, str(lost))

    def _hear(self, peer: Peer, message: Message) -> None:
        if message.get("ray") == "started":
            peer.ray_started.set()
        elif "failed" in message:
            status = field(message, "status", int)
            self._node.extend_grace(status - 128)
            error = JobEndedError(status, field(message, "failed", str), field(message, "hint", str))
            self._lose(peer, error)
        elif message.get("ray") == "slow":
            peer.trouble = f": {field(message, 'cause', str)}"
            log.warning("%s starts Ray again, as one of its time limits passed%s", peer.name, peer.trouble)
        elif message.get("ray") == "stopped":
            peer.ray_stopped.set()

    async def _refuse_elsewhere(self, heads: Sequence[str]) -> None:
        """Raise DetectionError if the others look for the head on another host. Returns once that is unlikely.

        A name may lead here through address translation, which may take a moment to begin.
        """
        port = self._node.control_port
        answers = await resolve_within(self._dns_patience, heads, port)
        addresses = [address for answer in answers.values() if isinstance(answer, list) for address in answer]
        if any(isinstance(answer, OSError) for answer in answers.values()):
            return  # the others may know the name
        if any(map(is_own, addresses)):
            return
        end = asyncio.get_running_loop().time() + min(_TRANSLATION, self._node.seconds_left / 2)
        while not self._members:
            if any(await asyncio.gather(*(self._listener.is_reached_at(address, port) for address in addresses))):
                return
            if asyncio.get_running_loop().time() > end:
                raise DetectionError(
                    f"this is node 0, but the head's name leads to another host: {', '.join(heads)}",
                    "two nodes may claim rank 0, or mpirun was called on a host that is no node: set SLIPWAY_HEAD on "
                    "every node to a name of the first one, or list them all in SLIPWAY_HOSTS",
                )
            await asyncio.sleep(_LOOK_AGAIN)


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
