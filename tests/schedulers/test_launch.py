"""The image's `launch`, started by real schedulers on two nodes."""

import pytest

from tests.schedulers.conftest import Cluster

pytestmark = pytest.mark.usefixtures("no_ray_is_left")

LAUNCH = "/opt/slipway/venv/bin/launch"
OPTIONS = "--deadline 90 --num-cpus 1 --object-store-memory 100000000"
COUNT = 'python -c \'import ray; ray.init(log_to_driver=False); print("alive", sum(n["Alive"] for n in ray.nodes()))\''
TOKEN = "a secret of these tests"


def test_srun_forms_a_cluster_over_both_nodes(cluster: Cluster) -> None:
    ended = cluster.run(f"srun -N2 --ntasks-per-node=1 {LAUNCH} {OPTIONS} -- {COUNT}", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 0, ended.output
    assert ended.output.count("alive 2") == 1
    assert "launch[0 head]: slurm: node 0 of 2 (n1)" in ended.output
    assert "GLOO_SOCKET_IFNAME=eth0: eth0: the nodes met over it" in ended.output


def test_srun_returns_the_commands_status(cluster: Cluster) -> None:
    ended = cluster.run(f"srun -N2 --ntasks-per-node=1 {LAUNCH} --no-ray -- sh -c 'exit 7'", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 7, ended.output


def test_several_tasks_on_a_node_make_one_cluster(cluster: Cluster) -> None:
    ended = cluster.run(f"srun -N2 --ntasks-per-node=2 {LAUNCH} --no-ray -- echo ran", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 0, ended.output
    assert ended.output.count("ran\n") == 1


def test_two_jobs_run_side_by_side(cluster: Cluster) -> None:
    line = f"srun -N2 -n2 --cpus-per-task=1 {LAUNCH} {OPTIONS} -- sh -c 'sleep 5; exit {{}}'"
    jobs = [cluster.start(line.format(status), SLIPWAY_TOKEN=f"the secret of job {status}") for status in (3, 4)]
    assert [job().status for job in jobs] == [3, 4]


def test_a_batch_script_without_srun_gets_the_line_as_hint(cluster: Cluster) -> None:
    script = f"sbatch --wait -N2 --output=/tmp/out --wrap '{LAUNCH} explain; {LAUNCH} -- true'"
    ended = cluster.run(f"{script}; cat /tmp/out", SLIPWAY_TOKEN=TOKEN)
    assert "2 nodes are allocated, but only this process was started" in ended.output, ended.output
    assert "hint: write srun --nodes=2 --ntasks-per-node=1 launch ..." in ended.output


def test_a_batch_script_with_srun_runs(cluster: Cluster) -> None:
    script = f"sbatch --wait -N2 --output=/tmp/out --wrap 'srun --ntasks-per-node=1 {LAUNCH} --no-ray -- echo ran'"
    ended = cluster.run(f"{script}; cat /tmp/out", SLIPWAY_TOKEN=TOKEN)
    assert "ran" in ended.output, ended.output


def test_scancel_ends_every_node(cluster: Cluster) -> None:
    line = f"srun -J victim -N2 -n2 {LAUNCH} --no-ray -- sh -c 'echo up; scancel -n victim; sleep 60'"
    ended = cluster.run(line, SLIPWAY_TOKEN=TOKEN)
    assert ended.status != 0
    assert "received SIGTERM" in ended.output


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        pytest.param(
            "mpirun.openmpi --allow-run-as-root --host n1,n2 --map-by ppr:1:node -x SLIPWAY_TOKEN -x PATH",
            "open_mpi",
            id="open_mpi",
        ),
        pytest.param(
            "mpiexec.hydra -hosts n1,n2 -ppn 1 -n 2 -genv SLIPWAY_HEAD n1",
            "hydra",
            id="mpich",
            marks=pytest.mark.full,
        ),
    ],
)
def test_mpi_over_ssh(cluster: Cluster, line: str, environment: str) -> None:
    ended = cluster.run(f"{line} {LAUNCH} {OPTIONS} -- {COUNT}", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 0, ended.output
    assert "alive 2" in ended.output
    assert f"{environment}: node 1 of 2 (n2)" in ended.output


@pytest.mark.full
def test_mpich_without_a_head_gets_a_hint(cluster: Cluster) -> None:
    ended = cluster.run(
        f"mpiexec.hydra -hosts n1,n2 -ppn 1 -n 2 {LAUNCH} --deadline 3 --no-ray -- true", SLIPWAY_TOKEN=TOKEN
    )
    assert ended.status != 0
    assert "hydra does not name the head of 2 nodes" in ended.output
    assert "-genv SLIPWAY_HEAD $(hostname)" in ended.output
