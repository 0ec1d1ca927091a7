"""The program inside the sandbox: `python -I sandboxed.py PARENT`, with a job on standard input. Standard library only.

It runs an untrusted program once per test, each time in a forked process with fewer rights, and writes a line of JSON
per test to standard output. The expected outputs never come here, so a program cannot look them up.
"""

import atexit
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

# What programs of the usual test collections expect to be imported. `builtins` last: it takes its names back.
MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing", "builtins"),
)
PRELUDE = "".join(f"import {name}\nfrom {name} import *\n" for name in MODULES)
MOST_WRITTEN = 4 * 2**20  # bytes of a file, and of what a program prints
MOST_PRINTED = 64 * 2**20  # characters of base64 for all tests of a program
MOST_STORED = 64 * 2**20  # bytes of all files
MOST_FILES = 1000  # with folders
MOST_THREADS = 256
MOST_TABLES = 64 * 2**20  # bytes of page tables, which no limit of Linux counts
_COUNT_SECONDS = 0.02  # between two counts of files, threads and page tables
_ENDING_SECONDS = 0.2  # that the threads of a program may take to end
NOBODY = 65534
_FOLDER = Path("program")  # where the program of a test starts
# What Python needs; of /etc only what the dynamic linker and the clock read.
READABLE = (
    *("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
    *(sys.prefix, sys.base_prefix, str(Path(sys.base_prefix).resolve())),
)

_libc = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVILEGES = 1, 4, 38
_CAPABILITIES_VERSION = 0x20080522
_STARTED = 3  # the descriptor over which a forked process says why it cannot run the program


def main() -> None:
    _stay_bound(int(sys.argv[1]))
    job = json.load(sys.stdin)
    for name in MODULES:
        import_module(name)
    printed = 0
    for given in job["inputs"]:
        _FOLDER.mkdir(mode=0o700)
        result = _test(job, given)
        printed += sum(len(result.get(name, "")) for name in ("output", "errors"))
        if printed > MOST_PRINTED:
            result = {"failure": f"the tests print over {MOST_PRINTED // 2**20} MiB", "output": "", "errors": ""}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        for path in Path().iterdir():
            remove(path)


def remove(path: Path) -> None:
    """Removes a file or folder, however deep a program has made it."""
    try:
        path.rmdir()
    except OSError:
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)


def _test(job: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """What the program wrote or returned, in base64, or why it failed; under `broken`, why it could not be started.

    Input and output are files in memory that have no path, so a program cannot put others in their place.
    """
    stdin, stdout, stderr = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("input", "output", "errors"))
    with open(stdin, "wb", closefd=False) as file:
        file.write(given.encode(errors="replace") if job["function"] is None else b"")
    fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(stdin, 0, os.SEEK_SET)
    started, starting = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _run(job, given, (stdin, stdout, stderr, starting), parent)
    os.close(starting)
    try:
        broken = os.read(started, 1000).decode()
        os.close(started)
        failure = "" if broken else _watch(child, job["seconds"])
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if broken:
        return {"broken": broken}
    if not failure and status != 0:
        failure = f"the program ended with status {os.waitstatus_to_exitcode(status)}"
    written = {"output": os.pread(stdout, MOST_WRITTEN, 0), "errors": os.pread(stderr, MOST_WRITTEN, 0)}
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    return {"failure": failure, **{name: b64encode(content).decode() for name, content in written.items()}}


def _watch(child: int, seconds: float) -> str:
    """Waits until the program ends; why it must be ended instead, or ""."""
    end = time.monotonic() + seconds
    ended = os.pidfd_open(child)
    try:
        while not select.select([ended], [], [], max(0.0, min(_COUNT_SECONDS, end - time.monotonic())))[0]:
            if time.monotonic() >= end:
                return f"no result within {seconds:g} s"
            if excess := _excess(child, ended):
                return f"the program has {excess}"
        return ""
    finally:
        os.close(ended)


