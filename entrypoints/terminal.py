"""The terminal: which process group has it, and what Ctrl-C does there."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from entrypoints.errors import CommandNotFoundError
from entrypoints.processes import Process, ProcessTree

_LISTENER = """
import os, signal, sys
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"."))
os.read(int(sys.argv[1]), 1)
"""
"""Writes a byte for each SIGINT, until its input ends."""
_PATIENCE = 1.0
"""Seconds that a command has to end after Ctrl-C."""
_INSISTENT, _WITHIN = 3, 5.0
"""Presses of Ctrl-C within seconds, after which it is said how to end a command that handles it in another way."""

log = logging.getLogger(__name__)


def ignore_suspension() -> None:
    """Ignore Ctrl-Z in this process and those that it starts, if it has a terminal: nothing could continue them."""
    if _owns_terminal():
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)


def _owns_terminal() -> bool:
    """Whether standard input is a terminal that this process controls."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def take_terminal() -> None:
    """Take the terminal back after the command, so that the parent shell can use it."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else tcsetpgrp would stop a background process
    with contextlib.suppress(OSError):  # there is no terminal
        os.tcsetpgrp(0, os.getpgrp())


@contextlib.asynccontextmanager
async def foreground(process: Process, process_tree: ProcessTree) -> AsyncIterator[None]:
    """Let the process's group have the terminal, if there is one: it reads input and gets Ctrl-C, as under a shell.

    This process gets no Ctrl-C meanwhile, and says how to end a command that goes on.
    """
    if not _owns_terminal() or process.ended.done():
        yield
        return
    os.tcsetpgrp(0, process.pid)
    os.killpg(process.pid, signal.SIGCONT)  # it was stopped if it read before it had the terminal
    listening = asyncio.create_task(_say_how_to_end(process, process_tree))
    try:
        yield
    finally:
        listening.cancel()
        await asyncio.wait({listening})
        take_terminal()


async def _say_how_to_end(process: Process, process_tree: ProcessTree) -> None:
    presses: deque[float] = deque(maxlen=_INSISTENT)
    async for _ in _interrupts(process, process_tree, presses):
        await asyncio.wait({process.ended}, timeout=_PATIENCE)
        insists = len(presses) == _INSISTENT and presses[-1] - presses[0] < _WITHIN
        if not process.ended.done() and (insists or ignores_interrupt(process.pid)):
            log.warning("the command goes on after Ctrl-C: Ctrl-\\ ends it, `kill %d` the job", os.getppid())
            presses.clear()


async def _interrupts(process: Process, process_tree: ProcessTree, presses: "deque[float]") -> AsyncIterator[None]:
    """Yields after SIGINT from the terminal to the process's group, of which a listener is a member.

    `presses` gets the time of each.
    """
    loop, pressed = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        until, _ = _pipe(stack)  # the listener ends once this process closes the other end, or has ended
        heard, output = _pipe(stack)
        command = [sys.executable, "-I", "-S", "-c", _LISTENER, str(until.fileno())]
        try:
            process_tree.spawn(command, {}, output=output, open_files=[until.fileno()], group=process.pid)
        except CommandNotFoundError:  # the group has ended
            return

        def hear() -> None:
            presses.extend([time.monotonic()] * len(os.read(heard.fileno(), _INSISTENT)))
            pressed.set()

        loop.add_reader(heard, hear)
        stack.callback(loop.remove_reader, heard)
        while True:
            await pressed.wait()
            pressed.clear()
            yield


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return stack.enter_context(os.fdopen(reader, "rb")), stack.enter_context(os.fdopen(writer, "wb"))


def ignores_interrupt(pid: int) -> bool:
    """Whether a process ignores SIGINT; False if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) & 1 << (signal.SIGINT - 1))
    return False
