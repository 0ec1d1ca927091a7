"""Names, addresses and connections, without letting a slow name server hold up the end of the program."""

import asyncio
import contextlib
import ipaddress
import socket
import threading


async def resolve(host: str, port: int) -> list[str]:
    """The host's addresses. Raises OSError (socket.gaierror) if it has none.

    asyncio's own look-up runs in a pool that is waited for at exit, which a dead name server can stretch over minutes;
    this thread is a daemon.
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
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # Ray is at home in IPv4
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that IDNA cannot encode
            failure = error if isinstance(error, OSError) else OSError(f"not a host name: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, addresses, failure)

    threading.Thread(target=look_up, name=f"resolve {host}", daemon=True).start()
    return await result


async def connect(
    addresses: list[str], port: int, *, limit: int, local_addr: tuple[str, int] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams to the first of the addresses that answers. Raises the first address's OSError, `filename` its address.

    A host that begins to listen while its addresses are tried would be reached at a later one, an IPv6 address say,
    although it has a better one by now: those that refused are asked once more.
    """
    problem: OSError | None = None
    refused: list[str] = []
    for address in addresses:
        try:
            streams = await asyncio.open_connection(address, port, limit=limit, local_addr=local_addr)
        except OSError as error:
            error.filename = address
            problem = problem or error
            if isinstance(error, ConnectionRefusedError):
                refused.append(address)
            continue
        for earlier in refused:
            with contextlib.suppress(OSError):
                better = await asyncio.open_connection(earlier, port, limit=limit, local_addr=local_addr)
                streams[1].close()
                return better
        return streams
    raise problem or OSError("the name has no address")


def is_loopback(address: str | None) -> bool:
    """Whether an address reaches nobody but this node. /etc/hosts of Debian has 127.0.1.1 for the host's own name."""
    return address is not None and ipaddress.ip_address(address).is_loopback


def is_own(address: str) -> bool:
    """Whether this host has the address: only then can a socket be bound to it, or, without IPv6, be made at all."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
