"""Errors of `launch`, one class per cause, each with its own exit status.

| status | meaning |
| --- | --- |
| the command's own | the command ran; 128+n if signal n killed it |
| 1 | a defect of `launch` itself, with a traceback |
| 2 | usage: the command line or a `SLIPWAY_` variable cannot be understood |
| 10 | detection: the scheduler's variables are malformed, contradict each other or lack this node's identity |
| 11 | token: the nodes share no secret, or its file cannot be read |
| 12 | peers missing: a node did not connect before the deadline, or the head refused it |
| 13 | node lost: a node or a Ray process on it died while the job ran |
| 14 | Ray failed: the cluster could not be formed |
| 15 | preflight: a node is not fit for the job; the message tells the fix |
| 16 | no cluster: for `launch attach` on this node, or where `RAY_ADDRESS` says that one is |
| 17 | output: stdout cannot be written |
| 127 | the command does not exist or cannot be executed |
| 128+n | `launch` received signal n on any node |

All nodes of a job exit with the same status.
"""

import difflib
import signal
from collections.abc import Iterable


class LaunchError(Exception):
    """An error that a person can act on: what happened, and a hint at the fix.

    `exit_code` is the status with which every node of the job exits; each cause has its own.
    """

    exit_code: int

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LaunchError):
    exit_code = 2


class DetectionError(LaunchError):
    exit_code = 10


class NodesUnknownError(DetectionError):
    """A scheduler's job is here, but nothing tells its nodes or this node's place among them.

    A launcher inside the job may.
    """


class NotYetThereError(DetectionError):
    """Something that may appear later is missing; worth another try until the deadline."""


class TokenError(LaunchError):
    exit_code = 11


class PeersMissingError(LaunchError):
    exit_code = 12


class NodeLostError(LaunchError):
    exit_code = 13


class RayFailedError(LaunchError):
    exit_code = 14


class PreflightError(LaunchError):
    exit_code = 15


class NoClusterError(LaunchError):
    exit_code = 16


class OutputError(LaunchError):
    exit_code = 17


class CommandNotFoundError(LaunchError):
    exit_code = 127


class StoppedError(LaunchError):
    """A signal asked this launch to end. `where` names the node."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"{where} received {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number


class JobEndedError(LaunchError):
    """The head ended the job. The cause is empty if the command ended by itself."""

    def __init__(self, exit_code: int, cause: str, hint: str = "") -> None:
        super().__init__(cause, hint)
        self.exit_code = exit_code


def did_you_mean(word: str, names: Iterable[str], form: str = "{}") -> str:
    """A question with the name that is nearest to a misspelt word, at the start of a hint; empty if none is near."""
    known = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), known, n=1)
    return f"did you mean {form.format(known[near[0]])}? " if near else ""
