"""Real Ray clusters. Skipped without Ray, which the images have."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.conftest import Launch, Start
from tests.entrypoints.ray.conftest import SMALL, leaving_nothing, ray_directories
from tests.process_table import alive, descendants, name_of

pytest.importorskip("ray", reason="needs Ray, which the images have")
pytestmark = pytest.mark.usefixtures("nothing_is_left")

COUNT_NODES = """
import os, ray, sys
ray.init(log_to_driver=False, logging_level="ERROR")
token = os.environ["RAY_AUTH_TOKEN"]
where = ray.remote(lambda: (ray.get_runtime_context().get_node_id(), "SLURM_JOB_NAME" in os.environ))
nodes = [node for node in ray.nodes() if node["Alive"]]
strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
ran = ray.get([where.options(scheduling_strategy=strategy(node["NodeID"], soft=False)).remote() for node in nodes])
print(len(set(ran)), any(scheduled for _, scheduled in ran), os.environ["RAY_AUTH_MODE"], len(token))
sys.exit(7)
"""


SAVE_ON_ALL_NODES = """
import ray, signal, time
asked = []
ray.init(log_to_driver=False, logging_level="ERROR")
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))  # after Ray has set its own handler
@ray.remote(num_cpus=1)
def save():
    time.sleep(3)  # longer than Ray lives after SIGTERM
    return ray.get_runtime_context().get_node_id()
print("up", flush=True)
while not asked:
    time.sleep(0.05)
print("saved on", len(set(ray.get([save.remote() for _ in range(2)]))), "nodes", flush=True)
"""


def start_pair(start_node: Start, *command: str) -> tuple[Launch, Launch]:
    # The host names are for `launch` only: Ray binds to the host's address.
    variables = {"SLIPWAY_DEADLINE": "240", "SLURM_JOB_NAME": "outer"}
    worker = start_node(1, *SMALL, "--", "true", **variables)
    return start_node(0, *SMALL, "--", *command, **variables), worker


TLS_IS_NEEDED = """
import os, socket, ssl
host, port = os.environ["RAY_ADDRESS"].rsplit(":", 1)
context = ssl.create_default_context(cafile=os.environ["RAY_TLS_CA_CERT"])
context.set_alpn_protocols(["h2"])
def greeted():
    try:
        with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as connection:
            return connection.recv(1) != b""
    except OSError:
        return False
print("without a certificate:", greeted())
context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
print("with one:", greeted(), flush=True)
"""


def test_two_nodes_speak_tls(start_node: Start) -> None:
    variables = {"SLIPWAY_DEADLINE": "240"}
    worker = start_node(1, *SMALL, "--tls", "--", "true", **variables)
    script = f"{sys.executable} -c '{TLS_IS_NEEDED}' && {sys.executable} -c '{COUNT_NODES}'"
    told = start_node(0, *SMALL, "--tls", "--", "sh", "-c", script, **variables).wait()
    assert (told.status, worker.wait().status) == (7, 7), told.stderr
    assert told.stdout == "without a certificate: False\nwith one: True\n2 False token 64\n"


def test_a_node_without_tls_is_refused(start_node: Start) -> None:
    head = start_node(0, *SMALL, "--tls", "--", "true", SLIPWAY_DEADLINE="4")
    worker = start_node(1, *SMALL, "--", "true")
    assert "--tls differs: False there, True on the head" in worker.wait().stderr
    assert head.wait().status == 12


@pytest.mark.usefixtures("ipv6")
def test_ray_runs_over_ipv6_on_nodes_without_ipv4(start_node: Start) -> None:
    variables = {"SLIPWAY_DEADLINE": "240", "SLIPWAY_HOSTS": "::1,worker-1.invalid"}
    worker = start_node(1, *SMALL, "--", "true", **variables)
    told = start_node(0, *SMALL, "--", sys.executable, "-c", COUNT_NODES, **variables).wait()
    assert (told.status, worker.wait().status) == (7, 7), told.stderr
    assert told.stdout == "2 False token 64\n"


LEFT = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
print(ray.cluster_resources()["CPU"], ray.cluster_resources().get("GPU", 0))
"""


def test_ray_has_the_cpus_and_gpus_that_a_scheduler_left(start: Start) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # as taskset and schedulers do; the launch inherits it
    try:
        launch = start(
            *("--single", "--object-store-memory", "100000000", "--", sys.executable, "-c", LEFT),
            CUDA_VISIBLE_DEVICES="-1",
        )
    finally:
        os.sched_setaffinity(0, before)
    ended = launch.wait()
    assert (ended.status, ended.stdout) == (0, "1.0 0\n"), ended.stderr


