"""The control channel between the head and each other task: authenticated messages over TCP, heartbeats both ways.

A channel carries short lines until the handshake (`handshake`) has secured it. After that each message is a frame:

    length (4 bytes) | HMAC-SHA256(key of the direction, number of the message, JSON) | JSON

The number is not sent: a message that is repeated, dropped, reordered or altered does not fit, and the channel is lost.
Messages are not encrypted and carry no secret.
"""

import asyncio
import contextlib
import hmac
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn

HEARTBEAT = 2.0
"""Seconds between two heartbeats."""
SILENCE = 10.0
"""Seconds without a message after which the other side counts as lost; less than Ray's own 15 to 65 s."""
LONGEST_LINE = 1_024
"""Bytes of a line of the handshake; the limit of the streams on both sides."""
LONGEST_MESSAGE = 1_048_576
"""Bytes of a message; it may list the addresses of all nodes."""
LONGEST_TEXT = 10_000
"""Characters of a text in a message, like a cause that names each of a thousand nodes. The rest is left out."""
_LENGTH, _MAC = 4, 32
FOREIGN = "it does not speak this protocol"
Message = dict[str, Any]


class ChannelLostError(Exception):
    """The other side is gone. The message tells how that was noticed."""


class MalformedError(ChannelLostError):
    """The other side, which holds the token, sent a message of the wrong form."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"it sent a message of the wrong form: {problem}")


class Channel:
    """One connection. One task at a time may call `receive`; any task may call `send`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beating: asyncio.Task[None] | None = None
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self._heard = time.monotonic()
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

    @property
    def silence(self) -> float:
        """Seconds since the other side was heard."""
        return time.monotonic() - self._heard

    def send_line(self, **message: Any) -> None:
        """Queue a line of the handshake."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive_line(self) -> Message:
        """The next line of the handshake, from a side that has proved nothing. Raises ChannelLostError."""
        with _losses():
            line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise ChannelLostError("connection closed")
        return parse(line)

    def secure(self, send_key: bytes, receive_key: bytes) -> None:
        """Authenticate all further messages with these keys, one for each direction, and send heartbeats."""
        self._send_key, self._receive_key = send_key, receive_key
        self._beating = asyncio.create_task(self._beat())

    def send(self, **message: Any) -> None:
        """Queue a message, whose texts are shortened. If the connection is broken, `receive` raises.

        Raises ValueError if it is too long.
        """
        message = {name: shortened(value) if isinstance(value, str) else value for name, value in message.items()}
        text = json.dumps(message).encode()
        if len(text) > LONGEST_MESSAGE:
            raise ValueError(f"a message of {len(text)} bytes is too long")
        if not self._writer.is_closing():
            self._writer.write(len(text).to_bytes(_LENGTH) + _mac(self._send_key, self._sent, text) + text)
            self._sent += 1

    async def receive(self) -> Message:
        """The next message that is not a heartbeat. Raises ChannelLostError."""
        while True:
            try:
                async with asyncio.timeout(SILENCE):
                    message = await self._receive()
            except TimeoutError:
                raise ChannelLostError(f"no heartbeat for {SILENCE:.0f} s") from None
            if "beat" not in message:
                return message

    async def _receive(self) -> Message:
        assert self._receive_key
        with _losses():
            length = int.from_bytes(await self._reader.readexactly(_LENGTH))
            if length > LONGEST_MESSAGE:
                raise ChannelLostError("it sent an overlong message")
            mac, text = await self._reader.readexactly(_MAC), await self._reader.readexactly(length)
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._received, text)):
            raise ChannelLostError("message authentication failed")
        self._received += 1
        self._heard = time.monotonic()
        try:
            return parse(text)
        except ChannelLostError:
            raise MalformedError("it is not a JSON object") from None

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


def parse(text: bytes) -> Message:
    """The JSON object in a line or frame. Raises ChannelLostError if it is anything else.

    Refused too: bytes beyond ASCII, half surrogate pairs, numbers that JSON does not have, and nesting that exhausts
    Python's stack.
    """
    try:
        message = json.loads(text.decode("ascii"), parse_constant=_refuse)
        json.dumps(message, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ChannelLostError(FOREIGN)
    return message


def field(message: Message, name: str, *kinds: type) -> Any:
    """The value of a field of a message, which must be of one of these kinds. Raises MalformedError."""
    if name not in message:
        raise MalformedError(f"{name} is missing")
    if type(message[name]) not in kinds:
        raise MalformedError(f"{name} is {shortened(repr(message[name]), 100)}")
    return message[name]


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, or its start and the number of characters that are left out."""
    return text if len(text) <= longest else f"{text[:longest]}… and {len(text) - longest} more characters"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _mac(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + text, "sha256")


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    """Turns the streams' errors into ChannelLostError."""
    try:
        yield
    except asyncio.IncompleteReadError:
        raise ChannelLostError("connection closed") from None
    except OSError as error:
        raise ChannelLostError(f"connection broken: {error.strerror or error}") from error
    except ValueError:
        raise ChannelLostError("it sent an overlong line") from None


def _plain(address: str) -> str:
    """The IPv4 address in an IPv4-mapped IPv6 address; any other address unchanged."""
    return address.removeprefix("::ffff:")
