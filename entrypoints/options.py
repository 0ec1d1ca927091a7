"""The options of `launch`, from the command line and the `SLIPWAY_` variables."""

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
SPARES = "SLIPWAY_SPARES"
MAX_RESTARTS = "SLIPWAY_MAX_RESTARTS"
DASHBOARD = "SLIPWAY_DASHBOARD"
TLS = "SLIPWAY_TLS"


@dataclass(frozen=True)
class Dashboard:
    """The address at which the head serves Ray's dashboard, which also accepts submitted jobs."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None takes Ray's default, 8265, or another port if 8265 is taken."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Ray's options. None takes what this process may use of CPUs and GPUs; `ray.object_store` sizes the store."""

    cpus: int | None = None
    gpus: int | None = None
    object_store_memory: int | None = None
    """Bytes."""
    resources: str = ""
    """Custom resources of this node, as Ray's JSON object."""
    labels: str = ""
    """Labels of this node, as Ray's `KEY=VALUE,…`."""
    dashboard: Dashboard | None = None
    """None for no dashboard."""
    tls: bool = False
    """Whether Ray's processes encrypt their traffic, with certificates made for this job."""
    debugger_external: bool = False
    """Whether Ray's legacy debugger listens on all addresses, without a token: `ray debug` then reaches every node."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a launch."""

    command: tuple[str, ...]
    waits_for_ray: bool = False
    """The command starts while Ray forms, and waits at SLIPWAY_READY_FD before it uses Ray."""
    control_port: int | None = None
    deadline: float = 300.0
    """Seconds for everything before the command: meeting, starting Ray, waiting for all nodes in Ray."""
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL for the command. With 2 s for Ray it fits into the 10 s of `docker stop`."""
    warning_grace: float = 120.0
    """The same after a scheduler's warning signal, SIGUSR1 or SIGUSR2."""
    min_nodes: int | None = None
    """Continue with at least this many nodes, and restart the command when one is lost. None needs all of them."""
    spares: int = 0
    """Nodes beyond the needed ones. They wait, and one takes the place of a lost node."""
    max_restarts: int = 0
    """The number of restarts of a failed command, each on a new Ray cluster."""
    log_directory: Path | None = None
    """Each node keeps its log and Ray's in a folder below it."""
    preflight: bool = True
    """False lets a node join that preflight finds unfit."""
    report_directory: Path = Path()
    """The head writes the report on unfit hosts there."""
    ray: RayOptions | None = RayOptions()
    """None runs the command without Ray."""

    @property
    def survives_losses(self) -> bool:
        """Whether the job may go on after the loss of a node."""
        return self.min_nodes is not None or self.spares > 0
