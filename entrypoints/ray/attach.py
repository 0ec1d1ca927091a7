"""`launch attach`: a command beside a running job, on any of its nodes: `ray status`, `ray job submit`, a shell.

Each node leaves a note in its own Ray directory, which only its user can enter: what a program needs to reach the
cluster, Ray's token among it. The note goes with the directory when the job ends.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from entrypoints.errors import CommandNotFoundError, NoClusterError
from entrypoints.ray.directory import PATTERN

_NOTE = "attach.json"


@dataclass(frozen=True)
class ClusterNote:
    """One node's description of the cluster that it is part of."""

    job_id: str
    launch: int
    """Process id of the `launch` whose cluster it is."""
    environment: dict[str, str]
    """What a program needs to reach the cluster."""


def leave_note(directory: Path, job_id: str, environment: Mapping[str, str]) -> None:
    temporary = directory / f".{_NOTE}"  # the note appears whole
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(asdict(ClusterNote(job_id, os.getpid(), dict(environment)))), encoding="utf-8")
    temporary.replace(directory / _NOTE)


def find_note(job: str | None, root: Path = Path("/tmp")) -> ClusterNote:
    """The note of the one cluster that runs on this node, or of the one that this job has. Raises NoClusterError."""
    notes = [note for path in sorted(root.glob(f"{PATTERN}/{_NOTE}")) if (note := _read(path)) is not None]
    fitting = [note for note in notes if job is None or job in (note.job_id, plain_job_id(note.job_id))]
    if len({note.environment["RAY_ADDRESS"] for note in fitting}) == 1:  # two nodes of one job may share a machine
        return max(fitting, key=lambda note: len(note.environment))  # the head knows the dashboard
    there = ", ".join(dict.fromkeys(plain_job_id(note.job_id) for note in notes)) or "none"
    if fitting:
        raise NoClusterError(f"several clusters of yours run on this node: {there}", "choose one: --job ID")
    wanted = f"no cluster of job {job}" if job else "no cluster of yours"
    raise NoClusterError(
        f"{wanted} runs on this node (of yours: {there})",
        "go to one of the job's nodes, into its container, as its user: docker exec CONTAINER launch attach -- COMMAND",
    )


def attach(note: ClusterNote, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command, or a shell if there is none. Raises CommandNotFoundError."""
    words = list(command) or [environment.get("SHELL") or "/bin/sh"]
    try:
        os.execvpe(words[0], words, {**environment, **note.environment})
    except OSError as error:
        raise CommandNotFoundError(f"cannot run {words[0]!r}: {error.strerror}") from error


def plain_job_id(job_id: str) -> str:
    """The id as its user knows it: without Slurm's step and the count of restarts."""
    return re.sub(r"(\+\d+)?(\.\d+)?$", "", job_id)


def _read(path: Path) -> ClusterNote | None:
    """None if the note is another user's, or its launch is gone."""
    try:
        if path.stat().st_uid != os.getuid():
            return None
        note = ClusterNote(**json.loads(path.read_text(encoding="utf-8")))
        os.kill(note.launch, 0)
    except OSError:
        return None
    return note
