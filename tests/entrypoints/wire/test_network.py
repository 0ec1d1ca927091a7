"""The addresses at which a host listens, and the interfaces of addresses, with real sockets on loopback."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from entrypoints.host.network.interfaces import address_of, bracketed, interface_of
from entrypoints.wire import network
from entrypoints.wire.network import addresses_for_peers, resolve_within

NOWHERE = "240.0.0.1"
"""An address of a reserved range, to which no route leads."""


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_the_head_listens_only_where_its_peers_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are resolved by a fake; addresses and routes are real: loopback's, of which 127.0.0.0/8 all are."""
    names = {"head": ["127.0.0.1"], "both": ["127.0.0.1", "127.0.0.2"], "peer": ["127.0.0.9"], "far": [NOWHERE]}

    async def resolve(host: str, _port: int) -> list[str]:
        if host in names:
            return names[host]
        if host == "unknown":
            raise socket.gaierror(-2, "Name or service not known")
        return [host]

    def found(*heads: str, others: Sequence[str] = ("peer",)) -> list[str]:
        return asyncio.run(addresses_for_peers(heads, others, 5, 10.0))

    monkeypatch.setattr(network, "resolve", resolve)
    assert found("127.0.0.1", others=()) == ["127.0.0.1"]  # an address has one meaning everywhere
    assert found("head") == []  # Debian's 127.0.1.1: its name leads other hosts elsewhere
    monkeypatch.setattr(network, "is_loopback", lambda _: False)  # from here on these stand for outer addresses
    assert found("head") == ["127.0.0.1"]
    assert found("both", "127.0.0.2") == ["127.0.0.1", "127.0.0.2"]
    assert found("head", others=()) == []  # nothing says that other hosts resolve the name in the same way
    assert found("head", others=["unknown"]) == []
    assert found("127.0.0.5", "far") == found("unknown") == found(NOWHERE) == []  # behind address translation
    monkeypatch.setattr(network, "_source", lambda _: "127.0.0.7")
    assert found("head") == []  # the peers are in another network than the one that the name leads to


@pytest.mark.usefixtures("ipv6")
def test_an_interface_is_found_by_its_ipv6_address() -> None:
    assert interface_of("::1") == "lo"


def test_a_foreign_address_belongs_to_no_interface() -> None:
    assert (interface_of("192.0.2.77"), interface_of("2001:db8::77")) == (None, None)


def test_an_interface_is_represented_by_its_ipv4_address() -> None:
    assert (address_of("lo"), address_of("no-such-interface")) == ("127.0.0.1", None)


@pytest.mark.parametrize(("address", "shown"), [("127.0.0.1", "127.0.0.1"), ("fd00::2", "[fd00::2]")])
def test_ipv6_addresses_get_brackets_before_a_port(address: str, shown: str) -> None:
    assert bracketed(address) == shown


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A name server that knows nodes with `known` in their names, and does not answer for those with `silent`."""
    answer = threading.Event()

    def look_up(host: str, port: int, **_: Any) -> Any:
        if "silent" in host:
            answer.wait()
        if "known" not in host:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield
    answer.set()


@pytest.mark.usefixtures("names")
def test_names_are_looked_up_side_by_side_within_one_time_limit() -> None:
    hosts = [*(f"silent-{number}" for number in range(20)), "known-1", "nobody"]
    answers = asyncio.run(resolve_within(0.5, hosts, 80))
    assert [type(answers[host]) for host in hosts] == [*[TimeoutError] * 20, list, socket.gaierror]
    assert answers["known-1"] == ["192.0.2.1"]
