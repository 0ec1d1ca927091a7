"""Names and addresses of hosts. A slow name server never delays the end of the program."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Iterable, Sequence

LOOPBACK = "127.0.0.1"
"""The address at which the tasks of a single node meet."""


async def resolve(host: str, port: int) -> list[str]:
    """The host's addresses. Raises OSError (socket.gaierror) if it has none.

    asyncio's own resolver uses a thread pool that Python joins at exit, which takes minutes if the name server is dead.
    This function uses a daemon thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str] | None, error: OSError | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(addresses or [])

    def look_up() -> None:
        addresses, failure = None, None
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            entries.sort(key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 first: Ray works best with it
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except (OSError, UnicodeError) as error:  # UnicodeError: IDNA cannot encode the name
            failure = error if isinstance(error, OSError) else OSError(f"not a host name: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, addresses, failure)

    try:
        threading.Thread(target=look_up, name=f"resolve {host}", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"no thread to look it up: {error}") from error
    return await result


async def resolve_within(seconds: float, hosts: Iterable[str], port: int) -> dict[str, list[str] | OSError]:
    """The addresses of each host, looked up side by side; its error if it has none, TimeoutError if it is late.

    Each lookup takes a thread.
    """

    async def look_up(host: str) -> list[str] | OSError:
        try:
            return await resolve(host, port)
        except OSError as error:
            return error

    lookups = {host: asyncio.create_task(look_up(host)) for host in dict.fromkeys(hosts)}
    try:
        if lookups:
            await asyncio.wait(lookups.values(), timeout=seconds)
        return {host: lookup.result() if lookup.done() else TimeoutError() for host, lookup in lookups.items()}
    finally:
        for lookup in lookups.values():
            lookup.cancel()


def cause_of(error: Exception) -> str:
    """The cause of a failed connection or resolution, in a few words."""
    match error:
        case TimeoutError():
            return "no answer"
        case socket.gaierror():
            return "its name does not resolve"
        case OSError(errno=int(number)):
            return os.strerror(number).lower()
        case _:
            return str(error)


async def addresses_for_peers(heads: Sequence[str], others: Sequence[str], port: int, seconds: float) -> list[str]:
    """The addresses of this host at which the others look for it under the names in `heads`; empty if that is unsure.

    It is sure if every name of this host is one of its own addresses, or resolves to them here, and packets to the
    `others` leave from one of them. It is unsure behind address translation, where the name leads to an address that
    this host does not have, where this host resolves its own name in another way than the others do, and where the
    name server takes longer than `seconds`.
    """
    answers = await resolve_within(seconds, [*heads, *others], port)

    def addresses(name: str) -> list[str]:
        answer = answers[name]
        if isinstance(answer, OSError):
            raise answer
        return answer

    try:
        head_addresses = list(dict.fromkeys(address for name in heads for address in addresses(name)))
        literal = set(head_addresses) == set(heads)
        if not all(map(is_own, head_addresses)) or (not literal and any(map(is_loopback, head_addresses))):
            return []
        routes = [_source(address) for name in others for address in addresses(name)[:1]]
    except OSError:
        return []
    return head_addresses if literal or (routes and set(routes) <= set(head_addresses)) else []


def _source(address: str) -> str:
    """The address of this host from which packets to that address leave. Sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def is_loopback(address: str | None) -> bool:
    """Whether an address reaches only this node. Debian's /etc/hosts maps the host's own name to 127.0.1.1."""
    return address is not None and ipaddress.ip_address(address).is_loopback


def is_own(address: str) -> bool:
    """Whether this host has the address, that is, can bind a socket to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
