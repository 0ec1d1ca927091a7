"""The program inside the sandbox: `python -I sandboxed.py`, with a job on standard input. Standard library only.

It runs an untrusted program once per test, each time in a forked process with fewer rights, and writes a line of JSON
per test to standard output. The expected outputs never come here, so a program cannot look them up.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# What programs of the usual test collections expect to be imported. `builtins` last: it takes its names back.
MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing", "builtins"),
)
PRELUDE = "".join(f"import {name}\nfrom {name} import *\n" for name in MODULES)
MOST_OUTPUT = 2**20  # bytes of output that are read
MOST_ERRORS = 2**16
MOST_FILE = 16 * 2**20
NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 1, 38, 22, 2
_NEW_NETWORK, _NEW_USER, _THREAD = 0x40000000, 0x10000000, 0x10000
# Linux's numbers: clone, kill, tgkill, and calls that no program needs (socket, fork and vfork, tkill, ptrace,
# process_vm_readv and _writev, mount, unshare, setns). Newer calls have the same number everywhere.
# socketpair stays: asyncio needs it, and it reaches nobody.
_CALLS = {
    "x86_64": (0xC000003E, 56, 62, 234, (41, 57, 58, 200, 101, 310, 311, 165, 272, 308)),
    "aarch64": (0xC00000B7, 220, 129, 131, (198, 130, 117, 270, 271, 40, 97, 268)),
}
_CLONE3, _NEWER = 435, (424, 425, 438)  # pidfd_send_signal, io_uring_setup, pidfd_getfd


def main() -> None:
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    job = json.load(sys.stdin)
    for name in MODULES:
        import_module(name)
    for given in job["inputs"]:
        sys.stdout.write(json.dumps(_test(job, given)) + "\n")
        sys.stdout.flush()


def _test(job: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """What the program wrote or returned, or why it failed."""
    for path in Path().iterdir():
        with suppress(OSError):
            path.unlink()
    child = os.fork()
    if child == 0:
        _run(job, given)
    try:
        ready, _, _ = select.select([os.pidfd_open(child)], [], [], job["seconds"])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    written = {"output": _written("output", MOST_OUTPUT), "errors": _written("errors", MOST_ERRORS)}
    if not ready:
        return {"failure": f"no result within {job['seconds']:g} s", **written}
    if status != 0:
        return {"failure": f"the program ended with status {os.waitstatus_to_exitcode(status)}", **written}
    return written


def _written(name: str, most: int) -> str:
    try:
        with Path(name).open("rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


def _run(job: Mapping[str, Any], given: Any) -> None:
    """Runs the program in this forked process, and ends it."""
    status = 1
    try:
        os.setpgid(0, 0)
        Path("input").write_text(given if job["function"] is None else "", encoding="utf-8")
        writing = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        for place, name, flags in ((0, "input", os.O_RDONLY), (1, "output", writing), (2, "errors", writing)):
            os.dup2(os.open(name, flags, 0o666), place)
        sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
        confine(job["seconds"], job["memory_mb"])
        sys.setrecursionlimit(600_000)
        _execute(job, given)
        sys.stdout.flush()
        sys.stderr.flush()
        status = 0
    except SystemExit as ended:
        status = 0 if ended.code in (None, 0) else 1
        with suppress(OSError, ValueError):
            if isinstance(ended.code, str):
                sys.stderr.write(f"{ended.code}\n")
            sys.stdout.flush()
            sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001 - an untrusted program may raise anything
        status = 1
        with suppress(BaseException):
            sys.stdout.flush()
            _explain(error)
    finally:
        os._exit(status)


def _explain(error: BaseException) -> None:
    """Writes the error as Python would, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != "solution.py":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()


