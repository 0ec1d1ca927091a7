"""The handshake over real sockets; one side is written by hand."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from entrypoints.wire.channel import Channel, ChannelLostError, Message, RefusedError, greet, introduce
from entrypoints.wire.secret import proof

HELLO: Message = {"rank": 1, "local_rank": 0}
Side = Callable[[Channel], Awaitable[Any]]


def meet(head: Side, worker: Side) -> tuple[Any, Any]:
    """The results of both sides on one connection; an exception is returned as the result."""

    async def both() -> tuple[Any, Any]:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        server = await asyncio.start_server(lambda r, w: accepted.put_nowait(Channel(r, w)), "127.0.0.1", 0)
        there = Channel(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        here = await accepted.get()
        async with asyncio.timeout(20):
            results = await asyncio.gather(head(here), worker(there), return_exceptions=True)
        await asyncio.gather(here.close(), there.close())
        server.close()
        return results[0], results[1]

    return asyncio.run(both())


async def welcoming(channel: Channel) -> Message:
    hello, answer = await greet(channel, "token")
    answer.welcome({"launch_id": "x"})
    return hello


def test_both_sides_receive_the_others_hello() -> None:
    hello, welcome = meet(welcoming, lambda channel: introduce(channel, "token", HELLO))
    assert hello == HELLO
    assert welcome == {"launch_id": "x"}


def test_a_worker_with_another_token_is_refused() -> None:
    told, refused = meet(welcoming, lambda channel: introduce(channel, "other", HELLO))
    assert isinstance(told, RefusedError)
    assert told.args == ("wrong token", HELLO)
    assert isinstance(refused, RefusedError)
    assert str(refused) == "wrong token"


def test_a_head_without_the_token_is_refused() -> None:
    async def impostor(channel: Channel) -> None:
        channel.send(challenge="c", protocol=1)
        said = await channel.receive()
        # It does not know the token, so it can only replay the worker's words and proof.
        channel.send(welcome=said["hello"], proof=said["proof"])

    _, result = meet(impostor, lambda channel: introduce(channel, "token", HELLO))
    assert isinstance(result, RefusedError)
    assert "does not know the token" in str(result)


def test_a_changed_hello_is_noticed() -> None:
    async def meddled(channel: Channel) -> Message:
        challenge = (await channel.receive())["challenge"]
        signed = proof("token", "worker", (challenge, "n"), HELLO)
        channel.send(hello={**HELLO, "rank": 2}, nonce="n", proof=signed)
        return await channel.receive()

    told, answer = meet(welcoming, meddled)
    assert isinstance(told, RefusedError)
    assert answer == {"refused": "wrong token"}


def test_a_replayed_proof_is_refused() -> None:
    async def replay(channel: Channel) -> Message:
        await channel.receive()
        channel.send(hello=HELLO, nonce="n", proof=proof("token", "worker", ("an earlier challenge", "n"), HELLO))
        return await channel.receive()

    _, answer = meet(welcoming, replay)
    assert answer == {"refused": "wrong token"}


def test_the_token_is_not_sent() -> None:
    said: list[Message] = []

    async def listening(channel: Channel) -> None:
        channel.send(challenge="c", protocol=1)
        said.append(await channel.receive())
        channel.send(refused="heard enough")

    meet(listening, lambda channel: introduce(channel, "open sesame", HELLO))
    assert said
    assert "sesame" not in str(said)


def test_another_protocol_is_refused_with_both_numbers() -> None:
    async def newer(channel: Channel) -> None:
        channel.send(challenge="c", protocol=2)

    _, result = meet(newer, lambda channel: introduce(channel, "token", HELLO))
    assert isinstance(result, RefusedError)
    assert str(result) == "the head speaks protocol 2, this node 1"


@pytest.mark.parametrize("line", [b"not json\n", b"3\n", b"{}\n"])
def test_random_bytes_are_refused(line: bytes) -> None:
    async def nonsense(channel: Channel) -> None:
        channel._writer.write(line)

    told, _ = meet(lambda channel: greet(channel, "token"), nonsense)
    assert isinstance(told, ChannelLostError)
    assert str(told) == "it does not speak this protocol"
