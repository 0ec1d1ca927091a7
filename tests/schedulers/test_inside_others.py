"""Launchers inside a real Slurm job: their tasks inherit its variables, those of another process of it, or none."""

import json

import pytest

from tests.schedulers.conftest import Cluster
from tests.schedulers.test_launch import COUNT, LAUNCH, OPTIONS, TOKEN

pytestmark = pytest.mark.usefixtures("no_ray_is_left")

RUN = f"{LAUNCH} --no-ray --deadline 60 -- sh -c 'echo $SLIPWAY_NODE_COUNT nodes on $(hostname)'"
SLURM = (
    "-x SLURM_JOB_ID -x SLURM_JOB_NUM_NODES -x SLURM_JOB_NODELIST -x SLURM_NODEID -x SLURM_PROCID -x SLURMD_NODENAME"
)
OPEN_MPI = (
    "mpirun.openmpi --allow-run-as-root --mca plm rsh --mca ras ^slurm --host n1,n2 --map-by ppr:1:node "
    "-x SLIPWAY_TOKEN -x PATH"
)
MPICH = "mpiexec.hydra -launcher ssh -rmk user -hosts n1,n2 -ppn 1 -n 2"
BY_SSH = {
    "open_mpi without Slurm's variables": (OPEN_MPI, "open_mpi"),
    "open_mpi with Slurm's variables": (f"{OPEN_MPI} {SLURM}", "slurm"),
    "mpich": (MPICH, "slurm"),
}
"""Each line that starts one task per node by ssh, and the environment of the second one."""
by_ssh = pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=pytest.mark.full if "mpich" in name else ()) for name in BY_SSH]
)


def in_a_batch_script(cluster: Cluster, script: str) -> str:
    """What a batch script of two nodes prints, on either stream."""
    cluster.put("/tmp/inside.sh", f"#!/bin/sh\n{script}\n")
    cluster.run("sbatch --wait -N2 --output=/tmp/inside.out /tmp/inside.sh", SLIPWAY_TOKEN=TOKEN)
    return cluster.run("cat /tmp/inside.out").output


@by_ssh
def test_tasks_by_ssh_from_a_batch_script_form_one_job(cluster: Cluster, launcher: str) -> None:
    line, second = BY_SSH[launcher]
    output = in_a_batch_script(cluster, f"{line} {RUN}; echo ended with $?")
    assert output.count("2 nodes on n1\n") == 1, output
    assert "ended with 0\n" in output, output
    assert "launch[0 head]: slurm: node 0 of 2 (n1)" in output
    assert f"launch[1 worker]: {second}: node 1 of 2 (n2)" in output


@by_ssh
def test_all_views_of_one_run_have_one_job_id_and_port(cluster: Cluster, launcher: str) -> None:
    line, _ = BY_SSH[launcher]
    script = f"{line} sh -c '{LAUNCH} explain --json > /tmp/view.json'; cat /tmp/view.json; ssh n2 cat /tmp/view.json"
    output = in_a_batch_script(cluster, script)
    decoder, views = json.JSONDecoder(), []
    while (output := output.strip()).startswith("{"):
        view, end = decoder.raw_decode(output)
        views.append(view)
        output = output[end:]
    assert [view["node_rank"] for view in views] == [0, 1], output
    assert len({view["job_id"] for view in views}) == 1
    assert len({view["ports"]["control"] for view in views}) == 1


def test_ray_runs_below_an_mpirun_by_ssh(cluster: Cluster) -> None:
    output = in_a_batch_script(cluster, f"{OPEN_MPI} {SLURM} {LAUNCH} {OPTIONS} -- /opt/slipway/venv/bin/{COUNT}")
    assert output.count("alive 2") == 1, output


def test_mpirun_on_one_of_two_nodes_is_a_job_of_one_node(cluster: Cluster) -> None:
    line = OPEN_MPI.replace("--host n1,n2 --map-by ppr:1:node", "--host n1:2 -n 2")
    output = in_a_batch_script(cluster, f"{line} {RUN}; echo ended with $?")
    assert output.count("1 nodes on n1\n") == 1, output
    assert "ended with 0\n" in output, output
    assert "open_mpi wins" in output


TORCHRUN = "/opt/slipway/venv/bin/torchrun --no-python --nproc-per-node 2"


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(f"{TORCHRUN} --standalone", id="one on each node"),
        pytest.param(f"{TORCHRUN} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1:29511", id="one over both nodes"),
    ],
)
def test_only_the_first_worker_of_torchrun_leads_its_node(cluster: Cluster, line: str) -> None:
    ended = cluster.run(f"srun -N2 --ntasks-per-node=1 {line} {RUN}", SLIPWAY_TOKEN=TOKEN)
    assert (ended.status, ended.output.count("2 nodes on n1\n")) == (0, 1), ended.output
    assert "launch[0.1 worker]: slurm: node 0 of 2 (n1)" in ended.output
    assert "launch[1.1 worker]: slurm: node 1 of 2 (n2)" in ended.output


ORCHESTRATOR = """
export SKYPILOT_NODE_RANK=$SLURM_PROCID SKYPILOT_NUM_NODES=2 SKYPILOT_TASK_ID=sky-1
export SKYPILOT_NODE_IPS="$(for node in n1 n2; do getent ahostsv4 $node | head -n1 | cut -d' ' -f1; done)"
unset $(env | grep -oE '^SLURM_(STEP|STEPID|PROCID|NODEID|LOCALID|NTASKS|TASK|NNODES|NPROCS)[A-Z_]*')
exec RUN
""".replace("RUN", RUN)


def test_an_orchestrator_that_drops_the_steps_variables_decides(cluster: Cluster) -> None:
    for node in cluster.containers:
        cluster.put("/tmp/orchestrated.sh", ORCHESTRATOR, node)
    ended = cluster.run("srun -N2 --ntasks-per-node=1 bash /tmp/orchestrated.sh", SLIPWAY_TOKEN=TOKEN)
    assert (ended.status, ended.output.count("2 nodes on n1\n")) == (0, 1), ended.output
    assert "launch[0 head]: skypilot: node 0 of 2 (n1)" in ended.output
    assert "launch[1 worker]: skypilot: node 1 of 2 (n2)" in ended.output


@pytest.mark.parametrize("address", ["127.0.0.1:6399", "no.such.head.invalid:6379"])
def test_a_dead_ray_address_ends_every_node_of_a_step(cluster: Cluster, address: str) -> None:
    ended = cluster.run(f"srun -N2 --ntasks-per-node=1 {RUN}", SLIPWAY_TOKEN=TOKEN, RAY_ADDRESS=address)
    assert ended.status == 16, ended.output
    assert ended.output.count("but no Ray cluster answers there") == 2, ended.output
    assert "nodes on" not in ended.output
    formed = cluster.run(f"srun -N2 --ntasks-per-node=1 {RUN}", SLIPWAY_TOKEN=TOKEN, RAY_ADDRESS="local")
    assert (formed.status, formed.output.count("2 nodes on n1\n")) == (0, 1), formed.output


def test_a_step_on_some_cpus_gives_ray_only_those(cluster: Cluster) -> None:
    resources = (
        "/opt/slipway/venv/bin/python -c 'import ray; ray.init(log_to_driver=False); print(ray.cluster_resources())'"
    )
    line = f"{LAUNCH} --object-store-memory 100000000 --deadline 200 -- {resources}"
    ended = cluster.run(f"srun -N2 --ntasks-per-node=1 taskset -c 0 {line}", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 0, ended.output
    assert "'CPU': 2.0" in ended.output
