"""A shared directory as meeting place: the head leaves a note there with the token and its addresses.

It is used if the user gave no token, or if no scheduler names the head. Only the user can read the note (0600); it
appears atomically and is removed when the job ends. A killed head leaves its note behind, so a note counts only once a
head at its addresses has proved that it holds the token. Without a job id (a bare mpiexec) the directory must serve
this job alone.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from entrypoints.environments import Allocation
from entrypoints.errors import PeersMissingError, TokenError
from entrypoints.host.network.interfaces import address_of, guess_interface
from entrypoints.host.tree import Tree
from entrypoints.options import JOB_DIR
from entrypoints.wire.job_directory import PRIVATE
from entrypoints.wire.network import LOOPBACK
from entrypoints.wire.reach import UnreachableError, reach_head
from entrypoints.wire.secret import make_token

_LOOK_AGAIN = 0.5
"""Seconds between two attempts: shared file systems offer no event to wait for."""
_PATIENCE = 5.0
"""Seconds for reaching the head of a note, before the directory is looked at again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadNote:
    """The token and the addresses that the head leaves for the other nodes."""

    token: str
    heads: tuple[str, ...]
    """Addresses of the head."""


@contextlib.contextmanager
def meeting_place(
    directory: Path, allocation: Allocation, token: str | None, deadline: float, port: int, hostname: str
) -> Iterator[tuple[Allocation, str]]:
    """The allocation with a head, and the job's token: the head writes its note, the others read it.

    A head or token that is known already stays. `port` is the control port, at which the note's head must prove itself;
    `hostname` is this node's. Raises TokenError or PeersMissingError.
    """
    if directory.name == PRIVATE:
        _make_private(directory)
    if allocation.is_head:
        note = HeadNote(token or make_token(), tuple(own_addresses()))
        path = leave(directory, allocation.job_id, port, note)
        try:
            yield allocation, note.token
        finally:
            with contextlib.suppress(TokenError):
                if _read(path) == note:  # not the note of the job's next start
                    path.unlink(missing_ok=True)
        return
    if token is None or allocation.head is None:

        def doubts(note: HeadNote) -> str:
            heads = note.heads if allocation.head is None else allocation.heads
            if allocation.node_count == 1:
                heads = (LOOPBACK,)
            proven = HeadNote(token or note.token, heads)
            return asyncio.run(_doubts(proven, port, allocation.node_rank, hostname))

        note = find(directory, allocation.job_id, port, deadline, doubts)
        token = token or note.token
        if allocation.head is None:
            allocation = replace(allocation, head=note.heads[0], other_heads=note.heads[1:])
    yield allocation, token


def own_addresses() -> list[str]:
    """This node's addresses, the one with the default route first."""
    first, _ = guess_interface(Tree())
    names = [first] if first else []
    names += [name for _, name in socket.if_nameindex() if name not in (first, "lo")]
    addresses = [address for name in names if (address := address_of(name))]
    return list(dict.fromkeys(addresses)) or ["127.0.0.1"]


def _make_private(directory: Path) -> None:
    """Create the folder in the user's home. Raises TokenError."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise TokenError(
            f"cannot create {directory}: {error.strerror}", f"set SLIPWAY_TOKEN on every node, or {JOB_DIR}"
        ) from error


def note_path(directory: Path, job_id: str, port: int) -> Path:
    """The note of a job; characters that a file name should not have become `_`.

    Two jobs on the same hosts share their id, and the control port tells them apart.
    """
    name = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in job_id)
    return directory / f"slipway-{name}-{port}.json"


def leave(directory: Path, job_id: str, port: int, note: HeadNote) -> Path:
    """Write the note, readable by this user only. Raises TokenError if the directory cannot be written."""
    path = note_path(directory, job_id, port)
    try:
        handle, temporary = tempfile.mkstemp(prefix=path.name, dir=directory)  # 0600 from the start
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"token": note.token, "heads": note.heads}, file)
        Path(temporary).replace(path)
    except OSError as error:
        raise TokenError(
            f"{JOB_DIR}={directory} cannot be written: {error.strerror}",
            "choose a directory that you can write on all nodes",
        ) from error
    return path


def find(directory: Path, job_id: str, port: int, deadline: float, doubts: Callable[[HeadNote], str]) -> HeadNote:
    """Wait for the note of a living head: one of which `doubts` says nothing.

    Raises PeersMissingError at the deadline, TokenError if others can write the note.
    """
    path = note_path(directory, job_id, port)
    give_up = time.monotonic() + deadline
    log.info("waiting for the head's note %s", path)
    doubt = ""
    while True:
        note = _read(path)
        reason = doubts(note) if note is not None else ""
        if note is not None and not reason:
            return note
        if reason and reason != doubt:
            log.info("the note's head has not proved itself: %s", reason)
        doubt = reason or doubt
        if time.monotonic() > give_up:
            state = f"the head of the note {path} did not prove itself" if doubt else f"the head left no note {path}"
            raise PeersMissingError(
                f"{state} within {deadline:g} s{doubt and f': {doubt}'}",
                f"check that the head started with the same {JOB_DIR}",
            )
        time.sleep(_LOOK_AGAIN)


async def _doubts(note: HeadNote, port: int, rank: int, hostname: str) -> str:
    """Why no living head stands behind a note; empty if one has proved that it holds the token."""
    try:
        channel = await reach_head(note.heads, port, note.token, rank=rank, hostname=hostname, within=_PATIENCE)
    except UnreachableError as error:
        return f"{note.heads[0]}: {error}" if len(error.causes) == 1 else str(error)
    await channel.close()
    return ""


def _read(path: Path) -> HeadNote | None:
    """The note; None if there is none. Raises TokenError if it is no note, or if others can read or write it."""
    try:
        status = path.stat()
        if status.st_mode & 0o077 or status.st_uid != os.getuid():
            raise TokenError(
                f"others can read or own {path}", "remove it, and choose a directory that only you can write"
            )
        document = json.loads(path.read_text(encoding="utf-8"))
        return HeadNote(str(document["token"]), tuple(str(head) for head in document["heads"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenError(
            f"{path} cannot be read: {error}", "only the job's user may write in that directory"
        ) from error
