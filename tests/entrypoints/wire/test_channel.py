"""Handshake and messages over real sockets; one side is often written by hand."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from entrypoints.wire import handshake
from entrypoints.wire.channel import (
    FOREIGN,
    LONGEST_LINE,
    Channel,
    ChannelLostError,
    MalformedError,
    Message,
    _mac,
    parse,
)
from entrypoints.wire.handshake import (
    PROTOCOL,
    RefusedError,
    StrangerError,
    UnprovenError,
    demand_proof,
    greet,
    introduce,
)
from entrypoints.wire.secret import proof

HELLO: Message = {"rank": 1, "local_rank": 0, "hostname": "n1"}
NONCE = "0" * 64


class OpenChannel(Channel):
    """A channel with its writer, for bytes that no channel would send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.writer = writer


Side = Callable[[OpenChannel], Awaitable[Any]]


def meet(head: Side, worker: Side) -> tuple[Any, Any]:
    """The results of both sides on one connection; an exception is returned as the result."""

    async def both() -> tuple[Any, Any]:
        accepted: asyncio.Queue[OpenChannel] = asyncio.Queue()
        server = await asyncio.start_server(
            lambda r, w: accepted.put_nowait(OpenChannel(r, w)), "127.0.0.1", 0, limit=LONGEST_LINE
        )
        there = OpenChannel(*await asyncio.open_connection(*server.sockets[0].getsockname(), limit=LONGEST_LINE))
        here = await accepted.get()
        async with asyncio.timeout(20):
            results = await asyncio.gather(head(here), worker(there), return_exceptions=True)
        await asyncio.gather(here.close(), there.close())
        server.close()
        return results[0], results[1]

    return asyncio.run(both())


async def welcoming(channel: Channel) -> Message:
    hello = await greet(channel, "token")
    channel.send(welcome={"launch_id": "x"})
    return hello


async def introducing(channel: Channel, token: str = "token") -> Message:
    await demand_proof(channel, token, HELLO["rank"], HELLO["hostname"])
    return await introduce(channel, HELLO)


def claim(challenge: str, token: str = "token", rank: int = 1, host: str = "n1") -> Message:
    """A worker's line with the right proof."""
    signed = proof(token, "worker", (challenge, NONCE), rank, host)
    return {"nonce": NONCE, "rank": rank, "host": host, "proof": signed}


def test_both_sides_receive_the_others_hello() -> None:
    hello, welcome = meet(welcoming, introducing)
    assert hello == HELLO
    assert welcome == {"launch_id": "x"}


def test_a_worker_with_another_token_is_a_stranger() -> None:
    told, refused = meet(welcoming, lambda channel: introducing(channel, "other"))
    assert isinstance(told, StrangerError)
    assert (told.rank, told.host, str(told)) == (1, "n1", "wrong token")
    assert isinstance(refused, UnprovenError)
    assert "wrong token" in str(refused)


def test_the_reason_of_a_head_that_has_proved_itself_ends_a_worker() -> None:
    async def refusing(channel: Channel) -> None:
        await greet(channel, "token")
        channel.send(refused="rank 1 is already taken")

    _, result = meet(refusing, introducing)
    assert isinstance(result, RefusedError)
    assert str(result) == "rank 1 is already taken"


@pytest.mark.parametrize("refusal", ["wrong token", "go away\x1b]0;owned\x07"])
def test_a_refusal_without_a_proof_does_not_end_a_worker(refusal: str) -> None:
    async def impostor(channel: Channel) -> None:
        channel.send_line(slipway=PROTOCOL, nonce=NONCE)
        await channel.receive_line()
        channel.send_line(refused=refusal)

    _, result = meet(impostor, introducing)
    assert isinstance(result, ChannelLostError)  # after which a worker tries again
    assert "\x1b" not in str(result)