def _excess(child: int, ended: int) -> str:
    """The limit that the program exceeds, or "". `ended`: its descriptor."""
    try:
        lines = Path(f"/proc/{child}/status").read_text(errors="replace").splitlines()
        status = dict(line.split(":", 1) for line in lines)
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has just ended
    if status["State"].split()[0] == "Z":
        return "" if select.select([ended], [], [], _ENDING_SECONDS)[0] else "lost its first thread, which is counted"
    if int(status["Threads"]) > MOST_THREADS:
        return f"more than {MOST_THREADS} threads"
    if 1024 * int(status.get("VmPTE", "0 kB").split()[0]) > MOST_TABLES:
        return f"over {MOST_TABLES // 2**20} MiB of page tables"
    if not _is_small(Path(), _removed(child)):
        return f"over {MOST_FILES} files, {MOST_STORED // 2**20} MiB in files, or too long paths"
    return ""


def _removed(child: int) -> int:
    """The bytes of files that the program has removed and still holds. One that is mapped counts as the largest.

    0 if the program cannot be seen: it can write no file, or has just ended.
    """
    sizes = {}
    with _user_of(child), suppress(PermissionError, FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{child}/maps").read_text(errors="replace").splitlines():
            _, _, _, device, inode, *path = line.split(maxsplit=5)
            if path and path[0].endswith(" (deleted)") and not path[0].startswith(("/memfd:", "/dev/zero ")):
                sizes[device, int(inode)] = MOST_WRITTEN
        for entry in os.scandir(f"/proc/{child}/fd"):
            with suppress(FileNotFoundError):  # the program has just closed it
                held = entry.stat()
                in_memory = os.fspath(Path(entry.path).readlink()).startswith("/memfd:")  # input and output
                if stat.S_ISREG(held.st_mode) and held.st_nlink == 0 and not in_memory:
                    sizes[f"{held.st_dev}", held.st_ino] = 512 * held.st_blocks
    return sum(sizes.values())


@contextmanager
def _user_of(child: int) -> Iterator[None]:
    """Root becomes the program's user towards files: in containers it may not look at another user's processes."""
    owner, parent = Path(f"/proc/{child}").stat(), os.getppid()
    _libc.setfsgid(owner.st_gid)
    _libc.setfsuid(owner.st_uid)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())
        _stay_bound(parent)


def _stay_bound(parent: int) -> None:
    """Ends this process with its parent, and hides its memory from its user's processes.

    Linux forgets both when the user changes. Raises ProcessLookupError if the parent has ended.
    """
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    _libc.prctl(_DUMPABLE, 0)
    if os.getppid() != parent:
        raise ProcessLookupError("the process that started this one has ended")


def _is_small(folder: Path, stored: int) -> bool:
    """Whether few files of few bytes, with those `stored`, are below a folder. Programs cannot make links."""
    folders, count = [os.fspath(folder)], 0
    try:
        while folders:
            with suppress(FileNotFoundError):  # the program has just removed this folder
                for entry in os.scandir(folders.pop()):
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    with suppress(FileNotFoundError):
                        stored += 512 * entry.stat(follow_symlinks=False).st_blocks
                    if count > MOST_FILES:
                        return False
    except OSError:  # a path is too long
        return False
    return stored <= MOST_STORED


def _run(job: Mapping[str, Any], given: Any, descriptors: Sequence[int], parent: int) -> NoReturn:
    """Runs the program in this forked process, and ends it. `descriptors`: standard input, output, error, _STARTED."""
    status = 1
    try:
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor > _STARTED:
                with suppress(OSError):  # the one that listed them
                    os.close(descriptor)
        for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            stream = open(descriptor, mode, encoding="utf-8")  # noqa: PTH123, SIM115 - a descriptor
            vars(sys).update({name: stream, f"__{name}__": stream})
        os.chdir(_FOLDER)
        os.environ.update(HOME=str(Path.cwd()), TMPDIR=str(Path.cwd()))
        sys.setrecursionlimit(600_000)
        try:
            confine(job["seconds"], job["memory_mb"], job["bubblewrap"], parent)
        except Exception as error:
            os.write(_STARTED, f"{type(error).__name__}: {error}".encode())
            raise
        os.close(_STARTED)
        status = _status(partial(_execute, job, given))
        status |= _status(_finish)
    finally:
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def _status(step: Callable[[], None]) -> int:
    """The exit status that Python gives to a step. It is explained on standard error."""
    try:
        step()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            with suppress(BaseException):
                sys.stderr.write(f"{ended.code}\n")
        return 0 if ended.code in (None, 0) else 1
    except BaseException as error:  # noqa: BLE001 - an untrusted program may raise anything
        with suppress(BaseException):
            _explain(error)
        return 1
    return 0


