"""The image's `launch`, started by a real Grid Engine: a job script on one host, its tasks on two."""

import time

import pytest

from tests.schedulers.conftest import STARTS_WITHIN, Cluster
from tests.schedulers.test_launch import COUNT, LAUNCH, OPTIONS, TOKEN

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("no_ray_is_left")]

BY_QRSH = f"""
hosts=$(cut -d' ' -f1 $PE_HOSTFILE | paste -sd,)
for host in $(echo $hosts | tr , ' '); do
  qrsh -inherit -noshell -V $host {LAUNCH} --hosts $hosts {OPTIONS} -- /opt/slipway/venv/bin/{COUNT} &
done
wait $!; status=$?; wait; exit $status
"""
BY_MPIRUN = f"mpirun.openmpi --map-by ppr:1:node {LAUNCH} --no-ray -- sh -c 'exit 7'"


@pytest.fixture(scope="module")
def grid_engine(cluster: Cluster) -> Cluster:
    """The cluster's two nodes as hosts of a queue, with the master on n1."""
    for node in cluster.containers:
        started = cluster.run("/usr/local/share/grid_engine/start", node)
        assert started.status == 0, started.output
    end = time.monotonic() + STARTS_WITHIN
    while cluster.run("qhost").output.count("lx-amd64") != 2:
        assert time.monotonic() < end, cluster.run("qhost; tail /var/spool/gridengine/*/messages").output
        time.sleep(0.5)
    return cluster


def submit(cluster: Cluster, script: str) -> tuple[int, str]:
    """Run a job on both hosts, n2 first. Returns the status from `qsub`, and the output."""
    cluster.put("/tmp/job.sh", script)
    line = "qsub -sync y -pe one_a_host 2 -masterq all.q@n2 -v SLIPWAY_TOKEN -j y -o /tmp/job.out /tmp/job.sh"
    ended = cluster.run(
        f"su --login --whitelist-environment SLIPWAY_TOKEN --command '{line}' user", SLIPWAY_TOKEN=TOKEN
    )
    return ended.status, ended.output + cluster.run("cat /tmp/job.out; rm -f /tmp/job.out", "n2").output


def test_qrsh_forms_a_cluster_over_both_hosts(grid_engine: Cluster) -> None:
    status, output = submit(grid_engine, BY_QRSH)
    assert status == 0, output
    assert output.count("alive 2") == 1
    assert "explicit: node 0 of 2 (n2)" in output
    assert "cannot be used" not in output


def test_mpirun_returns_the_commands_status(grid_engine: Cluster) -> None:
    status, output = submit(grid_engine, BY_MPIRUN)
    assert status == 7, output
    assert "grid_engine: node 0 of 2 (n2)" in output
    assert "open_mpi: node 1 of 2 (n1)" in output
