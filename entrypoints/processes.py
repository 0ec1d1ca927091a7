"""The processes below this launch: starting, watching and ending them.

`launch` makes itself the reaper of its descendants (PR_SET_CHILD_SUBREAPER): an orphaned daemon becomes its child
instead of init's. The tree below `launch` is therefore exactly what it started, SIGCHLD reports the death of a daemon
with its status, and the kernel itself tells when none is left. A marker in the environment would not work: Ray's agents
overwrite their environment when they set their titles.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from entrypoints.errors import CommandNotFoundError

_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 1_048_576
"""Open files where the hard limit is infinite: some programs loop over all possible ones."""
_KILL_ROUND = 0.2
"""Seconds between two rounds of SIGKILL: the next round reaches processes that were forked during the last."""
_LOOK_AGAIN = 0.1
"""Seconds between two looks at processes whose end the kernel does not tell apart from others'."""
_KILL_LIMIT = 5.0
"""Seconds until `launch` gives up on a process that hangs in the kernel and survives SIGKILL."""

log = logging.getLogger(__name__)


class Process:
    """A child process: its id and, once it has ended, its exit status (128+n for signal n)."""

    def __init__(self, pid: int, popen: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.killed_by: int | None = None
        """The signal that ended it, if one did."""
        self._popen = popen

    @property
    def spawned(self) -> bool:
        """Whether this launch started it; else it is an orphan of another process."""
        return self._popen is not None

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, and none has continued it."""
        return (_stat(self.pid) or [""])[0] == "T"

    def record(self, wait_status: int) -> None:
        """Store the status that `waitpid` returned."""
        code = os.waitstatus_to_exitcode(wait_status)
        if self._popen is not None:
            self._popen.returncode = code  # else Popen would wait for the child again
        if not self.ended.done():
            self.killed_by = -code if code < 0 else None
            self.ended.set_result(code if code >= 0 else 128 - code)

    async def status(self) -> int:
        """Wait for the end and return the exit status. Cancelling the wait leaves the process alone."""
        return await asyncio.shield(self.ended)

    async def end(self, grace: float) -> None:
        """Send SIGTERM to the process's group, SIGKILL after `grace` seconds, and wait until the process is gone."""
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, _KILL_LIMIT)):
            if self.ended.done():
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            await asyncio.wait([self.ended], timeout=patience)


class ProcessTree:
    """The descendants of this process. Create one per process, inside a running event loop."""

    def __init__(self) -> None:
        become_reaper()
        self._known: dict[int, Process] = {}
        self._childless = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: IO[bytes] | None = None,
        open_files: Sequence[int] = (),
        group: int = 0,
    ) -> Process:
        """Start a child in a process group, by default its own, which inherits these open files.

        With `output` the child writes there and has no input; otherwise it inherits all three streams. Raises
        CommandNotFoundError.
        """
        stdin = None if output is None else subprocess.DEVNULL
        self._childless.clear()
        try:
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=output,
                stderr=output,
                process_group=group,
                pass_fds=open_files,
            )
        except OSError as error:
            hint = "check its spelling and PATH" if isinstance(error, FileNotFoundError) else ""
            raise CommandNotFoundError(f"cannot run {command[0]!r}: {error.strerror}", hint) from error
        self._known[popen.pid] = Process(popen.pid, popen)
        return self._known[popen.pid]

    def adopted(self, names: Sequence[str]) -> dict[str, Process]:
        """The orphans with these names that became children of this process, by name; watched from now on."""
        processes = {}
        for pid in _children().get(os.getpid(), []):
            name = _name(pid)
            if name in names and pid not in self._known:
                processes[name] = self._known[pid] = Process(pid)
        return processes

    async def end_all(self, grace: float) -> None:
        """Send SIGTERM to all descendants, then SIGKILL after `grace` seconds until none is left."""
        self._reap()
        send(descendants(), signal.SIGTERM)
        if await self._gone_within(grace):
            return
        give_up = time.monotonic() + _KILL_LIMIT
        while time.monotonic() < give_up:
            send(descendants(), signal.SIGKILL)
            if await self._gone_within(_KILL_ROUND):
                return
        log.warning("processes %s cannot be killed: they hang in the kernel", descendants())

    async def end_orphans(self, grace: float) -> None:
        """End the children that this process did not start itself, and all below them: what a start left behind."""
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, _KILL_LIMIT)):
            give_up = time.monotonic() + patience
            send(self._orphans(), number)
            while self._orphans() and time.monotonic() < give_up:
                await asyncio.sleep(_LOOK_AGAIN)

    def _orphans(self) -> list[int]:
        spawned = {pid for pid, process in self._known.items() if process.spawned}
        return below([pid for pid in _children().get(os.getpid(), []) if pid not in spawned])

    async def _gone_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._childless.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless.set()
                return
            if pid == 0:
                return
            if process := self._known.pop(pid, None):
                process.record(wait_status)


def become_reaper() -> None:
    """From now on orphans among this process's descendants become its children. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one, for this process and its children.

    The head needs one file for each node, and Ray several for each worker.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def raise_process_limit() -> None:
    """Raise the soft limit of processes and threads to the hard one, which preflight judges."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def _children() -> dict[int, list[int]]:
    """The ids of all visible processes, by the id of their parent."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        if fields := _stat(int(entry.name)):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    return children


def _stat(pid: int) -> list[str]:
    """State, parent and what follows in a process's line of /proc; empty if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return stat.rpartition(")")[2].split()  # the name before it may contain spaces and brackets


def descendants() -> list[int]:
    """The ids of all processes below this one."""
    return below([os.getpid()])[1:]


def below(roots: Iterable[int]) -> list[int]:
    """The ids of these processes and all below them, parents first."""
    children = _children()
    pids = list(roots)
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def send(pids: Iterable[int], number: int) -> None:
    """Send the signal to the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
