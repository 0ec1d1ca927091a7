"""Whether a name leads to this head, also through address translation: real sockets on loopback."""

import asyncio
import socket

from entrypoints.wire.channel import Channel, Message
from entrypoints.wire.handshake import StrangerError
from entrypoints.wire.listener import Listener


async def admit(_channel: Channel, _hello: Message) -> None: ...


def report(_stranger: StrangerError, _address: str) -> None: ...


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)
    writer.close()


def test_a_head_recognises_itself_behind_address_translation_and_no_other_head() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    async def found() -> list[bool]:
        here, other = (Listener("token", admit, report, 64) for _ in range(2))
        here.open(port, ["127.0.0.1"])
        other.open(port, ["127.0.0.3"])
        translation = await asyncio.start_server(forward, "127.0.0.2", port)
        reached = [await here.is_reached_at(f"127.0.0.{number}", port) for number in (1, 2, 3, 4)]
        translation.close()
        for listener in (here, other):
            await listener.close()
            await listener.end()
        return reached

    assert asyncio.run(found()) == [True, True, False, False]
