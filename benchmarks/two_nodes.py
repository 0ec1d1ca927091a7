"""Two nodes of a job as processes of this machine, for benchmarks of `launch` with real Ray."""

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = ("--num-cpus=1", "--num-gpus=0", f"--object-store-memory={100 * 1024**2}")
LAUNCH = (sys.executable, "-m", "entrypoints")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def new_job(nodes: int = 2) -> dict[str, str]:
    """The environment of all nodes of a job."""
    return {
        "SLIPWAY_HOSTS": ",".join(["localhost", *(f"worker-{rank}.invalid" for rank in range(1, nodes))]),
        "SLIPWAY_CONTROL_PORT": str(free_port()),
        "SLIPWAY_TOKEN": secrets.token_hex(16),
        "PYTHONPATH": str(REPOSITORY),
    }


def start_node(job: dict[str, str], rank: int, *words: str) -> "subprocess.Popen[str]":
    """Starts `launch` with these options and the command, in its own session."""
    return subprocess.Popen(
        [*LAUNCH, *SMALL, *words],
        env={**os.environ, **job, "SLIPWAY_NODE_RANK": str(rank)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
