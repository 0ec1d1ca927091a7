"""A shared directory as meeting place: the head leaves a note there with the token and its addresses.

It is used if the user gave no token, or if no scheduler names the head. Only the user can read the note (0600); it
appears atomically and is removed when the job ends. Without a job id (a bare mpiexec) the directory must serve this job
alone.
"""

import contextlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entrypoints.environments import Allocation
from entrypoints.environments.base import scheduler_job_id
from entrypoints.errors import PeersMissingError, TokenError
from entrypoints.host.file_systems import NETWORK_FILE_SYSTEMS, file_system
from entrypoints.host.interfaces import address_of, guess_interface
from entrypoints.host.tree import Tree
from entrypoints.options import JOB_DIR
from entrypoints.wire.secret import make_token

_LOOK_AGAIN = 0.5
"""Seconds between two attempts: shared file systems offer no event to wait for."""
_OLDEST = 600.0
"""Most seconds by which a valid note is older than this launch: nodes start at different times."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadNote:
    """The token and the addresses that the head leaves for the other nodes."""

    token: str
    heads: tuple[str, ...]
    """Addresses of the head."""


@contextlib.contextmanager
def meeting_place(
    directory: Path, allocation: Allocation, token: str | None, deadline: float
) -> Iterator[tuple[Allocation, str]]:
    """The allocation with a head, and the job's token: the head writes its note, the others read it.

    A head or token that is known already stays. Raises TokenError or PeersMissingError.
    """
    if allocation.is_head:
        token = token or make_token()
        path = leave(directory, allocation.job_id, token, own_addresses())
        try:
            yield allocation, token
        finally:
            path.unlink(missing_ok=True)
        return
    if token is None or allocation.head is None:
        note = find(directory, allocation.job_id, deadline)
        token = token or note.token
        if allocation.head is None:
            allocation = replace(allocation, head=note.heads[0], other_heads=note.heads[1:])
    yield allocation, token


def shared_home(variables: Mapping[str, str], tree: Tree) -> Path | None:
    """`~/.slipway`, if home is on a network file system and the scheduler provides a job id; else None.

    Raises TokenError if it cannot be created.
    """
    home = variables.get("HOME", "")
    if not home or scheduler_job_id(variables) is None or file_system(home, tree) not in NETWORK_FILE_SYSTEMS:
        return None
    folder = Path(home, ".slipway")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise TokenError(
            f"cannot create {folder}: {error.strerror}", f"set SLIPWAY_TOKEN on every node, or {JOB_DIR}"
        ) from error
    return folder


def own_addresses() -> list[str]:
    """This node's addresses, the one with the default route first."""
    first, _ = guess_interface(Tree())
    names = [first] if first else []
    names += [name for _, name in socket.if_nameindex() if name not in (first, "lo")]
    found = [address for name in names if (address := address_of(name))]
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def note_path(directory: Path, job_id: str) -> Path:
    """The note of a job; characters that a file name should not have become `_`."""
    name = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in job_id)
    return directory / f"slipway-{name}.json"


def leave(directory: Path, job_id: str, token: str, heads: Sequence[str]) -> Path:
    """Write the note, readable by this user only. Raises TokenError if the directory cannot be written."""
    path = note_path(directory, job_id)
    try:
        handle, temporary = tempfile.mkstemp(prefix=path.name, dir=directory)  # 0600 from the start
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"token": token, "heads": list(heads), "written": time.time()}, file)
        Path(temporary).replace(path)
    except OSError as error:
        raise TokenError(
            f"{JOB_DIR}={directory} cannot be written: {error.strerror}",
            "choose a directory that you can write on all nodes",
        ) from error
    return path


def find(directory: Path, job_id: str, deadline: float) -> HeadNote:
    """Wait for the head's note. Raises PeersMissingError at the deadline, TokenError if others can write it."""
    path = note_path(directory, job_id)
    began, give_up = time.time(), time.monotonic() + deadline
    log.info("waiting for the head's note %s", path)
    while True:
        document = _read(path)
        if document is not None and document.get("written", 0) > began - _OLDEST:
            return HeadNote(str(document["token"]), tuple(str(head) for head in document["heads"]))
        if time.monotonic() > give_up:
            raise PeersMissingError(
                f"the head left no note {path} within {deadline:g} s",
                f"check that the head started with the same {JOB_DIR}",
            )
        time.sleep(_LOOK_AGAIN)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        status = path.stat()
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenError(
            f"{path} cannot be read: {error}", "only the job's user may write in that directory"
        ) from error
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise TokenError(f"others can read or own {path}", "remove it, and choose a directory that only you can write")
    return document if isinstance(document, dict) else None
