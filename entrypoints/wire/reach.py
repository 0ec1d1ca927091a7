"""Reaching the job's head: all its names and addresses are tried side by side, each in time of its own.

A name may lead to several hosts, an address may be that of a bridge that every host has, and firewalls drop packets
without an answer. So an address counts only once the program there has proved that it holds the token.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from entrypoints.wire.channel import LONGEST_LINE, Channel, ChannelLostError
from entrypoints.wire.handshake import UnprovenError, demand_proof
from entrypoints.wire.network import cause_of, is_loopback, resolve

PATIENCE = 5.0
"""Seconds for a connection to each address, and for the resolution of each name."""
_STAGGER = 0.25
"""Seconds after which the next address is tried beside the one before, as in RFC 8305 (Happy Eyeballs)."""
_RETRY = 0.5
"""Seconds after which an address that refused is tried again while others have not answered yet."""


class UnreachableError(Exception):
    """No address of the head answered. The message has the cause of each."""

    def __init__(self, causes: dict[str, str], *, unproven: str = "", refused: bool = False) -> None:
        several = len(causes) > 1
        super().__init__("; ".join(f"{where}: {cause}" if several else cause for where, cause in causes.items()))
        self.causes = causes
        self.unproven = unproven
        """The cause of an address where another program answers; empty if there is none."""
        self.refused = refused
        """Whether nothing listens at any of them: the head may not have started yet."""


Attempt = Callable[[str], Awaitable[Channel]]


async def reach_head(
    heads: Sequence[str],
    port: int,
    token: str,
    *,
    rank: int,
    hostname: str,
    within: float,
    source: tuple[str, int] | None = None,
) -> Channel:
    """A channel to the head, which has proved that it holds the token.

    `rank` and `hostname` are this node's, `source` the address to connect from. Raises UnreachableError after `within`
    seconds at the latest.
    """
    return await _first(heads, lambda name: _reach_name(name, port, token, rank, hostname, source, within), within)


async def _reach_name(
    name: str, port: int, token: str, rank: int, hostname: str, source: tuple[str, int] | None, within: float
) -> Channel:
    async def reach_address(address: str) -> Channel:
        try:
            async with asyncio.timeout(PATIENCE):
                streams = await asyncio.open_connection(address, port, limit=LONGEST_LINE, local_addr=source)
        except OSError as error:
            if is_loopback(address) and address != name:
                itself = f"its name resolves to {address}, which is this node itself"
                raise type(error)(f"{cause_of(error)}; {itself}") from error
            raise
        channel = Channel(*streams)
        try:
            await demand_proof(channel, token, rank, hostname)
        except BaseException:
            await channel.close()
            raise
        return channel

    try:
        async with asyncio.timeout(PATIENCE):
            addresses = await resolve(name, port)
    except TimeoutError:
        raise UnreachableError({name: "its name server does not answer"}) from None
    return await _first(addresses, reach_address, within)


async def _first(candidates: Sequence[str], attempt: Attempt, within: float) -> Channel:
    """The channel of the first attempt that succeeds; of two at once the earlier candidate's.

    They begin one after the other. Raises UnreachableError once each has failed.
    """
    candidates = list(dict.fromkeys(candidates))
    loop = asyncio.get_running_loop()
    until = loop.time() + within
    stagger = min(_STAGGER, within / (2 * len(candidates)))
    begins = {candidate: loop.time() + index * stagger for index, candidate in enumerate(candidates)}
    running: dict[asyncio.Future[Channel], str] = {}
    failed: dict[str, Exception] = {}
    try:
        while (running or begins.keys() - failed.keys()) and loop.time() < until:
            for candidate in [candidate for candidate, begin in begins.items() if begin <= loop.time()]:
                del begins[candidate]
                running[asyncio.ensure_future(attempt(candidate))] = candidate
            pause = max(0.0, min([until, *begins.values()]) - loop.time())
            done, _ = await asyncio.wait(running, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            for attempted in sorted(done, key=lambda future: candidates.index(running[future])):
                error = attempted.exception()
                if error is None:
                    return await _preferred(attempted, running, failed, candidates, attempt)
                candidate = running.pop(attempted)
                if not isinstance(error, (OSError, TimeoutError, ChannelLostError, UnreachableError)):
                    raise error
                failed[candidate] = error
                if _is_refusal(error):
                    begins[candidate] = loop.time() + _RETRY
                for other in [other for other in candidates if other in begins and other not in failed][:1]:
                    begins[other] = loop.time()  # the next one's turn
    finally:
        await _close(running)
    raise _summary({candidate: failed.get(candidate, TimeoutError()) for candidate in candidates})


async def _preferred(
    answered: asyncio.Future[Channel],
    running: dict[asyncio.Future[Channel], str],
    failed: dict[str, Exception],
    candidates: Sequence[str],
    attempt: Attempt,
) -> Channel:
    """The channel that answered, or one of an earlier candidate that refused: the head may have started meanwhile, and
    earlier addresses are better ones, IPv4 say."""
    for candidate in candidates[: candidates.index(running[answered])]:
        if candidate in failed and _is_refusal(failed[candidate]):
            try:
                return await attempt(candidate)
            except (OSError, TimeoutError, ChannelLostError, UnreachableError):
                continue
    del running[answered]
    return answered.result()


async def _close(running: dict[asyncio.Future[Channel], str]) -> None:
    """End the attempts that are not needed, also those that have succeeded."""
    for attempted in running:
        attempted.cancel()
    for result in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(result, Channel):
            await result.close()


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, ConnectionRefusedError) or (isinstance(error, UnreachableError) and error.refused)


def _summary(failed: dict[str, Exception]) -> UnreachableError:
    causes: dict[str, str] = {}
    unproven = ""
    for candidate, error in failed.items():
        if isinstance(error, UnreachableError):
            several = len(error.causes) > 1
            causes |= error.causes if several else {candidate: str(error)}
            unproven = unproven or error.unproven
        else:
            causes[candidate] = cause_of(error)
            unproven = unproven or (str(error) if isinstance(error, UnprovenError) else "")
    return UnreachableError(causes, unproven=unproven, refused=all(map(_is_refusal, failed.values())))
