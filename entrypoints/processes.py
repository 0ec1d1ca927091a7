"""All processes that this launch started, however deep, and their end.

`launch` makes itself the reaper of its descendants (PR_SET_CHILD_SUBREAPER): a daemon that one of them leaves behind
becomes its child instead of init's. So what is below it in the process tree is exactly what it started, the death of a
daemon arrives as SIGCHLD with its status, and "none is left" is the kernel's own answer. A marker in the environment
would not do: Ray's agents overwrite theirs when they set their titles.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from entrypoints.errors import CommandNotFoundError

_PR_SET_CHILD_SUBREAPER = 36
_KILL_ROUND = 0.2
"""Seconds between two rounds of SIGKILL: whoever forks while being killed is met in the next."""
_KILL_LIMIT = 5.0
"""Seconds until a process that SIGKILL does not end (it hangs in the kernel) is given up."""

log = logging.getLogger(__name__)


class Process:
    """A child: its id and, once it has ended, its exit status (128+n for signal n)."""

    def __init__(self, pid: int, popen: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._popen = popen

    def record(self, wait_status: int) -> None:
        code = os.waitstatus_to_exitcode(wait_status)
        if self._popen is not None:
            self._popen.returncode = code  # or it would wait for the child once more
        if not self.ended.done():
            self.ended.set_result(code if code >= 0 else 128 - code)

    async def status(self) -> int:
        """Wait for the end; being cancelled while waiting does not touch the process."""
        return await asyncio.shield(self.ended)

    async def end(self, grace: float) -> None:
        """SIGTERM to the process's group, SIGKILL after `grace` seconds; returns when the process is gone."""
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, _KILL_LIMIT)):
            if self.ended.done():
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            await asyncio.wait([self.ended], timeout=patience)


class ProcessTree:
    """The descendants of this process. One per process, inside a running event loop."""

    def __init__(self) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._known: dict[int, Process] = {}
        self._childless = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: IO[bytes] | None = None,
        foreground: bool = False,
    ) -> Process:
        """Start a child in its own process group.

        With `output` it has no input and writes there; otherwise it inherits all three streams. In the `foreground` it
        also gets the terminal, if there is one. Raises CommandNotFoundError.
        """
        stdin = None if output is None else subprocess.DEVNULL
        terminal = foreground and _owns_terminal()
        if terminal:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z: nobody could continue the command
        self._childless.clear()
        try:
            popen = subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=output, stderr=output, process_group=0
            )
        except OSError as error:
            hint = "check its spelling and PATH" if isinstance(error, FileNotFoundError) else ""
            raise CommandNotFoundError(f"cannot run {command[0]!r}: {error.strerror}", hint) from error
        process = self._known[popen.pid] = Process(popen.pid, popen)
        if terminal:
            _give_terminal(popen.pid)
        return process

    def adopted(self, names: Sequence[str]) -> dict[str, Process]:
        """The children with these names that others started and left to us, to be watched from now on."""
        found = {}
        for pid in _children().get(os.getpid(), []):
            name = _name(pid)
            if name in names and pid not in self._known:
                found[name] = self._known[pid] = Process(pid)
        return found

    async def end_all(self, grace: float) -> None:
        """SIGTERM to all descendants, SIGKILL after `grace` seconds, until none is left."""
        self._reap()
        _signal(_descendants(), signal.SIGTERM)
        if await self._gone_within(grace):
            return
        give_up = time.monotonic() + _KILL_LIMIT
        while time.monotonic() < give_up:
            _signal(_descendants(), signal.SIGKILL)
            if await self._gone_within(_KILL_ROUND):
                return
        log.warning("processes %s cannot be killed: they hang in the kernel", _descendants())

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


def _children() -> dict[int, list[int]]:
    """Process ids by the id of their parent, for all processes that can be seen."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        parent = int(stat.rpartition(")")[2].split()[1])  # the name before it may hold anything
        children.setdefault(parent, []).append(int(entry.name))
    return children


def _descendants() -> list[int]:
    children = _children()
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _owns_terminal() -> bool:
    """Whether standard input is a terminal, and ours to hand on."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _give_terminal(group: int) -> None:
    """Let the command's group read from the terminal and get its Ctrl-C, as a shell would."""
    os.tcsetpgrp(0, group)
    os.killpg(group, signal.SIGCONT)  # it may have read, and been stopped for it, before it had the terminal


def take_terminal() -> None:
    """Take the terminal back after the command, so that the shell above finds it as it was."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background process that does this would be stopped
    with contextlib.suppress(OSError):  # there is no terminal
        os.tcsetpgrp(0, os.getpgrp())
