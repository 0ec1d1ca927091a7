"""State and duties that the head and the workers share: processes, Ray, signals, and the first failure."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from entrypoints.environments import Allocation
from entrypoints.errors import LaunchError, NodeLostError, StoppedError, UsageError
from entrypoints.host.network.fabric_settings import apply
from entrypoints.host.network.interfaces import INTERFACE, address_of, interface_of
from entrypoints.host.proxies import past_proxies
from entrypoints.host.settings import Host
from entrypoints.job.guard import ORPHANED, WARNING_SIGNALS, heeded
from entrypoints.logs import log_folder, quoted
from entrypoints.options import Options
from entrypoints.processes import Process, ProcessTree
from entrypoints.ray.attach import leave_note
from entrypoints.ray.directory import directory_prefix
from entrypoints.ray.log_mirror import LogMirror
from entrypoints.ray.node import RayNode
from entrypoints.ray.ports import claim_ray_ports, control_port
from entrypoints.wire.channel import HEARTBEAT, SILENCE

if TYPE_CHECKING:
    from entrypoints.wire.certificates import Authority, NodeKey

RAY_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for Ray's processes, which hold nothing that outlives the job."""
_MIRROR = 5.0
"""Seconds between two copies of Ray's logs into the log directory."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Node:
    """This node of the job. Await its steps through `unless_failed`, so that the first failure ends the job."""

    def __init__(
        self,
        allocation: Allocation,
        options: Options,
        host: Host,
        hostname: str,
        environment: Mapping[str, str],
        unfit: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.allocation = allocation
        self.unfit = unfit
        """Preflight's failures; any of them stops the job."""
        self.options = options
        self.host = host
        self.hostname = hostname
        self.environment = environment
        self.addresses: Sequence[str] = ()
        """The addresses of the nodes of the cluster."""
        self.control_port = options.control_port or control_port(allocation.job_id)
        self.process_tree = ProcessTree()
        self.ray: RayNode | None = None
        self._mirror: LogMirror | None = None
        self._deadline = time.monotonic() + options.deadline
        self._failure: asyncio.Future[LaunchError] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()
        self.grace = options.grace
        self.key: NodeKey | None = None
        """This node's key for TLS; None without TLS."""
        self.authority: Authority | None = None
        """The job's certificate authority, on the head; None without TLS."""
        if options.ray is not None and options.ray.tls:
            from entrypoints.wire import certificates  # their library takes a while to import

            self.key = certificates.NodeKey()
            self.authority = certificates.Authority() if allocation.is_head else None
        for number in heeded():
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
        orphaned = NodeLostError(f"{self.name} lost: its launch was killed")
        asyncio.get_running_loop().add_signal_handler(ORPHANED, self.fail, orphaned)

    @property
    def name(self) -> str:
        return node_name(self.allocation.node_rank, self.hostname)

    @property
    def local_address(self) -> tuple[str, int] | None:
        """The address to connect from if the user chose an interface. Raises UsageError if it has no address."""
        chosen = self.host.fabric.chosen_interface
        if chosen is None:
            return None
        address = address_of(chosen)
        if address is None:
            there = ", ".join(name for _, name in socket.if_nameindex() if address_of(name))
            raise UsageError(
                f"{INTERFACE} is {chosen}, which has no address here", f"interfaces with an address: {there}"
            )
        return address, 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline for forming the cluster; never negative."""
        return max(0.0, self._deadline - time.monotonic())

    def use_interface_of(self, address: str) -> None:
        """Make the libraries use the interface with this address, over which a peer was reached."""
        interface = interface_of(address)
        if interface is None or interface == "lo":
            return
        settings = self.host.interface_settings(interface, f"the nodes met over it, at {address}")
        self.environment = apply(self.environment, settings)
        for setting in settings:
            log.info("%s=%s: %s", setting.name, quoted(self.environment[setting.name]), setting.reason)

    def reach_directly(self, addresses: Sequence[str]) -> None:
        """Keep what runs on this node from asking the user's proxy for the job's nodes, which have these addresses."""
        self.addresses = addresses
        self.environment = {**self.environment, **past_proxies(self.environment, addresses)}

    def extend_deadline(self) -> None:
        """Restart the deadline for forming another cluster."""
        self._deadline = time.monotonic() + self.options.deadline

    def fail(self, error: LaunchError) -> None:
        """End this node's part with this error, unless another error came first."""
        if not self._failure.done():
            self._failure.set_result(error)

    async def unless_failed(self, step: Coroutine[Any, Any, T]) -> T:
        """Await a step. If the node fails meanwhile, cancel the step, wait for its clean-up and raise the failure."""
        task = asyncio.create_task(step)
        futures: set[asyncio.Future[Any]] = {task, self._failure}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()):
                log.warning("error during clean-up: %s", error)
            raise self._failure.result()
        return task.result()

    def make_ray(self, token: str, *, alone: bool = False) -> RayNode:
        """Prepare Ray on this node, on ports that are free now; on loopback only if it is `alone`."""
        assert self.options.ray is not None
        job_id, rank = self.allocation.job_id, self.allocation.node_rank
        ports = claim_ray_ports(job_id, rank, self.options.ray.cpus)
        prefix = directory_prefix(job_id, rank, self.options.control_port)
        self.ray = RayNode(self.process_tree, self.options.ray, ports, self.environment, token, prefix, alone=alone)
        if self.options.log_directory is not None:
            folder = log_folder(self.options.log_directory, rank, self.hostname)
            self._mirror = self.ray.mirror_logs(folder)
            self.run_in_background(self._keep_logs(self._mirror))
        return self.ray

    def certify(self, request: str | None) -> dict[str, str] | None:
        """On the head, the certificate that a node requests; None without TLS. Raises ValueError."""
        return self.authority.sign(request or "") if self.authority is not None else None

    def use_tls(self, certificate: Mapping[str, str] | None) -> None:
        """Let Ray on this node use TLS with this node's certificate. Without TLS there is none."""
        assert self.ray is not None
        if self.key is not None and certificate is not None:
            self.ray.use_tls(self.key.install(certificate, self.ray.directory.path))

    def watch_ray(self) -> None:
        """From now on the death of a vital Ray process, or its stop, loses this node.

        Raises RayFailedError if one is dead.
        """
        assert self.ray is not None
        for name, process in self.ray.watched().items():
            self.run_in_background(self._watch(self.ray, name, process))
            self.run_in_background(self._watch_for_stop(name, process))

    def allow_attach(self, cluster: str) -> None:
        """Let `launch attach` on this node find the cluster."""
        assert self.ray is not None
        environment = self.ray.client_environment(cluster)
        leave_note(self.ray.directory.path, self.allocation.job_id, environment, self.addresses)

    async def _keep_logs(self, mirror: LogMirror) -> None:
        while True:
            await asyncio.sleep(_MIRROR)
            await asyncio.to_thread(mirror.update)

    async def _watch(self, ray: RayNode, name: str, process: Process) -> None:
        status = await process.status()
        cause, hint = f"exit status {status}", ""
        if status > 128:
            cause = f"killed by {signal.Signals(status - 128).name}"
        if status == 128 + signal.SIGKILL:
            hint = "often the kernel's out-of-memory killer: see `dmesg` on that node"
        errors = "" if status == 128 + signal.SIGKILL else ray.last_errors(name)
        raise NodeLostError(f"{self.name} lost: its {name} died ({cause}){errors}", hint)

    async def _watch_for_stop(self, name: str, process: Process) -> None:
        """Ray notices a stopped process after a minute, if at all, and its clients wait without a limit.

        A job that is suspended as a whole stops and goes on with all its processes, this one included.
        """
        stopped = 0
        while stopped * HEARTBEAT < SILENCE:
            await asyncio.sleep(HEARTBEAT)
            stopped = stopped + 1 if process.is_stopped() else 0
        raise NodeLostError(
            f"{self.name} lost: its {name} is stopped (SIGSTOP) since {SILENCE:.0f} s",
            "a debugger, a person or a checkpointing tool stopped it; `kill -CONT` would have continued it",
        )

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this concurrently with the current step. Its failure fails the node."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._take_over)

    def _take_over(self, task: asyncio.Task[None]) -> None:
        """Fail the node if background work failed, even with an unexpected error."""
        if task.cancelled() or not (error := task.exception()):
            return
        if isinstance(error, LaunchError):
            self.fail(error)
        elif not self._failure.done():
            self._failure.set_exception(error)

    def extend_grace(self, number: int) -> None:
        """Extend the command's grace if the signal, on any node, is a scheduler's warning."""
        if number in WARNING_SIGNALS:
            self.grace = self.options.warning_grace

    def _interrupt(self, number: int) -> None:
        if not self._failure.done():
            self.extend_grace(number)
        self.fail(StoppedError(number, self.name))

    async def clean(self) -> None:
        """End all processes and remove Ray's directory."""
        await self.end_ray()

    async def end_ray(self) -> None:
        """End Ray and every other process of this node. Keep Ray's logs if the user asked for them."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.process_tree.end_all(RAY_GRACE)
        if self.ray is not None:
            if self._mirror is not None:
                self._mirror.update()
            self.ray.clean()
            self.ray = None


def node_name(rank: int, host: str | None) -> str:
    """The name of a node in messages."""
    return f"node {rank} ({host})" if host else f"node {rank}"
