"""The image's `launch`, started by real schedulers on two nodes. The guide's lines run as written there."""

import re
from pathlib import Path

import pytest

from tests.schedulers.conftest import Cluster

pytestmark = pytest.mark.usefixtures("no_ray_is_left")

LAUNCH = "/opt/slipway/venv/bin/launch"
OPTIONS = "--deadline 200 --num-cpus 1 --object-store-memory 100000000"
COUNT = 'python -c \'import ray; ray.init(log_to_driver=False); print("alive", sum(n["Alive"] for n in ray.nodes()))\''
TOKEN = "a secret of these tests"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "slurm.md"
DOCKER = f"""#!/bin/sh
# docker run, reduced to what decides here: the command sees the variables of --env-file and no others.
while [ "$1" != slipway:cuda ]; do
  if [ "$1" = --env-file ]; then file=$2; fi
  shift
done
shift
exec env -i PATH="$PATH" $(cat "$file") {LAUNCH} --no-ray -- echo ran "$@"
"""


def test_srun_forms_a_cluster_over_both_nodes(cluster: Cluster) -> None:
    ended = cluster.run(f"srun -N2 --ntasks-per-node=1 {LAUNCH} {OPTIONS} -- {COUNT}", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 0, ended.output
    assert ended.output.count("alive 2") == 1
    assert "launch[0 head]: slurm: node 0 of 2 (n1)" in ended.output
    assert "GLOO_SOCKET_IFNAME=eth0: eth0: the nodes met over it" in ended.output
    assert "NCCL_SOCKET_IFNAME='=eth0': eth0: the nodes met over it" in ended.output


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


INTERACTIVE = "salloc -N2 srun --interactive --preserve-env"
"""What salloc starts in place of the user's shell where LaunchParameters has use_interactive_step."""


def test_the_shell_of_salloc_does_not_run_alone(cluster: Cluster) -> None:
    ended = cluster.run(f"{INTERACTIVE} {LAUNCH} -- true", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 10, ended.output
    assert "hint: write srun --nodes=2 --ntasks-per-node=1 launch ..., or --single for this node alone" in ended.output


def test_the_shell_of_salloc_may_run_alone_on_purpose(cluster: Cluster) -> None:
    ended = cluster.run(f"{INTERACTIVE} {LAUNCH} --single --no-ray -- echo ran", SLIPWAY_TOKEN=TOKEN)
    assert ended.status == 0, ended.output
    assert "single: node 0 of 1 (n1)" in ended.output


def test_srun_within_salloc_runs(cluster: Cluster) -> None:
    ended = cluster.run(f"salloc -N2 srun --ntasks-per-node=1 {LAUNCH} --no-ray -- echo ran", SLIPWAY_TOKEN=TOKEN)
    assert (ended.status, ended.output.count("ran\n")) == (0, 1), ended.output


def test_a_step_on_one_node_of_a_larger_job_warns(cluster: Cluster) -> None:
    ended = cluster.run(f"salloc -N2 srun -N1 {LAUNCH} --no-ray -- echo ran", SLIPWAY_TOKEN=TOKEN)
    assert (ended.status, ended.output.count("ran\n")) == (0, 1), ended.output
    assert "this step has 1 of the job's 2 nodes (n[1-2])" in ended.output


HETEROGENEOUS = "salloc -N1 -w n2 : -N1 -w n1"


def test_the_components_of_a_heterogeneous_job_form_one_cluster(cluster: Cluster) -> None:
    line = f"{HETEROGENEOUS} srun --het-group=0,1 {LAUNCH} --no-ray -- sh -c 'echo $SLIPWAY_NODE_COUNT nodes'"
    ended = cluster.run(line, SLIPWAY_TOKEN=TOKEN)
    assert (ended.status, ended.output.count("2 nodes\n")) == (0, 1), ended.output
    assert "launch[0 head]: slurm: node 0 of 2 (n1)" in ended.output
    assert "launch[1 worker]: slurm: node 1 of 2 (n2)" in ended.output


def test_two_components_that_run_apart_are_two_jobs(cluster: Cluster) -> None:
    steps = " & ".join(f"srun --het-group={group} {LAUNCH} explain --json" for group in (0, 1))
    ended = cluster.run(f"{HETEROGENEOUS} sh -c '{steps} & wait'", SLIPWAY_TOKEN=TOKEN)
    ids = [line for line in ended.output.splitlines() if '"job_id"' in line]
    assert len(set(ids)) == 2, ended.output


@pytest.mark.full
def test_attach_reaches_a_running_job_from_a_step_of_its_own(cluster: Cluster) -> None:
    job = cluster.start(
        f"srun -J attached -N2 -n2 {LAUNCH} {OPTIONS} -- sh -c 'echo up; sleep 60' >/tmp/attached.out 2>&1",
        SLIPWAY_TOKEN=TOKEN,
    )
    cluster.wait_until("cat /tmp/attached.out", "up")
    jobid = cluster.run("squeue --noheader --name attached --format %A").output.strip()
    ended = cluster.run(f"srun --overlap --jobid {jobid} --nodes 1 {LAUNCH} attach -- ray status")
    assert ended.output.count("node_") == 2, ended.output
    cluster.run("scancel --name attached")
    job()


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


def documented(start: str) -> str:
    """The indented block of the guide that contains this line."""
    blocks = re.findall(r"(?:^    .*\n)+", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    (matching,) = [block for block in blocks if start in block]
    return re.sub(r"^    ", "", matching, flags=re.MULTILINE)


def test_the_line_for_docker_gives_each_container_its_own_nodes_variables(cluster: Cluster) -> None:
    for node in cluster.containers:
        cluster.put("/usr/local/bin/docker", DOCKER, node)
        cluster.run("chmod +x /usr/local/bin/docker", node)
    token = "a-token-without-blanks"  # the stand-in splits the file at blanks
    ended = cluster.run(documented("exec docker run"), SLIPWAY_TOKEN=token)
    assert ended.status == 0, ended.output
    assert ended.output.count("ran train trainer.output_dir=/runs model.path=/runs/model") == 1
    assert "slurm: node 1 of 2 (n2)" in ended.output
    assert cluster.run(f"grep -rls {token} /tmp", "n2").output == ""  # no file keeps the token


def test_failing_hosts_are_excluded(cluster: Cluster) -> None:
    cluster.put("/tmp/failing_hosts.txt", "n1\n")
    cluster.put("/tmp/job.sh", "#!/bin/sh\nhostname\n")
    line = documented("--exclude").strip().replace("sbatch", "sbatch --wait --output=/tmp/excluded.out")
    ended = cluster.run(f"cd /tmp && {line}")
    assert ended.status == 0, ended.output
    assert cluster.run("cat /tmp/excluded.out", "n2").output == "n2\n"


def test_the_line_for_pyxis_runs_without_its_options(cluster: Cluster) -> None:
    written = documented("--container-image=./slipway.sqsh").replace("\\\n", " ")
    plain = re.sub(r"--container-\S+", "", written).replace("launch train", f"{LAUNCH} --no-ray -- echo ran")
    ended = cluster.run(plain, SLIPWAY_TOKEN=TOKEN)
    assert (ended.status, ended.output.count("ran trainer.output_dir=/runs")) == (0, 1), ended.output
