"""The errors in the logs of Ray's processes, as text to be appended to a message."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoints.error_lines import causes, error_lines, read_tail

AGENTS = ("dashboard_agent", "runtime_env_agent")
"""Programs that the raylet starts. It ends if one of them fails."""
_PROCESSES = (*AGENTS, "raylet", "gcs_server")
_MOST = 5
"""Most lines of one process."""


def last_errors(logs: Path, process: str) -> str:
    """The last errors of a process, and those of the agents that it blames."""
    errors = {process: _last(logs, process)}
    blamed = [agent for agent in AGENTS if any(agent in line for line in errors[process])]
    return _listed({agent: _last(logs, agent) for agent in blamed} | errors)


def all_errors(logs: Path, output: Path) -> str:
    """The errors in the output of one of Ray's programs, and of all processes that it started."""
    program = output.stem.replace("-", " ")
    return _listed({program: causes(read_tail(output))} | {process: _last(logs, process) for process in _PROCESSES})


def _last(logs: Path, process: str) -> list[str]:
    """The last errors of a process. Ray's older versions write those of the raylet and the GCS to `.out`."""
    output, *others = (error_lines(read_tail(logs / f"{process}.{kind}")) for kind in ("out", "err", "log"))
    return ([line for lines in others for line in lines] or output)[-_MOST:]


def _listed(errors: Mapping[str, Sequence[str]]) -> str:
    """A single line behind a colon, several below it, each with its program."""
    lines = [f"{program}: {line}" for program, lines in errors.items() for line in lines]
    return f": {lines[0]}" if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)
