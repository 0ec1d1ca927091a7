"""The head, node rank 0: meets the others, forms Ray, runs the command and says how it ended."""

import asyncio
import logging
import secrets
from collections.abc import Mapping

from entrypoints.errors import LaunchError, RayFailedError
from entrypoints.fabric.agreement import odd_ones
from entrypoints.hello import say_hello
from entrypoints.meeting import Meeting, Peer
from entrypoints.node import Node
from entrypoints.preflight import refuse
from entrypoints.processes import take_terminal
from entrypoints.ray_node import RayNode, ray_authentication
from entrypoints.secret import ray_token

_ALONE = "127.0.0.1"

log = logging.getLogger(__name__)


async def lead(node: Node, token: str, *, listen: bool) -> int:
    """Run the job from its head; returns the command's status. Raises LaunchError for every other end."""
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
        summaries = {node.name: node.host.fabric.summary()} | {peer.name: peer.fabric for peer in peers}
        for sentence in odd_ones(summaries):
            log.warning("%s", sentence)
    environment = dict(node.environment) | {"SLIPWAY_NODE_COUNT": str(node.allocation.node_count)}
    if node.options.ray is not None:
        cluster = await _form_ray(node, peers, node.make_ray(secret))
        environment |= {"RAY_ADDRESS": cluster} | ray_authentication(secret)
    return await run_command(node, environment)


async def _form_ray(node: Node, peers: list[Peer], ray: RayNode) -> str:
    """Start Ray everywhere; returns its address once it says itself that all nodes are alive."""
    waiting_for = "Ray on the head"
    try:
        async with asyncio.timeout(node.seconds_left):
            cluster = await ray.start_head(_head_address(peers))
            node.watch_ray()
            for peer in peers:
                peer.channel.send(start_ray=cluster)
            for peer in peers:
                waiting_for = f"Ray on {peer.name}"
                await peer.ray_started.wait()
            waiting_for = f"{node.allocation.node_count} nodes in Ray's own list"
            await ray.wait_for_nodes(cluster, node.allocation.node_count)
    except TimeoutError:
        raise RayFailedError(
            f"the deadline of {node.options.deadline:g} s passed while waiting for {waiting_for}"
        ) from None
    log.info("Ray is up on %s: %d nodes", cluster, node.allocation.node_count)
    return cluster


def _head_address(peers: list[Peer]) -> str:
    """The address on which the head was actually reached."""
    addresses = list(dict.fromkeys(peer.channel.local_address for peer in peers))
    if len(addresses) > 1:
        log.warning("the head was reached on %s; Ray gets the first", ", ".join(addresses))
    return addresses[0] if addresses else _ALONE


async def run_command(node: Node, environment: Mapping[str, str]) -> int:
    """Run the command in the foreground; returns its status. Being cancelled ends it. Raises CommandNotFoundError."""
    process = node.family.spawn(node.options.command, environment, foreground=True)
    try:
        return await process.status()
    finally:
        await process.end(node.options.grace)
        take_terminal()
