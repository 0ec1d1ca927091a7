"""Every task but the head: finds the head, follows its orders and ends with the job's status."""

import asyncio
import logging
from collections.abc import Sequence
from types import NoneType

from entrypoints.errors import JobEndedError, LaunchError, NodeLostError, PeersMissingError, RayFailedError
from entrypoints.host.network.interfaces import bracketed
from entrypoints.job.hello import say_hello
from entrypoints.job.node import Node, node_name
from entrypoints.wire.channel import Channel, ChannelLostError, Message, field
from entrypoints.wire.handshake import RefusedError, introduce
from entrypoints.wire.network import LOOPBACK
from entrypoints.wire.reach import UnreachableError, reach_head
from entrypoints.wire.secret import ray_token

_RETRY, _RETRY_UNPROVEN = 0.5, 3.0
"""Seconds between two attempts: the head may start later than its workers. Longer where another program answers."""
_SLACK = 2.0
"""Seconds beyond the command's grace in which the head must tell how the job ended."""

log = logging.getLogger(__name__)


async def follow(node: Node, token: str) -> int:
    """Follow the head of the job. Returns the command's status; raises LaunchError if the job ends any other way."""
    channel, launch_id = await node.unless_failed(_find_head(node, token))
    head = node_name(0, node.allocation.head)
    log.info("met %s at %s", head, channel.peer_address)
    node.use_interface_of(channel.local_address)
    try:
        status, cause = await node.unless_failed(_obey(node, channel, ray_token(token, launch_id)))
    except ChannelLostError as lost:
        raise NodeLostError(f"{head} lost: {lost}") from None
    except LaunchError as error:
        await _report(node, channel, error)
        raise
    finally:
        await channel.close()
    if cause:
        raise JobEndedError(status, cause)
    return status


async def _find_head(node: Node, token: str) -> tuple[Channel, str]:
    """Try to connect until the deadline. Returns the channel and the launch's id. Raises PeersMissingError.

    After that the head's own deadline applies.
    """
    heads = (LOOPBACK,) if node.allocation.node_count == 1 else node.allocation.heads
    where = " or ".join(f"{bracketed(head)}:{node.control_port}" for head in heads)
    reported = stranger = ""
    while True:
        try:
            return await _meet(node, heads, token)
        except RefusedError as refused:
            raise PeersMissingError(f"{node.name}: the head at {where} refused this node: {refused}") from None
        except UnreachableError as error:
            cause, stranger = str(error), error.unproven or stranger
            pause = _RETRY_UNPROVEN if error.unproven else _RETRY
        except ChannelLostError as error:
            cause, pause = str(error), _RETRY
        if node.seconds_left <= _RETRY:
            causes = cause if not stranger or stranger in cause else f"{stranger}; {cause}"
            raise PeersMissingError(
                f"{node.name} did not reach the head at {where} within {node.options.deadline:g} s: {causes}",
                "check that the head has started, that its firewall lets the control port through, and that all nodes "
                "have the same token",
            )
        if cause != reported:
            log.info("waiting for the head at %s: %s", where, cause)
            reported = cause
        await asyncio.sleep(min(pause, node.seconds_left - _RETRY))


async def _meet(node: Node, heads: Sequence[str], token: str) -> tuple[Channel, str]:
    """Try all addresses of the head once."""
    source = node.local_address if node.allocation.node_count > 1 else None
    rank, hostname, within = node.allocation.node_rank, node.hostname, node.seconds_left
    channel = await reach_head(
        heads, node.control_port, token, rank=rank, hostname=hostname, within=within, source=source
    )
    try:
        welcome = await introduce(channel, say_hello(node))
        launch_id: str = field(welcome, "launch_id", str)
    except BaseException:
        await channel.close()
        raise
    return channel, launch_id


async def _obey(node: Node, channel: Channel, secret: str) -> tuple[int, str]:
    """Follow the head's orders. Returns the status and cause with which the job ended. Raises ChannelLostError."""
    while True:
        message = await channel.receive()
        if "start_ray" in message:
            node.run_in_background(_join_ray(node, channel, message, secret))
        elif "stop_ray" in message:
            await node.end_ray()
            channel.send(ray="stopped")
        elif "exit" in message:
            return field(message, "exit", int), field(message, "cause", str)


async def _join_ray(node: Node, channel: Channel, order: Message, secret: str) -> None:
    cluster: str = field(order, "start_ray", str)
    try:
        node.reach_directly([str(address) for address in field(order, "addresses", list)])
        ray = node.make_ray(secret)
        node.use_tls(field(order, "certificate", dict, NoneType))
        await ray.start_worker(channel.local_address, cluster, lambda cause: channel.send(ray="slow", cause=cause))
        node.watch_ray()
        node.allow_attach(cluster)
    except RayFailedError as error:
        raise RayFailedError(f"{node.name}: {error.message}", error.hint) from error
    channel.send(ray="started")


async def _report(node: Node, channel: Channel, error: LaunchError) -> None:
    """Tell the head why this node stops, and wait until the head has ended the command.

    Raises JobEndedError if the job ended with another status.
    """
    channel.send(failed=error.message, hint=error.hint, status=error.exit_code)
    try:
        async with asyncio.timeout(node.grace + _SLACK):
            while "exit" not in (message := await channel.receive()):
                pass
    except (ChannelLostError, TimeoutError):
        return
    if message["exit"] != error.exit_code:
        raise JobEndedError(field(message, "exit", int), field(message, "cause", str) or error.message)
