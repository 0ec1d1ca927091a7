"""Two processes for each launch, so that `kill -9` of either leaves nothing behind.

The first process is the one that users and schedulers know. It passes signals on and waits. The second does the work.
If the first is killed, the kernel sends ORPHANED to the second, which ends the job in order. If the second is killed,
the processes that it started become children of the first, which ends them.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable

from entrypoints.processes import become_reaper, descendants, send
from entrypoints.streams import say
from entrypoints.terminal import take_terminal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Schedulers send these some time before the end. The command then gets SIGTERM and the longer grace."""
ORPHANED = signal.SIGRTMIN
"""Tells the second process that the first has died."""
_PR_SET_PDEATHSIG = 1
_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for processes whose launch was killed."""
_LOOK_AGAIN = 0.05


def heeded() -> set[int]:
    """The signals that end or warn this launch: not those that it was started to ignore, like SIGHUP by nohup."""
    return {number for number in STOP_SIGNALS + WARNING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN}


def guarded(work: Callable[[], int]) -> int:
    """Run the work in a second process and return its status. What the work raises is raised in that process."""
    become_reaper()
    first = os.getpid()
    passed_on = heeded()
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    second = os.fork()
    if second == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ORPHANED, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        if os.getppid() != first:
            os.kill(os.getpid(), ORPHANED)
        return work()
    received: set[int] = set()

    def pass_on(number: int, _: object) -> None:
        received.add(number)
        send([second], number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = _status_of(second)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # at its exit Python would let them kill this process
    if status >= 0:
        return status
    if -status not in received:
        say(f"error: {signal.Signals(-status).name} killed this launch; ending its processes\n")
    _end(descendants)
    take_terminal()
    return 128 - status


def _status_of(child: int) -> int:
    """Wait for the child's end; negative for a signal."""
    while True:
        pid, wait_status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(wait_status)


def _end(remaining: Callable[[], Iterable[int]]) -> None:
    """End all processes, which are children of this one by now."""
    kill_at = time.monotonic() + _GRACE
    send(remaining(), signal.SIGTERM)
    while _any_child():
        if time.monotonic() > kill_at:
            send(remaining(), signal.SIGKILL)
        time.sleep(_LOOK_AGAIN)


def _any_child() -> bool:
    """Whether a child is left; reaps the dead ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
