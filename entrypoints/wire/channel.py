"""The control channel: JSON lines over TCP between the head and each other task, with heartbeats both ways.

The handshake is mutual and comes first:

    head    {"challenge": nonce, "protocol": 1}
    worker  {"hello": {…}, "nonce": nonce, "proof": HMAC(token, worker, nonces, hello)}
    head    {"welcome": {…}, "proof": HMAC(token, head, nonces, welcome)}   or   {"refused": why}

Later messages are neither signed nor encrypted: whoever can alter a TCP stream between the nodes can attack Ray's own
streams too.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

from entrypoints.wire.secret import nonce, proof, proves

PROTOCOL = 1
HEARTBEAT = 2.0
"""Seconds between two heartbeats."""
SILENCE = 10.0
"""Seconds without a message after which the other side counts as lost; less than Ray's own 15 to 65 s."""
LONGEST_LINE = 65_536
"""Bytes; the limit of the streams on both sides."""
Message = dict[str, Any]


class ChannelLostError(Exception):
    """The other side is gone. The message tells how that was noticed."""


class RefusedError(Exception):
    """The other side refused this one, or this one does not trust it."""


class Channel:
    """One connection. One task at a time may call `receive`; any task may call `send`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beating: asyncio.Task[None] | None = None
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_address(self) -> str:
        """This side's address of the connection."""
        return _plain(self._writer.get_extra_info("sockname")[0])

    @property
    def peer_address(self) -> str:
        """The other side's address of the connection."""
        return _plain(self._writer.get_extra_info("peername")[0])

    def send(self, **message: Any) -> None:
        """Queue a message. If the connection is broken, `receive` raises."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message:
        """The next message that is not a heartbeat. Raises ChannelLostError."""
        while True:
            try:
                async with asyncio.timeout(SILENCE):
                    line = await self._reader.readline()
            except TimeoutError:
                raise ChannelLostError(f"no heartbeat for {SILENCE:.0f} s") from None
            except OSError as error:
                raise ChannelLostError(f"connection broken: {error.strerror or error}") from error
            except ValueError:
                raise ChannelLostError("it sent an overlong line") from None
            if not line.endswith(b"\n"):
                raise ChannelLostError("connection closed")
            message = _decode(line)
            if "beat" not in message:
                return message

    def start_heartbeat(self) -> None:
        """Send heartbeats from now on."""
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.send(beat=True)
            await asyncio.sleep(HEARTBEAT)

    async def close(self, within: float = 1.0) -> None:
        """Send the queued messages, for at most `within` seconds, and close."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(within):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        self._writer.transport.abort()


async def greet(channel: Channel, token: str) -> tuple[Message, "HandshakeReply"]:
    """The head's side of the handshake: send a challenge and check the proof.

    Returns the worker's hello and the object to answer it with. Raises ChannelLostError, or RefusedError with the hello
    as its second argument.
    """
    challenge = nonce()
    channel.send(challenge=challenge, protocol=PROTOCOL)
    answer = await channel.receive()
    hello, its_nonce = answer.get("hello"), answer.get("nonce")
    if not isinstance(hello, dict) or not isinstance(its_nonce, str):
        raise ChannelLostError("it does not speak this protocol")
    nonces = (challenge, its_nonce)
    if not proves(answer.get("proof"), token, "worker", nonces, hello):
        channel.send(refused="wrong token")
        raise RefusedError("wrong token", hello)
    return hello, HandshakeReply(channel, token, nonces)


class HandshakeReply:
    """The head's last message of the handshake: welcome or refusal."""

    def __init__(self, channel: Channel, token: str, nonces: tuple[str, str]) -> None:
        self._channel, self._token, self._nonces = channel, token, nonces

    def welcome(self, welcome: Mapping[str, Any]) -> None:
        """Accept the worker and prove that the head knows the token too."""
        self._channel.send(welcome=welcome, proof=proof(self._token, "head", self._nonces, welcome))
        self._channel.start_heartbeat()

    def refuse(self, why: str) -> None:
        """Refuse the worker and tell it the reason."""
        self._channel.send(refused=why)


async def introduce(channel: Channel, token: str, hello: Message) -> Message:
    """The worker's side of the handshake: prove knowledge of the token and check the head's proof.

    Returns the head's welcome. Raises ChannelLostError, or RefusedError if another attempt cannot help.
    """
    opening = await channel.receive()
    challenge = opening.get("challenge")
    if not isinstance(challenge, str):
        raise ChannelLostError("it does not speak this protocol")
    if opening.get("protocol") != PROTOCOL:
        raise RefusedError(f"the head speaks protocol {opening.get('protocol')}, this node {PROTOCOL}")
    nonces = (challenge, nonce())
    channel.send(hello=hello, nonce=nonces[1], proof=proof(token, "worker", nonces, hello))
    answer = await channel.receive()
    if "refused" in answer:
        raise RefusedError(str(answer["refused"]))
    welcome = answer.get("welcome")
    if not isinstance(welcome, dict) or not proves(answer.get("proof"), token, "head", nonces, welcome):
        raise RefusedError("the head does not know the token")
    channel.start_heartbeat()
    return welcome


def _decode(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ChannelLostError("it does not speak this protocol")
    return message


def _plain(address: str) -> str:
    """The IPv4 address in an IPv4-mapped IPv6 address; any other address unchanged."""
    return address.removeprefix("::ffff:")