def test_a_head_without_the_token_is_not_believed() -> None:
    async def impostor(channel: Channel) -> None:
        channel.send_line(slipway=PROTOCOL, nonce=NONCE)
        said = await channel.receive_line()
        channel.send_line(proof=said["proof"])  # it can only replay the worker's own proof

    _, result = meet(impostor, introducing)
    assert isinstance(result, UnprovenError)
    assert "does not know the token" in str(result)


@pytest.mark.parametrize("change", [{"rank": 2}, {"host": "n2"}, {"nonce": "1" * 64}])
def test_a_changed_claim_is_noticed(change: Message) -> None:
    async def meddled(channel: Channel) -> Message:
        challenge = (await channel.receive_line())["nonce"]
        channel.send_line(**claim(challenge) | change)
        return await channel.receive_line()

    told, answer = meet(welcoming, meddled)
    assert isinstance(told, StrangerError)
    assert answer == {"refused": "wrong token"}


def test_a_replayed_proof_is_refused() -> None:
    async def replay(channel: Channel) -> Message:
        await channel.receive_line()
        channel.send_line(**claim("an earlier challenge"))
        return await channel.receive_line()

    _, answer = meet(welcoming, replay)
    assert answer == {"refused": "wrong token"}


def test_the_token_is_not_sent() -> None:
    said: list[Message] = []

    async def listening(channel: Channel) -> None:
        channel.send_line(slipway=PROTOCOL, nonce=NONCE)
        said.append(await channel.receive_line())
        channel.send_line(refused="wrong token")

    meet(listening, lambda channel: introducing(channel, "open sesame"))
    assert said
    assert "sesame" not in str(said)


def test_another_protocol_is_named_with_both_numbers() -> None:
    async def newer(channel: Channel) -> None:
        channel.send_line(slipway=3, nonce=NONCE)

    _, result = meet(newer, introducing)
    assert isinstance(result, UnprovenError)
    assert str(result) == "the program there speaks 3, this node protocol 2"


DEEP = b"[" * 1_000 + b"\n"
SURROGATE = b'{"nonce": "\\ud800", "rank": 1, "host": "\\udfff", "proof": "\\ud800"}\n'
STRANGE_LINES = {
    "no JSON": b"not json\n",
    "a number": b"3\n",
    "an empty object": b"{}\n",
    "half a surrogate pair": SURROGATE,
    "deep nesting": DEEP,
    "bytes": b"\xff\xfe\x00\n",
    "a heartbeat": b'{"beat": true}\n',
    "a NaN": b'{"nonce": NaN}\n',
    "control characters": json.dumps({**claim(NONCE), "host": "\x1b[2J"}).encode() + b"\n",
    "a rank of another type": json.dumps({**claim(NONCE), "rank": True}).encode() + b"\n",
    "a negative rank": json.dumps({**claim(NONCE), "rank": -1}).encode() + b"\n",
}


@pytest.mark.parametrize("line", STRANGE_LINES.values(), ids=STRANGE_LINES.keys())
def test_the_head_hangs_up_on_strange_lines(line: bytes) -> None:
    async def nonsense(channel: OpenChannel) -> None:
        channel.writer.write(line)

    told, _ = meet(welcoming, nonsense)
    assert isinstance(told, ChannelLostError)
    assert str(told) == FOREIGN


@pytest.mark.parametrize("line", [b"3\n", b"{}\n", b'{"proof": "\\ud800"}\n', DEEP, b"\xff\n"])
def test_a_worker_hangs_up_on_strange_lines(line: bytes) -> None:
    async def nonsense(channel: OpenChannel) -> None:
        channel.send_line(slipway=PROTOCOL, nonce=NONCE)
        await channel.receive_line()
        channel.writer.write(line)

    _, result = meet(nonsense, introducing)
    assert isinstance(result, ChannelLostError)
    assert str(result) == FOREIGN


def test_a_line_of_a_stranger_is_short() -> None:
    async def long(channel: OpenChannel) -> None:
        channel.writer.write(b'{"nonce": "' + b"0" * 5_000 + b'"}\n')

    told, _ = meet(welcoming, long)
    assert isinstance(told, ChannelLostError)
    assert str(told) == "it sent an overlong line"