def _execute(job: Mapping[str, Any], given: Any) -> None:
    """Runs a program that reads standard input; or defines a function, calls it and writes its result as JSON."""
    program, function = job["program"], job["function"]
    scope: dict[str, Any] = {"__name__": "__main__" if function is None else "solution"}
    if job["prelude"]:
        exec(compile(PRELUDE, "prelude.py", "exec"), scope)
    if function is not None:
        scope.pop(function, None)  # the program must define it, even if a module of the prelude does
    exec(compile(program, "solution.py", "exec"), scope)
    if function is not None:
        place = scope["Solution"]() if "Solution" in scope else None
        result = (scope[function] if place is None else getattr(place, function))(*given)
        sys.stdout.seek(0) if sys.stdout.seekable() else None
        sys.stdout.truncate()
        json.dump(result, sys.stdout)


def confine(seconds: float, memory_mb: int) -> None:
    """Takes rights away from this process for good: limits, files, network, other processes.

    Each measure that the kernel or container does not allow is left out; `sandbox.check` tells the user.
    """
    for limit, value in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_FSIZE, MOST_FILE),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if _libc.unshare(_NEW_NETWORK) != 0:  # with the right to do so
        _libc.unshare(_NEW_USER | _NEW_NETWORK)  # without it
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _restrict_files()
    _filter_calls()


def _restrict_files() -> None:
    """With Landlock: the temporary directory, and reading what Python needs. Other processes' /proc stays closed."""
    create, add, restrict = 444, 445, 446
    version = _libc.syscall(create, None, 0, 1)
    if version < 1:
        return
    everything = (1 << (15 if version >= 3 else 14 if version == 2 else 13)) - 1
    reading, writing = 0b1101, 0b0110
    rules = ctypes.create_string_buffer(struct.pack("Q", everything))
    ruleset = _libc.syscall(create, rules, 8, 0)
    readable = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/opt", sys.prefix, sys.base_prefix)
    granted = {**dict.fromkeys(readable, reading), "/dev/null": writing, "/dev/urandom": 0b0100, ".": everything}
    for path, rights in granted.items():
        with suppress(OSError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
            _libc.syscall(add, ruleset, 1, rule, 0)
            os.close(place)
    _libc.syscall(restrict, ruleset, 0)
    os.close(ruleset)


def _filter_calls() -> None:
    """With seccomp: no sockets, no new processes, no signals to others."""
    if platform.machine() not in _CALLS:
        return
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _instructions(*_CALLS[platform.machine()]))
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)))
    _libc.prctl(_SECCOMP, _FILTER, program, 0, 0)


def _instructions(
    machine: int, clone: int, kill: int, tgkill: int, denied: tuple[int, ...]
) -> Iterator[tuple[int, int, int, int]]:
    """A filter in classic BPF: (operation, jump if true, jump if false, operand)."""
    load, equal, at_least, any_bit, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, end = 0x7FFF0000, 0x00050000, 0x80000000
    number, architecture, first_argument = 0, 4, 16
    yield load, 0, 0, architecture
    yield equal, 1, 0, machine
    yield leave, 0, 0, end
    yield load, 0, 0, number
    yield at_least, 0, 1, 0x40000000  # the x32 interface, which has numbers of its own
    yield leave, 0, 0, deny | errno.ENOSYS
    for call in (*denied, *_NEWER):
        yield equal, 0, 1, call
        yield leave, 0, 0, deny | errno.EPERM
    yield equal, 0, 1, _CLONE3  # libraries fall back to clone, whose flags a filter can read
    yield leave, 0, 0, deny | errno.ENOSYS
    for call, test, operand, error in (
        (clone, any_bit, _THREAD, errno.EAGAIN),
        (kill, equal, os.getpid(), errno.EPERM),
        (tgkill, equal, os.getpid(), errno.EPERM),
    ):
        yield equal, 0, 4, call
        yield load, 0, 0, first_argument
        yield test, 1, 0, operand
        yield leave, 0, 0, deny | error
        yield leave, 0, 0, allow
    yield leave, 0, 0, allow


if __name__ == "__main__":
    main()