WORKING = """
import signal, time, ray
ray.init(log_to_driver=False, logging_level="ERROR")
ray.get(ray.remote(lambda: 5).remote())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    time.sleep(600)
"""
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1, ::ffff:127.0.0.1 and ::1 in the kernel's table."""


def listeners(pids: list[int]) -> dict[str, str]:
    """The addresses, as the kernel writes them, at which these processes listen, each with the name of one of them."""
    owners = {}
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            owners |= {str(link.readlink()): name_of(pid) for link in Path(f"/proc/{pid}/fd").iterdir()}
    tables = (Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    return {row[1]: owners[f"socket:[{row[9]}]"] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in owners}


def test_a_node_alone_listens_on_loopback_keeps_rays_logs_and_ends_within_the_time_of_docker_stop(
    start: Start, tmp_path: Path
) -> None:
    launch = start(*SMALL, "--dashboard", "--log-dir", str(tmp_path / "logs"), "--", sys.executable, "-c", WORKING)
    assert launch.read_line() == "up"
    below = descendants(launch.pid)
    listening = listeners(below)
    assert len(listening) >= 8
    assert {address: name for address, name in listening.items() if address.partition(":")[0] not in LOOPBACK} == {}
    deadline = time.monotonic() + 60
    while not list((tmp_path / "logs").glob("node0-*/ray/gcs_server*")):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    began = time.monotonic()
    launch.signal(signal.SIGTERM)
    assert launch.wait().status == 143
    assert time.monotonic() - began < 10
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


@pytest.mark.full
def test_on_one_node_a_training_run_listens_on_loopback_only(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch, which the images have")
    command = (sys.executable, "-m", "tests.cluster.training", str(tmp_path), "1000")
    launch = start("--single", *SMALL[:2], "--num-gpus", "0", *SMALL[4:], "--", *command)
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "checkpoints" / "step_000001").exists():
        assert launch.running, launch.wait().stderr
        assert time.monotonic() < deadline
        time.sleep(0.5)
    listening = listeners(descendants(launch.pid))
    launch.signal(signal.SIGTERM)
    assert launch.wait().status == 143
    assert "ray::ActorWorke" in listening.values()  # torch's store and Gloo
    assert {address: name for address, name in listening.items() if address.partition(":")[0] not in LOOPBACK} == {}


FACTS = """
import json, os, ray, stat, tempfile
from pathlib import Path
ray.init(log_to_driver=False, logging_level="ERROR")
(node,) = ray.nodes()
(directory,) = Path("/tmp").glob("slipway-ray-*")
temporary, cache, remembered = ray.get(ray.remote(lambda: (
    tempfile.mkstemp()[1], os.environ.get("TORCHINDUCTOR_CACHE_DIR"), ray._config.task_events_max_num_task_in_gcs()
)).remote())
print(json.dumps({
    "token": (os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])),
    "slots": node["Resources"].get("SLOT"),
    "labels": node["Labels"],
    "mode of the directory": oct(stat.S_IMODE(directory.stat().st_mode)),
    "temporary file": temporary,
    "cache": cache,
    "calls to remember": remembered,
    "descriptor to wait at": os.environ.get("SLIPWAY_READY_FD"),
}))
"""


def facts(directory: Path, *options: str, **variables: str) -> dict[str, Any]:
    """What a command and a worker of Ray's see in a launch of one node."""
    with leaving_nothing():
        ended = Launch([*SMALL, *options, "--", sys.executable, "-c", FACTS], variables, directory).wait()
    assert ended.status == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


@pytest.fixture(scope="module")
def defaults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One node of a Slurm job."""
    slurm = {"SLURM_TOPOLOGY_ADDR": "core.r9.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    return facts(tmp_path_factory.mktemp("defaults"), "--single", **slurm)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The user says more."""
    directory = tmp_path_factory.mktemp("given")
    options = ("--resources", '{"SLOT": 2}', "--labels", "rack=r7,nvlink-domain=3")
    variables = {"TMPDIR": str(directory), "RAY_task_events_max_num_task_in_gcs": "7"}
    return {**facts(directory, *options, **variables), **variables}


def test_one_node_needs_no_token(defaults: dict[str, Any]) -> None:
    assert defaults["token"] == ["token", 64]


def test_a_command_starts_when_ray_is_up(defaults: dict[str, Any]) -> None:
    assert defaults["descriptor to wait at"] is None


def test_a_node_has_the_given_resources_and_labels(defaults: dict[str, Any], given: dict[str, Any]) -> None:
    assert given["slots"] == 2
    assert (given["labels"]["rack"], given["labels"]["nvlink-domain"]) == ("r7", "3")
    assert defaults["labels"]["rack"] == "r9", "from Slurm"


def test_a_stranger_cannot_enter_rays_directory(defaults: dict[str, Any]) -> None:
    assert defaults["mode of the directory"] == "0o700"


def test_temporary_files_of_rays_workers_end_with_the_job_and_caches_stay(defaults: dict[str, Any]) -> None:
    file = Path(defaults["temporary file"])
    assert file.match("/tmp/slipway-ray-*/t/*")
    assert not file.exists()
    assert Path(defaults["cache"]).match("/tmp/torchinductor_*")


def test_the_users_directory_for_temporary_files_is_kept(given: dict[str, Any]) -> None:
    assert given["temporary file"].startswith(f"{given['TMPDIR']}/")


def test_ray_remembers_as_many_calls_as_it_can_list_unless_the_user_says_how_many(
    defaults: dict[str, Any], given: dict[str, Any]
) -> None:
    assert defaults["calls to remember"] == 10_000
    assert given["calls to remember"] == 7


def find(launch: Launch, name: str) -> int:
    (pid,) = [pid for pid in descendants(launch.pid) if name_of(pid) == name]
    return pid


@pytest.mark.parametrize(("rank", "name"), [(0, "gcs_server"), (1, "raylet")])
def test_the_death_of_ray_on_any_node_ends_the_job(start_node: Start, rank: int, name: str) -> None:
    pair = start_pair(start_node, "sh", "-c", "echo up; exec sleep 60")
    assert pair[0].read_line() == "up"
    below = [pid for launch in pair for pid in descendants(launch.pid)]
    os.kill(find(pair[rank], name), signal.SIGKILL)
    ends = [launch.wait() for launch in pair]
    assert [end.status for end in ends] == [13, 13]
    assert all(f"lost: its {name} died (killed by SIGKILL)" in end.stderr for end in ends)
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_killed_launch_leaves_no_ray_behind(start: Start, which: str) -> None:
    launch = start(*SMALL, "--", "sh", "-c", "echo up; exec sleep 100")
    assert launch.read_line() == "up"
    below = descendants(launch.pid)
    os.kill(launch.pid if which == "first" else below[0], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for path in ray_directories() if which == "second" else ():
        shutil.rmtree(path)  # nobody was left to remove it


def test_after_both_processes_of_a_launch_are_killed_the_next_one_names_what_they_left(start: Start) -> None:
    launch = start(*SMALL, "--", "sh", "-c", "echo up; exec sleep 100")
    assert launch.read_line() == "up"
    below = descendants(launch.pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # neither of the two can react to the other's death
        for pid in (launch.pid, below[0]):
            os.kill(pid, number)
    while alive(launch.pid) or alive(below[0]):
        time.sleep(0.05)
    left = {str(pid) for pid in below[1:] if alive(pid)}
    (directory,) = ray_directories()
    ended = start("preflight", "--json").wait()
    (finding,) = [entry for entry in json.loads(ended.stdout)["findings"] if entry["check"] == "leftovers"]
    assert finding["message"].startswith(f"launches that were killed left {directory}, and Ray running: ")
    kill, remove = finding["fix"].split("; ")
    named = set(kill.removeprefix("kill -9 ").split())
    assert {name_of(int(pid)) for pid in named} >= {"raylet", "gcs_server"}
    assert named <= left
    subprocess.run(kill.split(), check=True)
    subprocess.run(remove.split(), check=True)
    (command,) = [pid for pid in left if alive(int(pid)) and name_of(int(pid)) == "sleep"]  # it knows nothing of Ray
    os.kill(int(command), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while rest := [pid for pid in left if alive(int(pid))]:  # Ray's agents end once they miss their raylet
        assert time.monotonic() < deadline, {pid: name_of(int(pid)) for pid in rest}
        time.sleep(0.2)


def test_a_signal_to_all_nodes_leaves_ray_up_until_the_command_has_saved(start_node: Start) -> None:
    variables = {"SLIPWAY_DEADLINE": "240"}
    worker = start_node(1, *SMALL, "--grace", "60", "--", "true", **variables)
    head = start_node(0, *SMALL, "--grace", "60", "--", sys.executable, "-c", SAVE_ON_ALL_NODES, **variables)
    assert head.read_line() == "up"
    for launch in (worker, head):
        launch.signal(signal.SIGTERM)
    told = head.wait()
    assert told.stdout == "saved on 2 nodes\n", told.stderr
    assert (told.status, worker.wait().status) == (143, 143)


def test_ray_that_cannot_start_is_an_error_with_its_reason(start: Start) -> None:
    ended = start("--object-store-memory", "1000", "--", "true").wait()
    assert ended.status == 14
    assert "error: ray start failed with status" in ended.stderr
    assert "object store" in ended.stderr.lower()


def test_two_nodes_form_one_cluster_which_a_launch_in_the_command_uses(start_node: Start) -> None:
    inner = (sys.executable, "-m", "entrypoints", "--", sys.executable, "-c", COUNT_NODES)
    head, worker = start_pair(start_node, *inner)
    told = head.wait()
    assert (told.status, worker.wait().status) == (7, 7), told.stderr
    assert told.stdout == "2 False token 64\n"
    assert "2 nodes, 2 GPUs" in told.stderr


def test_a_node_on_which_ray_cannot_start_tells_every_node_the_reason(start_node: Start) -> None:
    head = start_node(0, *SMALL, "--", "true", SLIPWAY_DEADLINE="240")
    worker = start_node(1, *SMALL[:4], "--object-store-memory", "1000", "--", "true", SLIPWAY_DEADLINE="240")
    for ended in (head.wait(), worker.wait()):
        assert ended.status == 14
        assert re.search(r"error: node 1 \(\S+\): ray start failed with status 1: ray start: ValueError:", ended.stderr)
        assert "the minimum allowed is" in ended.stderr


def stop_first(launch: Launch, name: str) -> int:
    """Stops the first process with this name below a launch, as soon as it is there."""
    deadline = time.monotonic() + 60
    while not (pids := [pid for pid in descendants(launch.pid) if name_of(pid) == name]):
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGSTOP)
    return pids[0]


@pytest.mark.full
def test_a_start_that_ran_into_rays_own_time_limit_is_repeated_within_the_deadline(start_node: Start) -> None:
    """A stopped raylet stands for one that is slow; Ray waits 30 s for it."""
    head, worker = start_pair(start_node, "echo", "up")
    stopped = stop_first(worker, "raylet")
    told, followed = head.wait(), worker.wait()
    assert (told.status, followed.status, told.stdout) == (0, 0, "up\n"), told.stderr
    assert "Ray is started again, as one of its time limits passed: ray start failed" in followed.stderr
    assert "starts Ray again, as one of its time limits passed: ray start failed" in told.stderr
    assert not alive(stopped)


def test_the_deadline_covers_ray(start: Start) -> None:
    ended = start(*SMALL, "--deadline", "1", "--", "true").wait()
    assert ended.status == 14
    assert "the deadline of 1 s passed while waiting for Ray on the head" in ended.stderr


def test_after_a_loss_the_command_restarts_on_a_new_cluster(start_node: Start, tmp_path: Path) -> None:
    # One node is left, which forms a new Ray cluster.
    script = "echo $SLIPWAY_NODE_COUNT $RAY_ADDRESS; [ $SLIPWAY_NODE_COUNT = 1 ] || exec sleep 100"
    variables = {"SLIPWAY_DEADLINE": "240", "SLIPWAY_LOG_DIR": str(tmp_path / "logs")}
    worker = start_node(1, *SMALL, "--", "true", **variables)
    head = start_node(0, *SMALL, "--min-nodes", "1", "--", "sh", "-c", script, **variables)
    assert head.read_line().startswith("2 ")
    os.kill(find(worker, "raylet"), signal.SIGKILL)
    assert head.read_line().startswith("1 ")
    ended = head.wait()
    assert ended.status == 0
    assert "continuing with 1 nodes: node 1 (" in ended.stderr
    assert "lost: its raylet died (killed by SIGKILL)" in ended.stderr
    assert worker.wait().status == 13
    assert list((tmp_path / "logs").glob("node0-*/ray/gcs_server*"))
    assert list((tmp_path / "logs").glob("node1-*/ray/raylet*"))