def _finish() -> None:
    """What Python does when a program has ended: it waits for threads, calls exit functions and flushes."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.__stdout__)):
        stream.flush()


def _explain(error: BaseException) -> None:
    """Writes the error as Python would, without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != "solution.py":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


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


def confine(seconds: float, memory_mb: int, bubblewrap: bool, parent: int) -> None:
    """Drops this process's rights permanently, except for the current folder. The process ends with its parent.

    `bubblewrap`: it sees no files but those of Python. Without that and without Landlock (Linux before 5.13), it can
    write no file and read those of its user. Raises OSError if it cannot be kept from anything else.
    """
    os.umask(0o077)
    _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    restricted = _restrict_files()
    if os.geteuid() == 0:
        _give_up_root(restricted)
    _stay_bound(parent)
    if bubblewrap or restricted:
        _libc.prctl(_DUMPABLE, 1)  # its parent counts what it holds; other programs cannot see it
    _filter_calls(writing=bubblewrap or restricted)
    for limit, value in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory_mb * 2**20),
        (resource.RLIMIT_FSIZE, MOST_WRITTEN),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _give_up_root(restricted: bool) -> None:
    """Becomes the user `nobody`; where that is impossible, root without capabilities, which Landlock must restrict."""
    if all(map(_is_open_to_all, (sys.prefix, sys.base_prefix))):
        problem = "root cannot become another user"
        with suppress(OSError):
            os.chown(".", NOBODY, NOBODY)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            return
    else:
        problem = f"no user but root can read Python in {sys.prefix}"
    if not restricted:
        raise PermissionError(f"{problem}, and Linux has no Landlock, which would restrict root")
    if _libc.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24)) != 0:
        raise PermissionError("root cannot give up its capabilities")


def _is_open_to_all(folder: str) -> bool:
    place = Path(folder).resolve()
    return all(path.stat().st_mode & 0o001 for path in (place, *place.parents)) and bool(place.stat().st_mode & 0o004)


def _restrict_files() -> bool:
    """Restricts this process with Landlock to reading Python and to the current folder; False if the kernel cannot.

    Other processes' /proc is closed, too.
    """
    create, add, restrict = 444, 445, 446
    version = _libc.syscall(create, None, 0, 1)
    if version < 1:
        return False
    handled = (1 << (15 if version >= 3 else 14 if version == 2 else 13)) - 1
    write_file, read_file, read_folder, truncate = 1 << 1, 1 << 2, 1 << 3, 1 << 14
    remove_and_make = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13  # folders and regular files; move them
    reading = read_file | read_folder
    granted = {
        **dict.fromkeys(READABLE, reading),
        **dict.fromkeys(("/dev/null", "/dev/zero"), read_file | write_file | truncate),
        **dict.fromkeys(("/dev/random", "/dev/urandom"), read_file),
        ".": reading | write_file | truncate | remove_and_make,
    }
    ruleset = _libc.syscall(create, struct.pack("Q", handled), 8, 0)
    for path, rights in granted.items():
        with suppress(FileNotFoundError):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights &= handled if Path(path).is_dir() else handled & (read_file | write_file | truncate)
            _libc.syscall(add, ruleset, 1, struct.pack("=Qi", rights, place), 0)
            os.close(place)
    restricted: int = _libc.syscall(restrict, ruleset, 0)
    os.close(ruleset)
    return restricted == 0


