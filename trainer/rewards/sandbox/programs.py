"""Runs untrusted programs: in processes of their own, with limits, a clean environment and a temporary directory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.rewards.sandbox import sandboxed

_START_SECONDS = 10.0


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


def run_tests(program: str, function: str | None, inputs: Sequence[Any], limits: Limits) -> list[str | None]:
    """The output of a Python program for each input; None where it failed.

    Without a function, an input is the text on standard input. With one, it is the list of arguments, and the output
    is the result as JSON.
    """
    job = {"program": program, "function": function, "inputs": list(inputs), "prelude": True, **vars(limits)}
    outputs = [None if "failure" in result else result["output"] for result in _results(job, limits)]
    return [*outputs, *[None] * (len(inputs) - len(outputs))]


def run_program(program: str, limits: Limits) -> Ended:
    """What a Python program without input wrote. It has no imports but its own."""
    job = {"program": program, "function": None, "inputs": [""], "prelude": False, **vars(limits)}
    results = _results(job, limits)
    if not results:
        return Ended("", "", "the sandbox did not answer")
    (result,) = results
    return Ended(result["output"], result["errors"], result.get("failure", ""))


def _results(job: Mapping[str, Any], limits: Limits) -> list[dict[str, Any]]:
    """A result for each input; fewer if the sandbox was ended."""
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as directory:
        if os.geteuid() == 0:
            os.chown(directory, sandboxed.NOBODY, sandboxed.NOBODY)
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(sandboxed.__file__))],
            cwd=directory,
            env=_environment(directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        seconds = _START_SECONDS + limits.seconds * len(job["inputs"])
        try:
            written, _ = process.communicate(json.dumps(job), timeout=seconds)
        except subprocess.TimeoutExpired:
            written = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return [json.loads(line) for line in written.splitlines()]


def check() -> str:
    """A note for the user if programs can reach the network or other processes here; "" if they cannot."""
    open_ways = [way for way, probe in _PROBES.items() if run_tests(probe, None, [""], Limits())[0] != "closed"]
    if not open_ways:
        return ""
    return f"this machine does not allow a full sandbox: programs can {' and '.join(open_ways)}"


_PROBES = {
    way: f"{imported}\ntry:\n  {attempt}\n  print('open', end='')\nexcept OSError:\n  print('closed', end='')"
    for way, imported, attempt in (
        ("use the network", "import socket", "socket.socket()"),
        ("use the sockets of other processes", "import socket", "socket.socket(socket.AF_UNIX)"),
        ("start processes", "import os", "os.fork() or os._exit(0)"),
    )
}


def _environment(directory: str) -> dict[str, str]:
    """None of the user's variables: they may hold keys."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", **threads}
