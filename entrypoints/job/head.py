"""The head, node rank 0: meets the other nodes, forms Ray, runs the command and tells all nodes how it ended."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from entrypoints.environments.single import NODE_COUNT
from entrypoints.errors import LaunchError, RayFailedError, UsageError
from entrypoints.host.accelerators import ACCELERATORS
from entrypoints.host.network.fabric import odd_ones
from entrypoints.job.hello import missing_gpus, say_hello
from entrypoints.job.meeting import Meeting, Peer
from entrypoints.job.node import Node
from entrypoints.logs import limited
from entrypoints.preflight import refuse
from entrypoints.processes import Process
from entrypoints.ray.node import RayNode
from entrypoints.terminal import foreground, ignore_suspension
from entrypoints.wire.channel import SILENCE
from entrypoints.wire.secret import ray_token

_ALONE = "127.0.0.1"
READY_FD = "SLIPWAY_READY_FD"
"""For a command that starts beside Ray: a file descriptor that holds a byte once Ray is up, and ends without one if Ray
never is."""
_FINAL = (0, UsageError.exit_code)
"""Statuses of the command after which another start would end the same way."""
_LOOK_AGAIN = 0.5
"""Seconds between two checks that the awaited peer is still connected."""

log = logging.getLogger(__name__)


async def lead(node: Node, token: str, *, listen: bool) -> int:
    """Run the job from its head. Returns the command's status; raises LaunchError if the job ends any other way."""
    launch_id = secrets.token_hex(8)
    meeting = Meeting(node, token, launch_id, say_hello(node))
    try:
        status = await node.unless_failed(_lead(node, meeting, ray_token(token, launch_id), listen))
    except LaunchError as error:
        await meeting.end(error.exit_code, error.message)
        raise
    await meeting.end(status, "")
    return status


async def _lead(node: Node, meeting: Meeting, secret: str, listen: bool) -> int:
    peers: list[Peer] = []
    if listen:
        await meeting.open()
    if node.allocation.node_count > 1:
        peers = await meeting.gather()
    refuse({node.hostname: node.unfit} | {peer.hostname: peer.unfit for peer in peers}, node.options.report_directory)
    if peers:
        node.use_interface_of(_head_address(peers))
        for sentence in limited(odd_ones(_fabrics(node, peers))):
            log.warning("%s", sentence)
    restarts = 0
    while True:
        status = await _run_once(node, meeting, secret)
        if status is not None:
            if status in _FINAL or restarts == node.options.max_restarts:
                return status
            restarts += 1
            log.warning(
                "the command failed with status %d; restart %d of %d", status, restarts, node.options.max_restarts
            )
        await _stop_ray(node, meeting)


async def _run_once(node: Node, meeting: Meeting, secret: str) -> int | None:
    """Form Ray on the connected nodes and run the command. None if a node was lost and enough nodes are left."""
    meeting.loss.clear()
    peers = meeting.choose()
    work = asyncio.create_task(_form_and_run(node, peers, secret))
    loss = asyncio.create_task(meeting.loss.wait())
    try:
        await asyncio.wait({work, loss}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and work.result() != 0 and (node.options.survives_losses or meeting.misses_a_heartbeat()):
            # The command may have failed because of a lost node that the head has not noticed yet.
            await asyncio.wait({loss}, timeout=SILENCE)
        if not loss.done():
            return work.result()
    finally:
        loss.cancel()
        await _cancelled(work)
    return None


async def _cancelled(work: asyncio.Task[Any]) -> None:
    """Cancel the task and wait for its clean-up, even if cancelled meanwhile: the command may be saving its state."""
    if work.done():
        return
    work.cancel()
    interrupted: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            interrupted = error
    if not work.cancelled() and (failure := work.exception()):
        log.warning("error during clean-up: %s", failure)
    if interrupted is not None:
        raise interrupted


async def _form_and_run(node: Node, peers: list[Peer], secret: str) -> int:
    address = _head_address(peers)
    node.reach_directly(list(dict.fromkeys((address, *(peer.channel.peer_address for peer in peers)))))
    environment = dict(node.environment) | {NODE_COUNT: str(len(peers) + 1)}
    if node.options.ray is None:
        return await run_command(node, environment)
    ray = node.make_ray(secret, alone=not peers)
    node.use_tls(node.certify(say_hello(node)["request"]))
    cluster = ray.become_head(address)
    environment |= ray.client_environment(cluster)
    forming = _form_ray(node, peers, ray, address, cluster)
    if node.options.waits_for_ray:
        return await _run_beside(node, environment, forming)
    await forming
    return await run_command(node, environment)


async def _stop_ray(node: Node, meeting: Meeting) -> None:
    """End Ray on all remaining nodes, so that the next cluster starts clean. Nodes may be lost meanwhile."""
    node.extend_deadline()
    if node.options.ray is None:
        await node.end_ray()  # processes that the command left
        return
    for peer in meeting.peers.values():
        peer.ray_started.clear()
        peer.ray_stopped.clear()
        peer.channel.send(stop_ray=True)
    await node.end_ray()
    for rank, peer in list(meeting.peers.items()):
        while not peer.ray_stopped.is_set() and meeting.peers.get(rank) is peer:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.ray_stopped.wait(), _LOOK_AGAIN)


