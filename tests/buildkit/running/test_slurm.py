"""The batch script: sbatch knows its options, shellcheck accepts it, and it handles Slurm's warning signal."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildkit.errors import UsageError
from buildkit.host.machine import read_machine
from buildkit.host.shared_memory import shm_size
from buildkit.running.flags import RunRequest
from buildkit.running.slurm import CONTAINERS, PASSED_ON, SlurmOptions, shm_expression, slurm_text
from tests.buildkit.hosts import BARE, DGX, MI300X, Host

IMAGES = Path(__file__).parents[3] / "images"
# The long options that sbatch of Slurm 22.05 lists (sbatch --help), those that a batch job may use.
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "exclusive", "time", "partition",
    "account", "qos", "constraint", "nodelist", "exclude", "output", "open-mode", "requeue", "no-requeue", "signal",
}  # fmt: skip
ALL = SlurmOptions(
    time="3-00:00:00", partition="gpu", account="project", qos="high", constraint="h100", nodelist="gpu-[0,1]",
    exclude="gpu-7", cpus_per_task=28, mem="200G", exclusive=False, log="logs/%x-%j.out", warning=300, requeue=False,
)  # fmt: skip


def script(
    root: Path, target: str = "cuda", host: Host = DGX, options: SlurmOptions | None = None, **changes: Any
) -> str:
    request = RunRequest(
        f"slipway:{target}", target, ("train", "a.b=it's 1"), nodes=2, name="ppo", volumes=(f"{root}/x y:/runs",)
    )
    machine = replace(read_machine(host.write(root)), uid=0)
    return slurm_text(replace(request, **changes), machine, IMAGES, options)


def options_of(text: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(lines) == text.count("#SBATCH "), "every line is an option with one value"
    return dict(lines)


@pytest.mark.parametrize("container", CONTAINERS)
def test_bash_and_shellcheck_accept_it(tmp_path: Path, container: str) -> None:
    hosts = {"cpu": BARE, "cuda": DGX, "rocm": MI300X}
    paths = [tmp_path / f"{target}-{exclusive}.sh" for target in hosts for exclusive in ("exclusive", "shared")]
    for path in paths:
        target, _, exclusive = path.stem.partition("-")
        options = SlurmOptions(container=container, exclusive=exclusive == "exclusive")
        path.write_text(script(tmp_path / path.stem, target, hosts[target], options, environment=("A=$x 'y'",)))
        subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", "--severity=warning", *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("options", [None, ALL])
def test_every_option_is_known_to_sbatch(tmp_path: Path, options: SlurmOptions | None) -> None:
    assert set(options_of(script(tmp_path, options=options))) <= SBATCH


# A configuration with which sbatch reads a script's options; it fails afterwards, without a controller.
CONFIG = """ClusterName=c
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
CredType=cred/none
MessageTimeout=1
GresTypes=gpu
SelectType=select/cons_tres
NodeName=n[1-4]
PartitionName=gpu Nodes=n[1-4]
"""


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm's commands are not installed")
@pytest.mark.parametrize("options", [None, ALL])
def test_the_real_sbatch_reads_every_option(tmp_path: Path, options: SlurmOptions | None) -> None:
    (tmp_path / "slurm.conf").write_text(CONFIG)
    text = script(tmp_path, options=options)
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    for content, words in ((text, "Unable to contact slurm controller"), (text.replace("--mem=", "--men="), "--men")):
        (tmp_path / "job.sh").write_text(content)
        done = subprocess.run(
            ["sbatch", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert words in done.stderr


def test_one_task_per_node_with_its_gpus(tmp_path: Path) -> None:
    options = options_of(script(tmp_path))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    assert (options["requeue"], options["open-mode"], options["signal"]) == ("", "append", "B:USR1@120")
    assert "gpus-per-node" not in options_of(script(tmp_path, target="cpu"))


def test_requested_values_are_in_the_options(tmp_path: Path) -> None:
    options = options_of(script(tmp_path, options=ALL))
    assert options["time"] == "3-00:00:00"
    assert (options["partition"], options["account"], options["nodelist"]) == ("gpu", "project", "gpu-[0,1]")
    assert "no-requeue" in options
    assert "exclusive" not in options
    assert options["signal"] == "B:USR1@300"


def test_there_is_one_srun_line(tmp_path: Path) -> None:
    for container in CONTAINERS:
        assert (
            len(re.findall(r"^srun ", script(tmp_path, options=SlurmOptions(container=container)), re.MULTILINE)) == 1
        )


@pytest.mark.parametrize("container", CONTAINERS)
def test_tasks_get_the_scripts_environment_whatever_the_site_sets(tmp_path: Path, container: str) -> None:
    """SLURM_EXPORT_ENV=NONE, as `sbatch --export=NONE` sets it, keeps token and function from them."""
    assert "srun --export=ALL " in script(tmp_path, options=SlurmOptions(container=container))


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("docker", "grep -E '^(SLURM|SLURMD|SLIPWAY)_'"),
        ("enroot", "grep -E '^(SLURM|SLURMD|SLIPWAY)_'"),
        ("podman", "--env 'SLURM_*' --env 'SLURMD_*' --env 'SLIPWAY_*'"),
    ],
)
def test_containers_get_the_variables_that_launch_reads(tmp_path: Path, container: str, words: str) -> None:
    assert words in script(tmp_path, options=SlurmOptions(container=container))


def test_the_guide_passes_the_same_variables_as_the_script() -> None:
    guide = (IMAGES.parent / "docs/guides/slurm.md").read_text(encoding="utf-8")
    assert re.findall(r'grep -E "(\S+)_"\)', guide) == [f"^({'|'.join(PASSED_ON)})"]


@pytest.mark.parametrize("time", ["90", "12:00:00", "30-00:00:00", "2-12", "UNLIMITED"])
def test_times_in_sbatchs_format_are_accepted(tmp_path: Path, time: str) -> None:
    assert options_of(script(tmp_path, options=SlurmOptions(time=time)))["time"] == time


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (SlurmOptions(time="a day"), "--time"),
        (SlurmOptions(container="lxc"), "--container lxc"),
        (SlurmOptions(partition="gpu\n#SBATCH --uid=0"), "contains a blank"),
    ],
)
def test_values_that_sbatch_would_refuse_are_refused(tmp_path: Path, options: SlurmOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        script(tmp_path, options=options)


PROGRAMS = {
    # Fake Slurm and docker commands, which record their arguments.
    "srun": 'echo "srun $*" >>calls; while [[ $1 == --* ]]; do shift; done; '
    '[ "$1" != bash ] || "$@"; trap "echo stopped >>calls; exit 143" TERM; '
    "echo $$ >pid; for _ in $(seq 100); do sleep 0.1; [ ! -e end ] || exit 0; done",
    "scontrol": 'echo "scontrol $*" >>calls; [ "$1" != listpids ] || '
    'printf "PID JOBID STEPID LOCALID GLOBALID\\n-1 42 0 - -\\n%s 42 0 0 0\\n" "$(cat pid)"',
    "docker": 'printf "<%s>" "$@" >>calls; cat "$4" >environment',
}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    return tmp_path


def submit(folder: Path, text: str, **variables: str) -> subprocess.Popen[bytes]:
    (folder / "job.sh").write_text(text)
    environment = {
        **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n1",
        **variables,
    }  # fmt: skip
    return subprocess.Popen(["bash", "job.sh"], cwd=folder, env=environment)


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def test_a_finished_job_is_not_requeued_with_fake_slurm_and_docker(cluster: Path) -> None:
    (cluster / "end").touch()
    job = submit(cluster, script(cluster))
    assert job.wait(timeout=30) == 0
    calls = (cluster / "calls").read_text()
    assert "scontrol" not in calls
    assert "<--gpus><all>" in calls
    assert f"<{cluster}/x y:/runs>" in calls
    assert (cluster / "x y").is_dir(), "docker would create it as root"
    assert calls.rstrip().endswith("<slipway:cuda><--grace><110><train><a.b=it's 1>")
    assert re.search(r"<--shm-size><\d+>", calls)
    handed = (cluster / "environment").read_text()
    assert {"SLURM_JOB_ID=42", "SLURMD_NODENAME=n1"} <= set(handed.splitlines())
    assert re.search(r"^SLIPWAY_TOKEN=[0-9a-f]{64}$", handed, re.MULTILINE)


def test_a_job_on_a_shared_node_gets_its_own_gpus_with_fake_slurm_and_docker(cluster: Path) -> None:
    (cluster / "end").touch()
    text = script(cluster, options=SlurmOptions(exclusive=False))
    assert submit(cluster, text, SLURM_STEP_GPUS="4,6").wait(timeout=30) == 0
    calls = (cluster / "calls").read_text()
    assert '<--gpus><"device=4,6">' in calls
    assert calls.count("<--gpus>") == 1
    submit(cluster, text).wait(timeout=30)
    assert (cluster / "calls").read_text().count("<run>") == 1, "without Slurm's choice, nothing is started"


@pytest.mark.parametrize(
    ("target", "host", "container", "words"),
    [
        ("cuda", DGX, "podman", 'flags+=(--device "nvidia.com/gpu=$gpu")'),
        ("rocm", MI300X, "docker", 'flags+=(--env "ROCR_VISIBLE_DEVICES=$gpus")'),
        ("rocm", MI300X, "podman", 'flags+=(--env "ROCR_VISIBLE_DEVICES=$gpus")'),
    ],
)
def test_a_shared_nodes_gpus_are_slurms_choice(
    tmp_path: Path, target: str, host: Host, container: str, words: str
) -> None:
    text = script(tmp_path, target, host, SlurmOptions(container=container, exclusive=False), gpus=2)
    assert words in text
    assert "nvidia.com/gpu=all" not in text
    assert words not in script(tmp_path, target, host, SlurmOptions(container=container))


def test_rootless_podman_keeps_the_groups_that_own_the_gpus(tmp_path: Path) -> None:
    request = RunRequest("slipway:rocm", "rocm", ("train",), nodes=2, name="ppo")
    machine = replace(read_machine(BARE.write(tmp_path)), uid=1000)
    text = slurm_text(request, machine, IMAGES, SlurmOptions(container="podman"))
    assert "--group-add keep-groups" in text


@pytest.mark.parametrize("awk", [awk for awk in ("mawk", "gawk", "busybox awk") if shutil.which(awk.split()[0])])
@pytest.mark.parametrize("kib", [5 * 10**5, 64 * 2**20, 2 * 2**30, 3 * 2**30 + 1])
def test_every_awk_finds_the_size_of_shared_memory_as_python_does(tmp_path: Path, awk: str, kib: int) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal:       {kib} kB\nMemFree:        1 kB\n")
    command = shm_expression().replace("/proc/meminfo", str(tmp_path / "meminfo")).replace("awk", awk, 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert int(done.stdout) == shm_size(kib * 1024)


def test_a_warning_stops_the_step_and_requeues_the_job_with_a_fake_slurm(cluster: Path) -> None:
    job = submit(cluster, script(cluster, options=SlurmOptions(container="none")))
    wait_for(cluster / "pid")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 143
    calls = (cluster / "calls").read_text()
    assert "scontrol listpids 42.0" in calls
    assert "stopped" in calls
    assert "scontrol requeue 42" in calls


def test_without_requeue_a_warning_only_stops_the_step_with_a_fake_slurm(cluster: Path) -> None:
    job = submit(cluster, script(cluster, options=SlurmOptions(container="none", requeue=False)))
    wait_for(cluster / "pid")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 143
    assert "requeue" not in (cluster / "calls").read_text()


# The options of pyxis 0.24 (spank_opts in args.c), and those of them that take a value.
PYXIS = {
    "container-image", "container-mounts", "container-workdir", "container-name", "container-save",
    "container-mount-home", "no-container-mount-home", "container-remap-root", "no-container-remap-root",
    "container-entrypoint", "no-container-entrypoint", "container-entrypoint-log", "container-writable",
    "container-readonly", "container-env", "container-unshare",
}  # fmt: skip
WITH_VALUE = {"container-image", "container-mounts"}


def pyxis_options(root: Path, **changes: Any) -> dict[str, str]:
    line = next(
        line
        for line in script(root, options=SlurmOptions(container="pyxis"), **changes).splitlines()
        if "--container-image" in line
    )
    words = [word for word in shlex.split(line.rstrip("\\ &")) if "container-" in word]
    return {name: value for name, _, value in (word.removeprefix("--").partition("=") for word in words)}


def test_pyxis_knows_every_option(tmp_path: Path) -> None:
    options = pyxis_options(tmp_path)
    assert options.keys() <= PYXIS
    assert {name for name, value in options.items() if value} == WITH_VALUE


def test_mounts_are_written_as_pyxis_splits_them(tmp_path: Path) -> None:
    """pyxis splits mounts at commas, and the flags of one at plus signs (spank_option_mount in args.c)."""
    mounts = pyxis_options(tmp_path, volumes=("/x y:/runs", "/data:/data:ro,rprivate"))["container-mounts"]
    assert mounts.split(",") == ["/x y:/runs", "/data:/data:ro+rprivate"]


@pytest.mark.parametrize(
    ("image", "uri"),
    [
        ("slipway:cuda", "./slipway_cuda.sqsh"),
        ("slipway.sqsh", "./slipway.sqsh"),
        ("team/slipway:cuda", "team/slipway:cuda"),
        ("ghcr.io/team/slipway:cuda", "ghcr.io#team/slipway:cuda"),
        ("localhost:5000/slipway", "localhost:5000#slipway"),
        ("./slipway.sqsh", "./slipway.sqsh"),
        ("/images/slipway.sqsh", "/images/slipway.sqsh"),
    ],
)
def test_pyxis_gets_the_image_as_enroot_reads_it(tmp_path: Path, image: str, uri: str) -> None:
    """[USER@][REGISTRY#]IMAGE[:TAG], or a path (https://github.com/NVIDIA/enroot/blob/master/doc/cmd/import.md).

    A local image is the file of `buildkit export --format squashfs`: enroot would ask Docker Hub for its name.
    """
    assert pyxis_options(tmp_path, image=image)["container-image"] == uri


@pytest.mark.parametrize("image", ["slipway.sqsh", "/images/slipway.sqsh"])
def test_enroot_starts_the_file_that_was_named(tmp_path: Path, image: str) -> None:
    assert f" node {image} " in script(tmp_path, options=SlurmOptions(container="enroot"), image=image)
