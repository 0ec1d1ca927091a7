"""The handshake of the control channel: both sides prove that they hold the token, which is never sent.

    head    {"slipway": version of the protocol, "nonce": …}
    worker  {"nonce": …, "rank": …, "host": …, "proof": HMAC(token, worker, nonces, rank, host)}
    head    {"proof": HMAC(token, head, nonces)}   or   {"refused": "wrong token"}

Token and nonces give each direction a key that authenticates all further messages: the worker's hello, and the head's
welcome or refusal. Until then both sides may be talking to a stranger. They read a few short lines of exact form within
one time limit, and believe nothing: a refusal without a proof does not end a worker.
"""

import asyncio
import contextlib
import hmac
import re
from collections.abc import Iterator

from entrypoints.wire.channel import FOREIGN, Channel, ChannelLostError, Message, field
from entrypoints.wire.secret import nonce, proof, session_key

PROTOCOL = 2
PATIENCE = 20.0
"""Seconds for the whole handshake."""
_HEX = re.compile(r"[0-9a-f]{64}")
_LONGEST_HOST = 255
_HOST = re.compile(rf"[A-Za-z0-9._:-]{{0,{_LONGEST_HOST}}}")
_UNUSUAL = re.compile(r"[^A-Za-z0-9._:-]")
_MOST_RANKS = 1_000_000
_WRONG_TOKEN = "wrong token"


class RefusedError(Exception):
    """The head, which has proved itself, refuses this node: another attempt cannot help."""


class UnprovenError(ChannelLostError):
    """The other side does not know the token, or says that this one does not."""


class StrangerError(UnprovenError):
    """A connection to the head claims to be a node of the job, with a wrong proof."""

    def __init__(self, rank: int, host: str) -> None:
        super().__init__(_WRONG_TOKEN)
        self.rank, self.host = rank, host


async def greet(channel: Channel, token: str, challenge: str | None = None) -> Message:
    """The head's side: secures the channel and returns the worker's hello.

    Raises StrangerError, MalformedError of a worker that holds the token, or ChannelLostError.

    `challenge` is the head's nonce. The head must answer the hello with `welcome` or `refused`.
    """
    challenge = challenge or nonce()
    with _time_limit():
        async with asyncio.timeout(PATIENCE):
            channel.send_line(slipway=PROTOCOL, nonce=challenge)
            line = await channel.receive_line()
            rank, host = _rank(line), _text(line, "host", _HOST)
            nonces = (challenge, _text(line, "nonce", _HEX))
            expected = proof(token, "worker", nonces, rank, host)
            if not hmac.compare_digest(_text(line, "proof", _HEX), expected):
                channel.send_line(refused=_WRONG_TOKEN)
                raise StrangerError(rank, host)
            channel.send_line(proof=proof(token, "head", nonces))
            channel.secure(session_key(token, "head", nonces), session_key(token, "worker", nonces))
            hello: Message = field(await channel.receive(), "hello", dict)
            return hello


async def introduce(channel: Channel, hello: Message) -> Message:
    """The worker's side, once the head has proved itself: returns its welcome.

    Raises RefusedError or ChannelLostError.
    """
    with _time_limit():
        async with asyncio.timeout(PATIENCE):
            channel.send(hello=hello)
            answer = await channel.receive()
    if "refused" in answer:
        raise RefusedError(str(answer["refused"]))
    welcome: Message = field(answer, "welcome", dict)
    return welcome


async def demand_proof(channel: Channel, token: str, rank: int, hostname: str) -> None:
    """The worker's side: returns once the other side has proved that it is the job's head, and the channel is secure.

    Raises UnprovenError if it is not, or ChannelLostError.
    """
    with _time_limit():
        async with asyncio.timeout(PATIENCE):
            await _secure(channel, token, rank, hostname)


async def read_challenge(channel: Channel) -> object:
    """The nonce of the program on the other side, which may be anything. Raises ChannelLostError."""
    with _time_limit():
        async with asyncio.timeout(PATIENCE):
            return (await channel.receive_line()).get("nonce")


async def _secure(channel: Channel, token: str, rank: int, hostname: str) -> None:
    """The worker's proof and the head's."""
    host = _UNUSUAL.sub("_", hostname)[:_LONGEST_HOST]
    opening = await channel.receive_line()
    if (version := opening.get("slipway")) != PROTOCOL:
        theirs = version if type(version) is int else "something else"
        raise UnprovenError(f"the program there speaks {theirs}, this node protocol {PROTOCOL}")
    nonces = (_text(opening, "nonce", _HEX), nonce())
    channel.send_line(nonce=nonces[1], rank=rank, host=host, proof=proof(token, "worker", nonces, rank, host))
    answer = await channel.receive_line()
    if answer == {"refused": _WRONG_TOKEN}:
        raise UnprovenError("the program there says that this node has the wrong token")
    if not hmac.compare_digest(_text(answer, "proof", _HEX), proof(token, "head", nonces)):
        raise UnprovenError("the program there does not know the token")
    channel.secure(session_key(token, "worker", nonces), session_key(token, "head", nonces))


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ChannelLostError(f"no handshake within {PATIENCE:.0f} s") from None


def _rank(line: Message) -> int:
    rank = line.get("rank")
    if type(rank) is not int or not 0 <= rank < _MOST_RANKS:
        raise ChannelLostError(FOREIGN)
    return rank


def _text(line: Message, name: str, form: re.Pattern[str]) -> str:
    text = line.get(name)
    if not isinstance(text, str) or not form.fullmatch(text):
        raise ChannelLostError(FOREIGN)
    return text
