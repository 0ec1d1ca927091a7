"""What the user asked for, from the command line and the `SLIPWAY_` variables."""

from dataclasses import dataclass

DEADLINE = "SLIPWAY_DEADLINE"
CONTROL_PORT = "SLIPWAY_CONTROL_PORT"


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """None leaves the choice to Ray, or for the object store to `memory`."""

    cpus: int | None = None
    gpus: int | None = None
    object_store_memory: int | None = None
    """Bytes."""
    dashboard: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    command: tuple[str, ...]
    control_port: int | None = None
    deadline: float = 300.0
    """Seconds for everything before the command: meeting, Ray, the check that all nodes are there."""
    grace: float = 5.0
    """Seconds between SIGTERM and SIGKILL for the command. With Ray's 2 s it fits the 10 s of `docker stop`."""
    ray: RayOptions | None = RayOptions()
    """None runs the command without Ray."""
