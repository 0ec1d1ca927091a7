"""Attaching a command to a running job on one of its nodes: `ray status`, `ray job submit`, a shell.

Each node leaves a note with the cluster's address and token in its directory, which only its user can enter. The note
disappears with the directory when the job ends. Everybody may create directories in /tmp, so a note counts only if this
user owns it and its directory, nobody else can enter, and it holds nothing but known variables.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from entrypoints.errors import CommandNotFoundError, NoClusterError
from entrypoints.host.proxies import past_proxies
from entrypoints.ray.directory import PATTERN, ROOT, read_private

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With the value 0 Ray keeps 127.0.0.1 as its address. By default it takes the host's address instead, and then most of
its servers listen on all interfaces."""
VARIABLES = {
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS", LOOPBACK_ONLY),
    *("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"),
}
"""All variables that a note may set."""
_NOTE = "attach.json"
_LONGEST = 262_144
"""Bytes of a note."""


@dataclass(frozen=True)
class ClusterNote:
    """One node's description of the cluster that it is part of."""

    job_id: str
    environment: dict[str, str]
    """The variables with which a program reaches the cluster."""
    addresses: Sequence[str] = ()
    """The addresses of the job's nodes."""


def leave_note(directory: Path, job_id: str, environment: Mapping[str, str], addresses: Sequence[str] = ()) -> None:
    """Write this node's note into its Ray directory, readable by this user only."""
    temporary = directory / f".{_NOTE}"  # renamed below, so that nobody reads half a note
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(asdict(ClusterNote(job_id, dict(environment), addresses))), encoding="utf-8")
    temporary.replace(directory / _NOTE)


def find_note(job: str | None, root: Path = ROOT) -> ClusterNote:
    """The note of the user's only cluster on this node, or of the given job's. Raises NoClusterError."""
    texts = [read_private(path, _NOTE, _LONGEST) for path in sorted(root.glob(PATTERN))]
    notes = [note for text in texts if text is not None and (note := _parse(text)) is not None]
    fitting = [note for note in notes if job is None or job in (note.job_id, plain_job_id(note.job_id))]
    if len({note.environment["RAY_ADDRESS"] for note in fitting}) == 1:  # two nodes of one job may share a host
        return max(fitting, key=lambda note: len(note.environment))  # the head's note also has the dashboard
    there = ", ".join(dict.fromkeys(plain_job_id(note.job_id) for note in notes)) or "none"
    if fitting:
        raise NoClusterError(f"several clusters of yours run on this node: {there}", "choose one with --job ID")
    wanted = f"no cluster of job {job}" if job else "no cluster of yours"
    raise NoClusterError(
        f"{wanted} runs on this node (your jobs here: {there})",
        "run it as the job's user in a container of the job: docker exec CONTAINER launch attach -- COMMAND",
    )


def attach(note: ClusterNote, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, or by a shell if it is empty. Raises CommandNotFoundError."""
    words = list(command) or [environment.get("SHELL") or "/bin/sh"]
    try:
        os.execvpe(words[0], words, {**environment, **past_proxies(environment, note.addresses), **note.environment})
    except OSError as error:
        raise CommandNotFoundError(f"cannot run {words[0]!r}: {error.strerror}") from error


def plain_job_id(job_id: str) -> str:
    """The id as users know it: without Slurm's step and restart count."""
    return re.sub(r"(\+\d+)?(\.\d+)?$", "", job_id)


def _parse(text: bytes) -> ClusterNote | None:
    """None for anything but a complete note with known variables."""
    try:
        note = ClusterNote(**json.loads(text))
        known = set(note.environment) <= VARIABLES and "RAY_ADDRESS" in note.environment
        strings = all(
            isinstance(value, str) and value.isprintable()
            for value in (note.job_id, *note.environment.values(), *note.addresses)
        )
    except (ValueError, TypeError, RecursionError):
        return None
    return note if known and strings else None