def test_a_stranger_cannot_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PATIENCE", 0.5)

    async def drip(channel: OpenChannel) -> None:
        for _ in range(20):
            channel.writer.write(b" ")
            await asyncio.sleep(0.1)

    told, _ = meet(welcoming, drip)
    assert isinstance(told, ChannelLostError)
    assert "no handshake within" in str(told)


def with_altered_frames(alter: Callable[[list[bytes]], list[bytes]]) -> Any:
    """What the head receives when somebody on the wire alters the two frames that follow the worker's hello."""

    async def head(channel: Channel) -> list[Message]:
        await welcoming(channel)
        return [await channel.receive(), await channel.receive()]

    async def worker(channel: OpenChannel) -> None:
        await introducing(channel)
        written: list[bytes] = []
        channel.writer.write, write = written.append, channel.writer.write  # type: ignore[method-assign]
        channel.send(ray="started")
        channel.send(failed="out of memory")
        for frame in alter(written):
            write(frame)

    return meet(head, worker)[0]


def test_messages_arrive_as_they_were_sent() -> None:
    assert with_altered_frames(lambda frames: frames) == [{"ray": "started"}, {"failed": "out of memory"}]


@pytest.mark.parametrize(
    "alter",
    [
        lambda frames: [frames[0].replace(b"started", b"stopped"), frames[1]],
        lambda frames: [frames[0], frames[0]],
        lambda frames: [frames[1], frames[0]],
        lambda frames: [frames[1]],
        lambda frames: [frames[0], b"\x00\x00\x00\x02" + bytes(32) + b"{}"],
    ],
    ids=["altered", "replayed", "reordered", "dropped", "invented"],
)
def test_messages_that_somebody_alters_lose_the_channel(alter: Callable[[list[bytes]], list[bytes]]) -> None:
    result = with_altered_frames(alter)
    assert isinstance(result, ChannelLostError)
    assert str(result) == "message authentication failed"


def test_an_overlong_message_is_refused_before_it_is_read() -> None:
    result = with_altered_frames(lambda _: [b"\xff\xff\xff\xff" + bytes(100)])
    assert str(result) == "it sent an overlong message"


@pytest.mark.parametrize(
    "text", [b"[" * 60_000, b'{"a":' * 10_000, b'{"a": "\\udc00"}', b'{"a": 1e999, "b": Infinity}']
)
def test_strange_texts_are_no_messages(text: bytes) -> None:
    with pytest.raises(ChannelLostError):
        parse(text)


def test_the_texts_of_a_message_are_shortened() -> None:
    async def head(channel: Channel) -> Message:
        await welcoming(channel)
        return await channel.receive()

    async def worker(channel: Channel) -> None:
        await introducing(channel)
        channel.send(failed="\U0001f4a5" * 2_000_000, status=14)

    received = meet(head, worker)[0]
    assert received["status"] == 14
    assert received["failed"].endswith("… and 1990000 more characters")


@pytest.mark.parametrize("hello", [{"hello": 5}, {"hello": None}, {"greetings": {}}])
def test_a_hello_of_the_wrong_form_is_named(hello: Message) -> None:
    async def worker(channel: Channel) -> None:
        await demand_proof(channel, "token", 1, "n1")
        channel.send(**hello)

    told, _ = meet(welcoming, worker)
    assert isinstance(told, MalformedError)
    assert str(told).startswith("it sent a message of the wrong form: hello is ")


def test_what_is_no_json_from_a_side_that_knows_the_token_is_named() -> None:
    async def head(channel: Channel) -> Message:
        await welcoming(channel)
        return await channel.receive()

    async def worker(channel: OpenChannel) -> None:
        await introducing(channel)
        text = b"not json"
        channel.writer.write(len(text).to_bytes(4) + _mac(channel._send_key, channel._sent, text) + text)

    told, _ = meet(head, worker)
    assert str(told) == "it sent a message of the wrong form: it is not a JSON object"
