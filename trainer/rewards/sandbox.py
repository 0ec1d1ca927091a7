"""Runs untrusted programs: in processes of their own, with limits, a clean environment and a temporary directory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.rewards import sandboxed

_START_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    """What one test of a program may use."""

    seconds: float = 5.0
    memory_mb: int = 1024


def run_tests(program: str, function: str | None, inputs: Sequence[Any], limits: Limits) -> list[str | None]:
    """The output of a Python program for each input; None where it failed.

    Without a function, an input is the text on standard input. With one, it is the list of arguments, and the output
    is the result as JSON.
    """
    job = {"program": program, "function": function, "inputs": list(inputs), **vars(limits)}
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
        try:
            written, _ = process.communicate(json.dumps(job), timeout=_START_SECONDS + limits.seconds * len(inputs))
        except subprocess.TimeoutExpired:
            written = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    results = [json.loads(line) for line in written.splitlines()]
    outputs = [result.get("output") for result in results]
    return [*outputs, *[None] * (len(inputs) - len(outputs))]


def check() -> str:
    """A note for the user if programs can reach the network or other processes here; "" if they cannot."""
    open_ways = [way for way, probe in _PROBES.items() if run_tests(probe, None, [""], Limits())[0] != "closed"]
    if not open_ways:
        return ""
    return f"this machine does not allow a full sandbox: programs can {' and '.join(open_ways)}"


_PROBES = {
    "use the network": "import socket\ntry:\n  socket.socket()\n  print('open', end='')\n"
    "except OSError:\n  print('closed', end='')",
    "start processes": "import os\ntry:\n  os.fork() or os._exit(0)\n  print('open', end='')\n"
    "except OSError:\n  print('closed', end='')",
}


def _environment(directory: str) -> dict[str, str]:
    """None of the user's variables: they may hold keys."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", **threads}
