"""The head at several addresses, of which some refuse, drop packets or belong to others: real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

import pytest

from entrypoints.wire import reach
from entrypoints.wire.channel import LONGEST_LINE, Channel, ChannelLostError
from entrypoints.wire.handshake import greet
from entrypoints.wire.reach import UnreachableError, reach_head
from tests.serving import free_port

FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
NOWHERE = "240.0.0.1"
"""An address of a reserved range, to which no route leads."""


@contextlib.contextmanager
def dropping(address: str, port: int) -> Iterator[None]:
    """An address at which connections are never answered: the kernel drops packets to a full queue."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server((address, port), backlog=0))
        for _ in range(4):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex((address, port))
        yield


def reached(
    heads: Sequence[str], port: int, *, here: Sequence[str] = (), silent: Sequence[str] = (), later: float = 0.0
) -> str:
    """The address at which the head was reached. It listens at `here`, after so many seconds; strangers at `silent`."""

    async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        with contextlib.suppress(ChannelLostError):
            await greet(channel, "token")
        await channel.close()

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def listen() -> list[asyncio.Server]:
        await asyncio.sleep(later)
        return [await asyncio.start_server(head, address, port, limit=LONGEST_LINE) for address in here]

    async def reach_it() -> str:
        servers = [await asyncio.start_server(stranger, address, port) for address in silent]
        listening = asyncio.create_task(listen())
        if not later:
            await listening
        try:
            channel = await reach_head(heads, port, "token", rank=1, hostname="n1", within=10.0)
            await channel.close()
            return channel.peer_address
        finally:
            for server in [*servers, *await listening]:
                server.close()

    return asyncio.run(reach_it())


def test_the_first_address_that_answers_is_used() -> None:
    port = free_port()
    assert reached([FIRST, NOWHERE, SECOND], port, here=[SECOND]) == SECOND
    assert reached([FIRST, SECOND], port, here=[FIRST, SECOND]) == FIRST


def test_an_address_that_drops_packets_takes_no_time_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(reach, "PATIENCE", 60.0)  # more than the head is waited for
    with dropping(FIRST, port), dropping(SECOND, port):
        assert reached([FIRST, SECOND, THIRD], port, here=[THIRD]) == THIRD


def test_a_head_that_listens_late_is_found_while_another_address_drops_packets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setattr(reach, "PATIENCE", 60.0)  # more than the head is waited for
    with dropping(FIRST, port):
        assert reached([FIRST, SECOND], port, here=[SECOND], later=1.0) == SECOND


def test_an_address_where_another_program_listens_is_not_the_heads() -> None:
    assert reached([FIRST, SECOND], free_port(), here=[SECOND], silent=[FIRST]) == SECOND


def test_a_host_that_starts_to_listen_late_is_reached_at_its_first_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(reach, "_STAGGER", 0.5)  # the second address is tried once the head has started
    monkeypatch.setattr(reach, "_RETRY", 60.0)
    with dropping(THIRD, port):
        assert reached([FIRST, THIRD, SECOND], port, here=[FIRST, SECOND], later=0.2) == FIRST


def test_the_error_names_each_address_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(reach, "PATIENCE", 0.5)
    with dropping(FIRST, port), pytest.raises(UnreachableError) as told:
        reached([FIRST, SECOND, "no.such.host.invalid"], port)
    assert told.value.causes == {
        FIRST: "no answer",
        SECOND: "connection refused",
        "no.such.host.invalid": "its name does not resolve",
    }
    assert str(told.value).startswith(f"{FIRST}: no answer; {SECOND}: connection refused; ")


def test_a_single_cause_needs_no_address() -> None:
    with pytest.raises(UnreachableError, match=r"^connection refused$") as told:
        reached([FIRST], free_port())
    assert told.value.refused


def test_all_addresses_are_tried_within_a_short_deadline() -> None:
    port = free_port()

    async def reach_them() -> None:
        await reach_head([FIRST, SECOND, THIRD, "127.0.0.5"], port, "token", rank=1, hostname="n1", within=0.4)

    with dropping(FIRST, port), pytest.raises(UnreachableError) as told:
        asyncio.run(reach_them())
    assert list(told.value.causes.values()) == ["no answer", *["connection refused"] * 3]