# The calls that Python needs. All others are refused: those that reach other processes, users and networks, and those
# that keep memory which no limit counts (shared memory, message queues, semaphores, memfd, keys, io_uring).
_CALLS = {
    "memory": "brk mmap munmap mremap mprotect madvise msync",
    "files": "read pread64 readv preadv preadv2 write pwrite64 writev pwritev pwritev2 lseek close close_range "
    "fstat stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir getdents64 "
    "statfs fstatfs getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr "
    "ftruncate fadvise64 fsync fdatasync sendfile copy_file_range",
    "descriptors": "dup dup2 dup3 pipe pipe2 eventfd2 timerfd_create timerfd_settime timerfd_gettime poll ppoll select "
    "pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2",
    "pairs of sockets": "recvfrom sendto shutdown getsockname getpeername getsockopt",
    "threads": "futex futex_waitv set_robust_list rseq set_tid_address sched_yield sched_getaffinity getcpu",
    "signals": "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigpending sigaltstack "
    "restart_syscall alarm pause setitimer getitimer",
    "time": "nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times",
    "this process": "exit exit_group wait4 waitid getpid getppid gettid getpgrp getpgid getsid getpriority getrlimit "
    "getrusage getuid geteuid getgid getegid getresuid getresgid getgroups capget",
    "this machine": "uname sysinfo getrandom",
}
_WHOLE = 0xFFFFFFFF
# A thread shares memory, folders, descriptors and signals with its process, which are counted and limited there.
_CLONE_THREAD, _CLONE_NEW = 0x10F00, 0x7E020000
_PRCTL = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_FCNTL = (*range(8), 1030, 1032, 1034)  # flags, copies, locks, sizes; not F_SETOWN and F_SETSIG, which send signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX

Condition = tuple[int, int, int]
"""The number of an argument, a mask, and the value that its masked bits must have."""


def _rules(writing: bool) -> Iterator[tuple[str, tuple[Condition, ...]]]:
    """The calls that are allowed; some only with certain arguments. Several rules of one call are alternatives."""
    yield from ((call, ()) for calls in _CALLS.values() for call in calls.split())
    yield from ((call, ((0, _WHOLE, os.getpid()),)) for call in ("kill", "tgkill"))
    yield "clone", ((0, _CLONE_THREAD | _CLONE_NEW, _CLONE_THREAD),)
    yield "prlimit64", ((0, _WHOLE, 0),)
    yield from (("prctl", ((0, _WHOLE, option),)) for option in _PRCTL)
    yield from (("fcntl", ((1, _WHOLE, command),)) for command in _FCNTL)
    yield from (("ioctl", ((1, _WHOLE, command),)) for command in _IOCTL)
    # asyncio needs a pair of streams. Datagrams of a pair could be sent to other sockets.
    yield "socketpair", ((0, _WHOLE, socket.AF_UNIX), (1, 0xF, socket.SOCK_STREAM))
    mask, modes = os.O_ACCMODE | os.O_TRUNC, [os.O_RDONLY]  # Landlock before version 3 does not see O_TRUNC alone
    if writing:
        modes += [way | cut for way in (os.O_WRONLY, os.O_RDWR) for cut in (0, os.O_TRUNC)]
        yield from ((call, ()) for call in ("rename", "renameat", "rmdir", "unlink", "unlinkat"))
        yield "renameat2", ((4, _WHOLE, 0),)
        # A folder that its user cannot list could be neither counted nor removed.
        yield from ((call, ((number, 0o700, 0o700),)) for call, number in (("mkdir", 1), ("mkdirat", 2)))
    else:
        mask |= os.O_CREAT
    yield from ((call, ((number, mask, mode),)) for call, number in (("open", 1), ("openat", 2)) for mode in modes)


def _filter_calls(writing: bool) -> None:
    """Refuses all other calls, with libseccomp. Raises OSError if that is not possible."""
    allow, refuse, masked_equal = 0x7FFF0000, 0x00050000, 7
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(refuse | errno.EPERM)))
    # glibc then takes clone, whose flags a filter can read.
    # It writes zeros instead of fallocate, which fills a disk between two counts.
    rules = [
        (refuse | errno.ENOSYS, "clone3", ()),
        (refuse | errno.EOPNOTSUPP, "fallocate", ()),
        *((allow, *rule) for rule in _rules(writing)),
    ]
    for action, call, conditions in rules:
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            continue  # not a call of this architecture, or newer than the library
        packed = b"".join(struct.pack("IIQQ", index, masked_equal, mask, value) for index, mask, value in conditions)
        if library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(conditions), packed) != 0:
            raise OSError(f"libseccomp refuses a rule for {call}")
    if library.seccomp_load(context) != 0:
        raise OSError("Linux refuses the filter of system calls")


if __name__ == "__main__":
    main()
