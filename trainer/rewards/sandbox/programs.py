"""Runs untrusted programs: in processes of their own, with limits, a clean environment and a temporary directory."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.rewards.sandbox import sandboxed

_START_SECONDS = 10.0
_TRIAL_SECONDS = 60.0  # of bubblewrap, once per process
_PREFIX = "slipway-sandbox-"


@dataclass(frozen=True)
class Limits:
    """What one test of a program may use."""

    seconds: float = 5.0
    memory_mb: int = 1024


@dataclass(frozen=True)
class Ended:
    """A program that ended; `error` says why it failed."""

    stdout: str
    stderr: str
    error: str = ""

    @property
    def timed_out(self) -> bool:
        return self.error.startswith("no result")


class SandboxError(RuntimeError):
    """The sandbox does not run a program; costs the response that needs it."""


def run_tests(program: str, function: str | None, inputs: Sequence[Any], limits: Limits) -> list[str | None]:
    """The output of a Python program for each input; None where it failed.

    Without a function, an input is the text on standard input. With one, it is the list of arguments, and the output
    is the result as JSON. Raises SandboxError.
    """
    job = {"program": program, "function": function, "inputs": list(inputs), "prelude": True, **vars(limits)}
    return [None if result["failure"] else _text(result["output"]) for result in _results(job, limits)]


def run_program(program: str, limits: Limits) -> Ended:
    """What a Python program without input wrote. It has no imports but its own. Raises SandboxError."""
    job = {"program": program, "function": None, "inputs": [""], "prelude": False, **vars(limits)}
    (result,) = _results(job, limits)
    return Ended(_text(result["output"]), _text(result["errors"]), result["failure"])


def _text(encoded: str) -> str:
    return b64decode(encoded).decode(errors="replace")


def _results(job: Mapping[str, Any], limits: Limits) -> list[dict[str, Any]]:
    """A result for each input. Raises SandboxError."""
    seconds = _START_SECONDS + limits.seconds * len(job["inputs"])
    bubblewrap = _bubblewrap()
    parent = 0 if bubblewrap.works else os.getpid()  # bubblewrap numbers processes anew
    with _folder(bubblewrap.works) as folder:
        process = subprocess.Popen(
            [*bubblewrap.command, sys.executable, "-I", sandboxed.__file__, str(parent)],
            cwd=folder,
            env=_ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            written, errors = process.communicate(json.dumps({**job, "bubblewrap": bubblewrap.works}), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise SandboxError(f"the sandbox did not end within {seconds:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    results = [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]
    if broken := [result["broken"] for result in results if "broken" in result]:
        raise SandboxError(f"the sandbox cannot run programs: {broken[0]}")
    if len(results) < len(job["inputs"]):
        raise SandboxError(f"the sandbox ended with status {process.returncode}: {_last_line(errors)}")
    return results


@contextmanager
def _folder(bubblewrap: bool) -> Iterator[str]:
    """The folder below which programs have theirs. With bubblewrap that is one in memory, which ends with them."""
    if bubblewrap:
        yield "/"
        return
    _remove_leftovers()
    folder, lock = _new_folder()
    try:
        folder.chmod(0o711)  # another user enters the folders below
        yield os.fspath(folder)
    finally:
        sandboxed.remove(folder)
        if lock is not None:
            os.close(lock)


def _new_folder() -> tuple[Path, int | None]:
    """A folder and the descriptor of its lock, which ends with this process even if that is killed.

    None where the file system has no such locks, as NFS: there a leftover stays.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = _lock(folder)
        except (FileNotFoundError, BlockingIOError):
            continue  # another job took it for a leftover
        except OSError:
            return folder, None
        if folder.exists():
            return folder, lock
        os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor with the lock of a folder. Raises OSError; BlockingIOError if another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@cache
def _remove_leftovers() -> None:
    """Removes the folders of jobs of this user that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or no folder
            lock = _lock(folder)
            if os.fstat(lock).st_uid == os.geteuid():
                sandboxed.remove(folder)
            os.close(lock)


@dataclass(frozen=True)
class _Bubblewrap:
    """The command that programs start with, or why there is none."""

    command: Sequence[str] = ()
    problem: str = ""

    @property
    def works(self) -> bool:
        return not self.problem


@cache
def _bubblewrap() -> _Bubblewrap:
    """Bubblewrap (https://github.com/containers/bubblewrap), if it works here.

    Raises SandboxError if it takes too long: a busy machine must not weaken what confines programs.
    """
    program = shutil.which("bwrap")
    if program is None:
        return _Bubblewrap(problem="is not installed")
    nobody = str(sandboxed.NOBODY)
    command = [
        *(program, "--unshare-all", "--unshare-user", "--uid", nobody, "--gid", nobody, "--cap-drop", "ALL"),
        *("--die-with-parent", "--as-pid-1"),
        *(part for path in sandboxed.READABLE for part in ("--ro-bind-try", path, path)),
        *("--ro-bind", sandboxed.__file__, sandboxed.__file__, "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(2 * sandboxed.MOST_STORED), "--tmpfs", "/sandbox", "--chdir", "/sandbox"),
        # As root, bubblewrap's user is root to /proc/sys, whose parameters are the whole machine's.
        *("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"),
    ]
    try:
        tried = subprocess.run(
            [*command, sys.executable, "-I", "-S", "-c", ""],
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"bubblewrap did not start within {_TRIAL_SECONDS:g} s") from error
    except OSError as error:
        return _Bubblewrap(problem=f"does not work: {error}")
    if tried.returncode != 0:
        return _Bubblewrap(problem=f"does not work: {_last_line(tried.stderr)}")
    return _Bubblewrap(command)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


# None of the user's variables: they may hold keys.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@cache
def check() -> str:
    """Describes what confines programs here, and what they can still do. Raises ConfigError if they cannot run."""
    with tempfile.NamedTemporaryFile() as private:
        tried = {
            "read the files of this user": f"open({private.name!r})",
            "read the environment variables of this user": _OTHER_ENVIRONMENT.format(os.getpid()),
            "use the network": "socket.socket()",
            "start processes": "os.fork() or os._exit(0)",
        }
        probe = f"import os, socket\ntry:\n  exec({tried!r}[input()])\nexcept OSError:\n  print('refused', end='')"
        try:
            outputs = run_tests(probe, None, list(tried), Limits())
        except SandboxError as error:
            raise ConfigError(str(error), hint=_HINT) from error
    open_ways = [way for way, output in zip(tried, outputs, strict=True) if output != "refused"]
    bubblewrap = _bubblewrap()
    confined = "bubblewrap" if bubblewrap.works else f"a filter of system calls alone (bubblewrap {bubblewrap.problem})"
    return f"programs are confined by {confined}{', and can ' * bool(open_ways)}{' and '.join(open_ways)}"


# With bubblewrap, programs may have the number of a process outside.
_OTHER_ENVIRONMENT = """
if os.getpid() == {0}:
    raise OSError
open("/proc/{0}/environ")
"""
_HINT = (
    "install libseccomp and bubblewrap, or use a SandboxFusion server: reward.code_sandbox_url for rewards, "
    "sandbox_fusion_url for the tool"
)
