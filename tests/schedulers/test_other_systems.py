"""The image's `launch`, started on two nodes by real launchers and schedulers of Debian 13, and by HyperQueue."""

from dataclasses import dataclass

import pytest

from tests.schedulers.conftest import DEBIAN_13, NODES, Cluster, Running
from tests.schedulers.test_launch import LAUNCH, TOKEN

JOB = "/tmp/job.sh"
"""What each system starts, once on each node."""
OPEN_MPI = "mpirun.openmpi --allow-run-as-root --map-by ppr:1:node -x SLIPWAY_TOKEN -x PATH"
PRRTE = "prterun --allow-run-as-root --map-by ppr:1:node -x SLIPWAY_TOKEN -x PATH"


@dataclass(frozen=True, kw_only=True)
class System:
    line: str
    """Starts the job on both nodes, and ends with its status."""
    environments: tuple[str, str]
    """What `launch` finds on the first node and on the second."""
    daemons: str = ""
    """The folder whose `start` starts the system's daemons on a node."""


SYSTEMS = {
    "slurm": System(line=f"srun -N2 --ntasks-per-node=1 {JOB}", environments=("slurm", "slurm")),
    "open_mpi": System(line=f"{OPEN_MPI} --host n1,n2 {JOB}", environments=("open_mpi", "open_mpi")),
    "open_mpi in slurm": System(line=f"salloc -N2 {OPEN_MPI} {JOB}", environments=("slurm", "slurm")),
    "prrte": System(line=f"{PRRTE} --host n1,n2 -x SLIPWAY_NODES=2 {JOB}", environments=("prrte", "prrte")),
    "prrte in slurm": System(line=f"salloc -N2 {PRRTE} {JOB}", environments=("slurm", "slurm")),
    "hyper_queue": System(
        line=f"/usr/local/share/hyper_queue/run '{OPEN_MPI} --hostfile $HQ_NODE_FILE {JOB}'",
        environments=("hyper_queue", "open_mpi"),
        daemons="hyper_queue",
    ),
    "htcondor": System(
        line=f"/usr/local/share/htcondor/run {JOB}", environments=("htcondor", "htcondor"), daemons="htcondor"
    ),
}
TELLS_EACH_STATUS = ("slurm", "htcondor")
"""MPI's launchers end the other tasks as soon as one has failed."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("no_ray_is_left"),
    pytest.mark.parametrize("cluster", [DEBIAN_13], indirect=True, scope="session"),
]


@dataclass(frozen=True)
class Started:
    """A system whose daemons run."""

    cluster: Cluster
    system: System

    def run(self, script: str) -> Running:
        """Start a job that runs this script on both nodes."""
        for node in NODES:
            self.cluster.put(JOB, f"#!/bin/sh\n{script}\n", node)
            self.cluster.run(f"chmod +x {JOB}", node)
        return self.cluster.start(self.system.line, SLIPWAY_TOKEN=TOKEN)


@pytest.fixture(scope="module", params=SYSTEMS)
def started(request: pytest.FixtureRequest, cluster: Cluster) -> Started:
    system = SYSTEMS[request.param]
    if system.daemons:
        for node in NODES:
            ended = cluster.run(f"/usr/local/share/{system.daemons}/start", node)
            assert ended.status == 0, ended.output
    return Started(cluster, system)


def test_the_nodes_form_one_job(started: Started) -> None:
    ended = started.run(f"exec {LAUNCH} --no-ray -- sh -c 'echo $SLIPWAY_NODE_COUNT nodes'")()
    assert ended.status == 0, ended.output
    assert ended.output.count("\n2 nodes\n") == 1, ended.output
    first, second = started.system.environments
    assert f"launch[0 head]: {first}: node 0 of 2 (n1)" in ended.output
    assert f"launch[1 worker]: {second}: node 1 of 2 (n2)" in ended.output


def test_the_job_ends_with_the_commands_status(started: Started) -> None:
    ended = started.run(f"exec {LAUNCH} --no-ray -- sh -c 'exit 7'")()
    assert ended.status == 7, ended.output


@pytest.mark.parametrize("started", TELLS_EACH_STATUS, indirect=True)
def test_every_node_ends_with_the_commands_status(started: Started) -> None:
    ended = started.run(f"{LAUNCH} --no-ray -- sh -c 'exit 7'; status=$?; echo $(uname -n) ended with $status")()
    assert sorted(line for line in ended.output.splitlines() if " ended with " in line) == [
        "n1 ended with 7",
        "n2 ended with 7",
    ], ended.output


def test_a_killed_node_ends_the_job(started: Started) -> None:
    cluster = started.cluster
    for node in NODES:  # of another system's job, perhaps another user's, who alone could write to it
        cluster.run("rm -f /tmp/up /tmp/launch", node)
    job = started.run(f"echo $$ > /tmp/launch; exec {LAUNCH} --no-ray -- sh -c 'touch /tmp/up; exec sleep 4321'")
    cluster.wait_until("ls /tmp/up", "/tmp/up\n")
    # Both processes; the second may have followed the first before its own signal.
    cluster.run("pid=$(cat /tmp/launch); kill -KILL $pid $(ps -o pid= --ppid $pid)", "n2")
    ended = job()
    assert ended.status != 0, ended.output
    assert cluster.run("pgrep --full '[s]leep 4321'").output == ""
