"""What the user asked for, from the command line and the `SLIPWAY_` variables."""

from dataclasses import dataclass
from pathlib import Path

DEADLINE = "SLIPWAY_DEADLINE"
CONTROL_PORT = "SLIPWAY_CONTROL_PORT"
REPORT_DIR = "SLIPWAY_REPORT_DIR"
JOB_DIR = "SLIPWAY_JOB_DIR"
TOKEN = "SLIPWAY_TOKEN"
TOKEN_FILE = "SLIPWAY_TOKEN_FILE"
LOG_DIR = "SLIPWAY_LOG_DIR"
MIN_NODES = "SLIPWAY_MIN_NODES"
DASHBOARD = "SLIPWAY_DASHBOARD"


@dataclass(frozen=True)
class Dashboard:
    """Where the head serves Ray's dashboard, through which jobs are submitted too."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None takes Ray's own, 8265, or another if a second job on this host has that already."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """None leaves the choice to Ray, or for the object store to `memory`."""

    cpus: int | None = None
    gpus: int | None = None
    object_store_memory: int | None = None
    """Bytes."""
    dashboard: Dashboard | None = None
    """None serves none."""
    debugger_external: bool = False
    """Ray's legacy debugger listens on all addresses, without asking for a token: `ray debug` reaches every node."""


@dataclass(frozen=True, kw_only=True)
class Options:
    command: tuple[str, ...]
    control_port: int | None = None
    deadline: float = 300.0
    """Seconds for everything before the command: meeting, Ray, the check that all nodes are there."""
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL for the command. With Ray's 2 s it fits the 10 s of `docker stop`."""
    warning_grace: float = 120.0
    """The same after a scheduler's warning signal, SIGUSR1 or SIGUSR2."""
    min_nodes: int | None = None
    """As many nodes are enough: go on with those that came, and start the command again when one is lost."""
    log_directory: Path | None = None
    """Where each node keeps its own log and Ray's, in a folder of its own."""
    preflight: bool = True
    """False lets a node take part that preflight finds unfit."""
    report_directory: Path = Path()
    """Where the head says which hosts are unfit."""
    ray: RayOptions | None = RayOptions()
    """None runs the command without Ray."""