async def _form_ray(node: Node, peers: list[Peer], ray: RayNode, address: str, cluster: str) -> None:
    """Start Ray on all nodes, the head at this address, and wait until Ray lists all of them as alive."""
    waiting_for = "Ray on the head"
    awaited: Peer | None = None
    try:
        async with asyncio.timeout(node.seconds_left):
            await ray.start_head(address)
            node.watch_ray()
            for peer in peers:
                peer.channel.send(start_ray=cluster, addresses=node.addresses, certificate=peer.certificate)
            for awaited in peers:
                waiting_for = f"Ray on {awaited.name}"
                await awaited.ray_started.wait()
            waiting_for, awaited = f"{len(peers) + 1} nodes in Ray's own list", None
            registered = await ray.wait_for_nodes(cluster, len(peers) + 1)
    except TimeoutError:
        errors = awaited.trouble if awaited else ray.errors_so_far()
        raise RayFailedError(
            f"the deadline of {node.options.deadline:g} s passed while waiting for {waiting_for}{errors}"
        ) from None
    _check_gpus(node, peers, registered)
    log.info("Ray is up on %s: %d nodes, %d GPUs", cluster, len(peers) + 1, sum(registered.values()))
    node.allow_attach(cluster)
    if url := ray.dashboard_url:
        log.info(
            "Ray's dashboard is at %s; `launch attach -- printenv RAY_AUTH_TOKEN` on this node prints its token", url
        )


def _fabrics(node: Node, peers: list[Peer]) -> dict[str, Mapping[str, Any]]:
    """The fabric of each node. A head without GPUs sends no tensors to nodes that have some, so its own is left out."""
    greeting = say_hello(node)
    drives_only = greeting["gpus"] == 0 and any(peer.gpus for peer in peers)
    return ({} if drives_only else {node.name: greeting["fabric"]}) | {peer.name: peer.fabric for peer in peers}


def _check_gpus(node: Node, peers: list[Peer], registered: Mapping[str, int]) -> None:
    """Raise RayFailedError if Ray lacks a GPU that a node announced: a job that needs it would wait forever."""
    announced = Counter({node.hostname: say_hello(node)["gpus"]})
    for peer in peers:
        announced[peer.hostname] += peer.gpus
    if missing := missing_gpus(announced, registered):
        raise RayFailedError(
            missing,
            f"check that {' or '.join(f'`{row.tool}`' for row in ACCELERATORS)} lists them in the container, "
            "or tell Ray of fewer: --num-gpus",
        )


def _head_address(peers: list[Peer]) -> str:
    """The head's address that the peers reached, the first of several."""
    addresses = list(dict.fromkeys(peer.channel.local_address for peer in peers))
    if len(addresses) > 1:
        log.warning("the nodes reached the head at several addresses, %s; Ray uses the first", ", ".join(addresses))
    return addresses[0] if addresses else _ALONE


async def run_command(node: Node, environment: Mapping[str, str]) -> int:
    """Run the command in the foreground and return its status. Cancellation ends it. Raises CommandNotFoundError."""
    ignore_suspension()
    return await _in_foreground(node, node.process_tree.spawn(node.options.command, environment))


async def _in_foreground(node: Node, process: Process) -> int:
    async with foreground(process, node.process_tree):
        try:
            return await _status_of(process)
        finally:
            await process.end(node.grace)


async def _run_beside(node: Node, environment: Mapping[str, str], forming: Coroutine[Any, Any, None]) -> int:
    """Run a command that waits for Ray itself, beside the formation; in the foreground once Ray is up.

    A command that ends earlier ends the formation, too. If the formation fails, so does this, and the command ends.
    """
    formation = asyncio.create_task(forming)
    reader, writer = os.pipe()
    try:
        with os.fdopen(reader, "rb"), os.fdopen(writer, "wb", buffering=0) as ready:
            ignore_suspension()
            process = node.process_tree.spawn(
                node.options.command, {**environment, READY_FD: str(reader)}, open_files=[reader]
            )
            try:
                first: set[asyncio.Future[Any]] = {formation, process.ended}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if formation.done():
                    formation.result()
                    ready.write(b"1")
                    return await _in_foreground(node, process)
                return await _status_of(process)
            finally:
                formation.cancel()
                await process.end(node.grace)
    finally:
        await _cancelled(formation)


async def _status_of(process: Process) -> int:
    """Wait for the command's end and return its status."""
    status = await process.status()
    if process.killed_by is not None:
        log.warning("%s", _death(process.killed_by))
    return status


def _death(number: int) -> str:
    """The message for a command that this signal killed."""
    known = number in set(signal.Signals)  # not every real-time signal has a name
    said = f"{signal.Signals(number).name if known else f'signal {number}'} killed the command"
    if number == signal.SIGKILL:
        said += "; if nobody sent it, the kernel did because memory ran out: see `dmesg` and the container's limit"
    return said
