"""A node is alone only if nothing shows other nodes, or if the user says so."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoints.environments import detect
from entrypoints.errors import DetectionError

SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ACME_NUM_NODES": "4"}, "ACME_NUM_NODES is '4'"),
        ({"ACME_NNODES": "4"}, "ACME_NNODES is '4'"),
        ({"ACME_NODES_NUM": "2"}, "ACME_NODES_NUM is '2'"),
        ({"ACME_NODE_COUNT": "2"}, "ACME_NODE_COUNT is '2'"),
        ({"ACME_WORKER_NUM": "2"}, "ACME_WORKER_NUM is '2'"),
        ({"ACME_TOTAL_WORKERS": "2"}, "ACME_TOTAL_WORKERS is '2'"),
        ({"ACME_ARRAY_SIZE": "8"}, "ACME_ARRAY_SIZE is '8'"),
        ({"ACME_NPROCS": "3"}, "ACME_NPROCS is '3'"),
        ({"ACME_NUM_PROCESSES": "3"}, "ACME_NUM_PROCESSES is '3'"),
        ({"ACME_WORLD_SIZE": "16"}, "ACME_WORLD_SIZE is '16'"),
        ({"ACME_NNODES": "1:4"}, "ACME_NNODES is '1:4'"),
        ({"NODES": "2"}, "NODES is '2'"),
        ({"MOAB_NODECOUNT": "2"}, "MOAB_NODECOUNT is '2'"),
        ({"MA_NUM_HOSTS": "2"}, "MA_NUM_HOSTS is '2'"),
        ({"PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINERS_NUM is '2'"),
        ({"CLOUD_RUN_TASK_COUNT": "2"}, "CLOUD_RUN_TASK_COUNT is '2'"),
        ({"NOMAD_ALLOC_INDEX": "1"}, "NOMAD_ALLOC_INDEX is 1"),
        ({"ACME_WORKER_INDEX": "1"}, "ACME_WORKER_INDEX is 1"),
        ({"PADDLE_TRAINER_ENDPOINTS": "me:6170,other:6170"}, "PADDLE_TRAINER_ENDPOINTS lists 2 hosts (me, other)"),
        ({"DMLC_NUM_WORKER": "2"}, "DMLC_NUM_WORKER is '2'"),
        ({"SLURM_NNODES": "2"}, "SLURM_NNODES is '2'"),
        ({"ACME_NODE_RANK": "1"}, "ACME_NODE_RANK is 1"),
        ({"ACME_NODELIST": "n[1-2]"}, "ACME_NODELIST lists 2 hosts (n1, n2)"),
        ({"ACME_HOSTLIST": "a b"}, "ACME_HOSTLIST lists 2 hosts (a, b)"),
        ({"ACME_NODE_IPS": "10.0.0.1\n10.0.0.2"}, "ACME_NODE_IPS lists 2 hosts (10.0.0.1, 10.0.0.2)"),
        ({"ACME_WORKER_HOSTS": "a:2222,b:2222"}, "ACME_WORKER_HOSTS lists 2 hosts (a, b)"),
        ({"ACME_WORKER_HOSTS": "[fd00::1]:22,[fd00::2]:22"}, "ACME_WORKER_HOSTS lists 2 hosts (fd00::1, fd00::2)"),
        ({"TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3,t-4"}, "TPU_WORKER_HOSTNAMES lists 5 hosts (t-0, t-1, t-2, t-3, …)"),
        ({"ACME_ALL_HOSTS": '["a", "b"]'}, "ACME_ALL_HOSTS lists 2 hosts (a, b)"),
        ({"CLUSTER": "x", "ACME_HOSTS": "me,other"}, "ACME_HOSTS lists 2 hosts (me, other)"),
        ({"ACME_PEERS": "other,me.lan"}, "ACME_PEERS lists 2 hosts (me.lan, other)"),
        ({"HOSTFILE": "/hosts"}, "HOSTFILE is /hosts, which lists 2 hosts"),
        ({"ACME_NODEFILE": "/nowhere"}, "ACME_NODEFILE is /nowhere, which cannot be read here"),
        (
            {"MASTER_ADDR": "gpu-0", "MASTER_PORT": "29500"},
            "MASTER_ADDR is gpu-0, another host, so there are other nodes",
        ),
        ({"MASTER_ADDR": "10.0.0.1", "RANK": "0"}, "MASTER_ADDR is 10.0.0.1, another host, so there are other nodes"),
        ({"PET_RDZV_ENDPOINT": "gpu-0:29400", "PET_RDZV_BACKEND": "c10d"}, "PET_RDZV_ENDPOINT is gpu-0:29400"),
        ({"RDZV_ENDPOINT": "[fd00::1]:29400"}, "RDZV_ENDPOINT is [fd00::1]:29400"),
        ({"JAX_COORDINATOR_ADDRESS": "gpu-0:1234"}, "JAX_COORDINATOR_ADDRESS is gpu-0:1234"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is 0 of SLURM_NTASKS 2"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID is 1"),
        ({"ACME_JOB_INDEX": "0", "ACME_JOBS_COUNT": "2"}, "ACME_JOB_INDEX is 0 of ACME_JOBS_COUNT 2"),
        ({"ACME_JOB_RANK": "1"}, "ACME_JOB_RANK is 1"),
        ({"ACME_POD_INDEX": "1"}, "ACME_POD_INDEX is 1"),
        ({"ACME_INSTANCE_ORDINAL": "3"}, "ACME_INSTANCE_ORDINAL is 3"),
        ({"acme_node_rank": "1"}, "acme_node_rank is 1"),
        ({"ACME_RANK": "0", "ACME_SIZE": "4"}, "ACME_RANK is 0 of ACME_SIZE 4"),
        ({"ACME_RANK": "0", "ACME_NRANKS": "4"}, "ACME_RANK is 0 of ACME_NRANKS 4"),
        ({"ACME_TASK_ID": "0", "ACME_NUM_TASKS": "4"}, "ACME_TASK_ID is 0 of ACME_NUM_TASKS 4"),
        ({"ACME_WORKER_INDEX": "0", "ACME_WORKER_COUNT": "4"}, "ACME_WORKER_INDEX is 0 of ACME_WORKER_COUNT 4"),
        ({"ACME_TOTAL_INSTANCES": "3"}, "ACME_TOTAL_INSTANCES is '3'"),
        ({"ACME_REPLICA_COUNT": "3"}, "ACME_REPLICA_COUNT is '3'"),
        ({"ACME_GANG_SIZE": "3"}, "ACME_GANG_SIZE is '3'"),
        ({"ACME_LEADER": "gpu-0"}, "ACME_LEADER is gpu-0, another host"),
        ({"ACME_LEADER_IP": "[fd00::1]:80"}, "ACME_LEADER_IP is [fd00::1]:80, another host"),
        ({"DET_CHIEF_IP": "10.0.0.1"}, "DET_CHIEF_IP is 10.0.0.1, another host"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK is 3, so this is not the node's first task"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID is 1, so this is not the node's first task"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is '0': a PMIx server started this task"),
        ({"PMI_RANK": "0"}, "PMI_RANK is '0': a PMI process manager started this task"),
    ],
)
def test_a_variable_that_shows_other_nodes_is_named(tmp_path: Path, variables: Mapping[str, str], named: str) -> None:
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n", encoding="ascii")
    with pytest.raises(DetectionError) as refused:
        detect(variables, "me", tmp_path)
    assert named in refused.value.message
    assert "--single" in refused.value.hint
    assert refused.value.exit_code == 10
    assert detect({**variables, "SLIPWAY_SINGLE": "1"}, "me", tmp_path).allocation.node_count == 1


@pytest.mark.parametrize(
    "path",
    [
        *("/var/spool/slurmd/cred", "/run/flux/local", "/var/spool/pbs/aux/1.server", "/etc/volcano/worker.host"),
        *("/etc/mpi/hostfile", "/job/hostfile"),
    ],
)
def test_a_schedulers_folder_or_socket_shows_other_nodes(tmp_path: Path, path: str) -> None:
    place = tmp_path / path.lstrip("/")
    place.parent.mkdir(parents=True)
    place.touch()
    with pytest.raises(DetectionError, match="whose variables are missing here"):
        detect({}, "me", tmp_path)
    assert detect({"SLIPWAY_SINGLE": "1"}, "me", tmp_path).allocation.node_count == 1


def test_a_later_pod_of_a_headless_service_is_not_alone(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "hosts").write_text("10.244.0.7 ppo-2.peers.ml.svc.cluster.local ppo-2\n", encoding="ascii")
    with pytest.raises(DetectionError, match="this pod is ppo-2 of a headless service, so there are pods 0 to 2"):
        detect({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "ppo-2", tmp_path)


ALONE = {
    "a workstation": {"SHELL": "/bin/bash", "HOSTNAME": "me", "NO_PROXY": "localhost,me,10.0.0.0/8", "DISPLAY": ":0"},
    "GitLab CI, one of five parallel jobs": {"CI": "true", "CI_NODE_INDEX": "2", "CI_NODE_TOTAL": "5"},
    "CircleCI, one of four parallel jobs": {"CIRCLE_NODE_INDEX": "1", "CIRCLE_NODE_TOTAL": "4"},
    "Buildkite": {"BUILDKITE_PARALLEL_JOB": "1", "BUILDKITE_PARALLEL_JOB_COUNT": "4"},
    "GitHub Actions": {"GITHUB_ACTIONS": "true", "RUNNER_NAME": "r-1", "GITHUB_JOB": "test", "GITHUB_RUN_ATTEMPT": "2"},
    "Jenkins": {"NODE_NAME": "me", "NODE_LABELS": "gpu me", "EXECUTOR_NUMBER": "3", "BUILD_NUMBER": "12"},
    "a machine that builds with all its CPUs": {"NPROCS": "4", "MAKEFLAGS": "-j4", "MAX_JOBS": "4", "NPROC": "8"},
    "processes per node": {
        "NPROC_PER_NODE": "8",
        "PET_NPROC_PER_NODE": "8",
        "GPUS_PER_NODE": "8",
        "LOCAL_WORLD_SIZE": "8",
    },
    "all processes on one node": {"ACME_NUM_PROCESSES": "8", "ACME_PROCS_PER_NODE": "8"},
    "a pod": {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "POD_IPS": "10.244.0.7,fd00::7",
        "WORKERS_SERVICE_HOST": "10.96.0.9",
    },
    "clients of servers": {"KAFKA_HOSTS": "k1:9092,k2:9092", "ELASTIC_NODES": "http://a:9200", "REDIS_PEERS": "a,b"},
    "a web server": {"ALLOWED_HOSTS": "me,localhost"},
    "the template of torchrun for one node": {"NUM_NODES": "1", "NPROC_PER_NODE": "8"},
    "a data loader": {"NUM_WORKERS": "8", "OMP_NUM_THREADS": "8", "WEB_CONCURRENCY": "4"},
    "one node of a service": {
        "ACME_NUM_NODES": "1",
        "ACME_NODE_RANK": "0",
        "ACME_WORKER_HOSTS": "me:2222",
        "WORLD_SIZE": "1",
    },
    "RunPod, one pod": {"RUNPOD_POD_ID": "f00", "RUNPOD_GPU_COUNT": "8", "RUNPOD_CPU_COUNT": "96"},
    "torch's master without others": {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "RANK": "0",
        "WORLD_SIZE": "1",
    },
    "this node is torch's master": {"MASTER_ADDR": "me.lan", "MASTER_PORT": "29500"},
    "torch's master by this node's address": {"MASTER_ADDR": "10.244.0.7", "PET_RDZV_ENDPOINT": "[fd00::7]:29400"},
    "torchrun --standalone": {"PET_RDZV_ENDPOINT": "localhost:0", "MASTER_ADDR": "127.0.0.1"},
    "torch's only process, in a container with a name of its own": {"MASTER_ADDR": "gpu-0", "WORLD_SIZE": "1"},
    "adapters and their ranks": {"LORA_RANK": "16", "QLORA_RANK": "8", "MATRIX_RANK": "3"},
    "indices of devices, batches and layers": {
        "GPU_INDEX": "3",
        "CUDA_DEVICE_INDEX": "1",
        "CUDA_DEVICE_COUNT": "8",
        "BATCH_INDEX": "0",
        "BATCH_SIZE": "32",
        "LAYER_INDEX": "4",
    },
    "sizes of a model and its groups": {"TENSOR_PARALLEL_SIZE": "8", "GROUP_SIZE": "8", "TP_RANK": "0", "TP_SIZE": "1"},
    "a sharded test": {"TEST_SHARD_INDEX": "1", "TEST_TOTAL_SHARDS": "4", "GTEST_SHARD_INDEX": "1"},
    "ids": {"JOB_ID": "123", "TASK_ID": "7", "NODE_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "CF_INSTANCE_INDEX": "0"},
    "a trial of a sweep": {"TRIAL_INDEX": "3", "TRIAL_COUNT": "9", "SEED_INDEX": "2"},
    "an election": {"ACME_LEADER": "true", "OTHER_LEADER": "0", "ACME_IS_LEADER": "yes"},
    "a server's pool": {"REDIS_DB_INDEX": "2", "REDIS_POOL_SIZE": "10", "UVICORN_WORKERS": "4", "WORKER_COUNT": "4"},
    "the first task of its node": {"LOCAL_RANK": "0", "SLURM_LOCALID": "0"},
    "Node.js": {"NODE_VERSION": "20", "NODE_OPTIONS": "--max-old-space-size=4096"},
    "clients of a cluster's master": {"REDIS_MASTER_SERVICE_HOST": "10.96.0.9", "SPARK_MASTER": "spark://a:7077"},
}


@pytest.mark.parametrize("case", ALONE)
def test_a_lone_node_is_no_false_alarm(tmp_path: Path, case: str) -> None:
    files = {
        "proc/cpuinfo": "processor\t: 0\nprocessor\t: 1\nprocessor\t: 2\nprocessor\t: 3\n",
        "proc/net/fib_trie": "|-- 10.244.0.7\n   /32 host LOCAL\n",
        "proc/net/if_inet6": f"{'fd00' + '0' * 27 + '7'} 02 40 20 80     eth0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    detection = detect(ALONE[case], "me", tmp_path)
    assert detection.allocation.node_count == 1
    assert detection.allocation.alone == ""


def test_the_number_of_nodes_can_say_that_this_one_is_alone(tmp_path: Path) -> None:
    assert detect({"ACME_NUM_NODES": "4", "SLIPWAY_NODES": "1"}, "me", tmp_path).allocation.node_count == 1


def test_single_outranks_a_scheduler_and_an_existing_cluster(tmp_path: Path) -> None:
    detection = detect({**SLURM, "SLIPWAY_SINGLE": "1", "RAY_ADDRESS": "10.0.0.1:6379"}, "n1", tmp_path)
    assert (detection.allocation.environment, detection.allocation.node_count, detection.allocation.attach) == (
        "single",
        1,
        None,
    )
    assert detection.conflicts == ("RAY_ADDRESS=10.0.0.1:6379 names a cluster that exists already; single wins",)
    assert detect({**SLURM, "SLIPWAY_SINGLE": "0"}, "n1", tmp_path).allocation.node_count == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLIPWAY_HOSTS": "a,b"}, "SLIPWAY_SINGLE is 1, but SLIPWAY_HOSTS is 'a,b'"),
        ({"SLIPWAY_NODES": "2"}, "SLIPWAY_SINGLE is 1, but SLIPWAY_NODES is '2'"),
        ({"SLIPWAY_HEAD": "a"}, "SLIPWAY_SINGLE is 1, but SLIPWAY_HEAD is 'a'"),
        ({"SLIPWAY_SINGLE": "yes"}, "SLIPWAY_SINGLE is 'yes', not 1 or 0"),
    ],
)
def test_single_beside_other_nodes_is_refused(tmp_path: Path, variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(DetectionError) as refused:
        detect({"SLIPWAY_SINGLE": "1", **variables}, "me", tmp_path)
    assert refused.value.message == message


def test_a_head_alone_is_refused_unless_it_is_this_node(tmp_path: Path) -> None:
    with pytest.raises(DetectionError, match="SLIPWAY_HEAD is a, so there are other nodes"):
        detect({"SLIPWAY_HEAD": "a"}, "me", tmp_path)
    for name in ("me", "me.lan", "localhost"):
        assert detect({"SLIPWAY_HEAD": name}, "me", tmp_path).allocation.node_count == 1
