"""The control port: accepts connections, and lets only those in that hold the token.

Everybody who reaches the port can connect. A connection that has proved nothing lives for a few seconds at most, and
their number is limited. Beyond it the oldest one from the busiest address goes: a handshake takes milliseconds.
"""

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence

from entrypoints.wire.channel import LONGEST_LINE, Channel, ChannelLostError, MalformedError, Message
from entrypoints.wire.handshake import StrangerError, greet, read_challenge
from entrypoints.wire.secret import nonce

_BACKLOG = 4096
"""Connections that may wait to be accepted: schedulers start thousands of nodes in the same second."""
_PROBE = 2.0
"""Seconds for a connection of this program to itself."""
_BREATH = 0.2
"""Seconds until another connection is accepted after the system refused one, mostly for lack of open files."""

log = logging.getLogger(__name__)


class Listener:
    """The server on the control port."""

    def __init__(
        self,
        token: str,
        admit: Callable[[Channel, Message], Awaitable[None]],
        report: Callable[[StrangerError | MalformedError, str], None],
        most_strangers: int,
    ) -> None:
        """`admit` gets each channel that has proved itself, with its hello, and keeps it open until it returns.

        `report` gets wrong proofs, and wrong messages after a right one, with the address that they came from.
        """
        self._token = token
        self._admit, self._report = admit, report
        self._most_strangers = most_strangers
        self._accepting: list[asyncio.Task[None]] = []
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Connections that have proved nothing, the oldest first, with their addresses."""
        self._serving: set[asyncio.Task[None]] = set()
        self._challenges: set[str] = set()
        """The nonces of the connections that have proved nothing."""
        self._short_of_files = False

    def open(self, port: int, addresses: Sequence[str] = ()) -> None:
        """Listen on these addresses of this host, on all without any. Raises OSError."""
        everywhere = ["0.0.0.0", *(["::"] if socket.has_dualstack_ipv6() else [])]
        for address in addresses or everywhere:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
            listening.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listening)))

    async def is_reached_at(self, address: str, port: int) -> bool:
        """Whether a connection to this address arrives here, also through address translation."""
        try:
            async with asyncio.timeout(_PROBE):
                channel = Channel(*await asyncio.open_connection(address, port, limit=LONGEST_LINE))
                try:
                    return await read_challenge(channel) in self._challenges
                finally:
                    await channel.close()
        except (OSError, TimeoutError, ChannelLostError):
            return False

    @property
    def is_open(self) -> bool:
        return bool(self._accepting)

    async def close(self) -> None:
        """Accept no further connection."""
        await _cancelled(self._accepting)

    async def end(self) -> None:
        """Close all connections."""
        await _cancelled(self._serving)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, address = await loop.sock_accept(listening)
                except OSError as error:
                    self._make_room(error)
                    await asyncio.sleep(_BREATH)
                    continue
                if len(self._strangers) >= self._most_strangers:
                    self._drop_one()
                task = asyncio.create_task(self._serve(connection))
                self._strangers[task] = str(address[0])
                self._serving.add(task)
                task.add_done_callback(self._forget)
                await asyncio.sleep(0)  # accepting alone never lets the handshakes proceed

    async def _serve(self, connection: socket.socket) -> None:
        channel = Channel(*await asyncio.open_connection(sock=connection, limit=LONGEST_LINE))
        address, challenge = channel.peer_address, nonce()
        self._challenges.add(challenge)
        try:
            hello = await greet(channel, self._token, challenge)
            self._challenges.discard(challenge)
            self._strangers.pop(_current_task(), None)
            await self._admit(channel, hello)
        except (StrangerError, MalformedError) as error:
            self._report(error, address)
        except ChannelLostError as lost:
            log.debug("a connection from %s failed: %s", address, lost)
        finally:
            self._challenges.discard(challenge)
            await channel.close()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._serving.discard(task)

    def _make_room(self, error: OSError) -> None:
        if not self._short_of_files:
            log.warning("cannot accept all connections: %s; strangers are dropped first", error.strerror)
        self._short_of_files = True
        if self._strangers:
            self._drop_one()

    def _drop_one(self) -> None:
        """Close the oldest connection of the address that has the most."""
        busiest, _ = Counter(self._strangers.values()).most_common(1)[0]
        oldest = next(task for task, address in self._strangers.items() if address == busiest)
        del self._strangers[oldest]
        oldest.cancel()


async def _cancelled(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
