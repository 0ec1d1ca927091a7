import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoints.environments import REGISTRY, detect
from entrypoints.environments.base import scheduler_job_id
from entrypoints.errors import DetectionError, NotYetThereError
from tests.entrypoints.conftest import REPOSITORY

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "n[01-04]",
    "SLURM_JOB_NUM_NODES": "8",
    "SLURM_JOB_NODELIST": "n[01-08]",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "2",
}
WORKER_OF_TORCHRUN = {
    "MASTER_ADDR": "h0",
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
}


MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


ORDER = (
    *("explicit", "kuberay"),
    *("flux", "slurm", "lsf", "pbs", "grid_engine"),
    *("sagemaker", "azureml", "vertex_ai", "skypilot", "runpod"),
    *("open_mpi", "prrte", "mvapich", "pals", "hydra"),
    *("leader_worker_set", "volcano", "pytorchjob", "kubeflow", "jobset", "indexed_job"),
    *("torchrun", "compose", "single"),
)
"""A new environment may come between any two, but the order of these stays."""


def test_the_order_of_detection_is_fixed() -> None:
    assert tuple(environment.name for environment in REGISTRY if environment.name in ORDER) == ORDER


def test_the_order_of_detection_is_total() -> None:
    assert len({environment.precedence for environment in REGISTRY}) == len(REGISTRY)
    assert REGISTRY[-1].name == "single"


def test_every_environment_is_registered() -> None:
    folder = REPOSITORY / "entrypoints" / "environments"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    assert sorted(re.findall('^    name = "(.+)"$', source, re.MULTILINE)) == sorted(row.name for row in REGISTRY)


@pytest.mark.parametrize(
    ("variables", "job_id"),
    [
        ({"SLIPWAY_JOB_ID": "mine", "SLURM_JOB_ID": "5"}, "mine"),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "3"}, "5.3"),
        ({"LSB_JOBID": "5", "LSB_JOBINDEX": "0"}, "5"),
        ({"JOB_ID": "5", "SGE_TASK_ID": "undefined"}, "5"),
        ({"JOB_ID": "5", "PE": "mpi", "SGE_TASK_ID": "2"}, "5.2"),
        ({"JOB_ID": "5"}, None),
        ({"SLURM_JOB_ID": ""}, None),
        ({}, None),
    ],
)
def test_the_schedulers_job_id_tells_jobs_apart(variables: dict[str, str], job_id: str | None) -> None:
    assert scheduler_job_id(variables) == job_id


@pytest.mark.parametrize(
    ("variables", "environment", "node_count", "node_rank", "local_rank", "head"),
    [
        ({}, "single", 1, 0, 0, "me"),
        ({"SLIPWAY_HOSTS": ""}, "single", 1, 0, 0, "me"),
        ({"SLIPWAY_HOSTS": "a, me ,c"}, "explicit", 3, 1, 0, "a"),
        ({"SLIPWAY_HOSTS": "a.lan,me.lan"}, "explicit", 2, 1, 0, "a.lan"),
        ({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "1"}, "explicit", 2, 1, 0, "a"),
        ({"SLIPWAY_HOSTS": "n[1-3]", "SLIPWAY_NODE_RANK": "2"}, "explicit", 3, 2, 0, "n1"),
        ({"SLIPWAY_HEAD": "a", "SLIPWAY_NODES": "3", "SLIPWAY_NODE_RANK": "2"}, "explicit", 3, 2, 0, "a"),
        ({**SLURM, "SLIPWAY_HEAD": "n01-ib"}, "slurm", 4, 2, 0, "n01-ib"),
        ({"SLIPWAY_HOSTS": "[fd00::1],[fd00::2]", "SLIPWAY_NODE_RANK": "1"}, "explicit", 2, 1, 0, "fd00::1"),
        ({"SLIPWAY_HOSTS": "fd00::1,fd00::2", "SLIPWAY_NODE_RANK": "1"}, "explicit", 2, 1, 0, "fd00::1"),
        (SLURM, "slurm", 4, 2, 0, "n01"),
        ({**SLURM, "SLURM_LOCALID": "3"}, "slurm", 4, 2, 3, "n01"),
        ({**SLURM, "SLIPWAY_HOSTS": "me"}, "explicit", 1, 0, 0, "me"),
        (
            {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n7", "SLURM_NODEID": "0"},
            "slurm", 1, 0, 0, "n7",
        ),
        (
            {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0.job"},
            "torchrun", 3, 2, 0, "job-0.job",
        ),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h0"}, "torchrun", 2, 1, 0, "h0"),
        (WORKER_OF_TORCHRUN, "torchrun", 2, 1, 3, "h0"),
        ({**WORKER_OF_TORCHRUN, "NNODES": "2", "NODE_RANK": "1"}, "torchrun", 2, 1, 3, "h0"),
        (
            {**WORKER_OF_TORCHRUN, "NNODES": "8", "WORLD_SIZE": "8", "RANK": "1", "LOCAL_RANK": "0"},
            "torchrun", 8, 1, 0, "h0",
        ),
        ({name: v for name, v in WORKER_OF_TORCHRUN.items() if name != "GROUP_RANK"}, "torchrun", 2, 1, 3, "h0"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "me"}, "single", 1, 0, 0, "me"),
    ],
)  # fmt: skip
def test_detects(
    variables: Mapping[str, str], environment: str, node_count: int, node_rank: int, local_rank: int, head: str
) -> None:
    allocation = detect(variables, "me").allocation
    assert (allocation.environment, allocation.head) == (environment, head)
    assert (allocation.node_count, allocation.node_rank, allocation.local_rank) == (node_count, node_rank, local_rank)


def without(variables: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLIPWAY_HOSTS": "a,b"}, "this host is me, which is not in SLIPWAY_HOSTS=a,b"),
        ({"SLIPWAY_HOSTS": "me.x,me.y"}, "ambiguous"),
        ({"SLIPWAY_HOSTS": "a,,b"}, "a host name is empty"),
        ({"SLIPWAY_HOSTS": "a,a"}, "a is listed twice"),
        ({"SLIPWAY_HOSTS": "a:8,me:8"}, "SLIPWAY_HOSTS: 'a:8' is not a host name"),
        ({**SLURM, "SLIPWAY_HEAD": "n03"}, "SLIPWAY_HEAD is n03, but slurm has it as node 2; node 0 is n01"),
        ({"SLIPWAY_HOSTS": "a,me", "SLIPWAY_HEAD": "me"}, "SLIPWAY_HEAD is me, but explicit has it as node 1"),
        ({"RAY_ADDRESS": "http://10.0.0.1:8265"}, "RAY_ADDRESS is http://10.0.0.1:8265, a dashboard's address"),
        ({**SLURM, "RAY_ADDRESS": "https://ray.lan"}, "RAY_ADDRESS is https://ray.lan, a dashboard's address"),
        ({"FQ_RAY_IP": "h", "RAY_ADDRESS": "http://h:8265"}, "RAY_ADDRESS is http://h:8265, a dashboard's address"),
        ({"RAY_ADDRESS": "10.0.0.1"}, "RAY_ADDRESS is '10.0.0.1', not the address of a Ray cluster"),
        ({**SLURM, "RAY_ADDRESS": "fd00::7:6379"}, "RAY_ADDRESS is 'fd00::7:6379', not the address"),
        ({"RAY_ADDRESS": "ray://head"}, "RAY_ADDRESS is 'ray://head', not the address"),
        ({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "2"}, "SLIPWAY_NODE_RANK is 2"),
        (
            {"SLIPWAY_HOSTS": "a,me", "SLIPWAY_NODE_RANK": "0"},
            "SLIPWAY_NODE_RANK is 0, but SLIPWAY_HOSTS has me as node 1",
        ),
        ({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "-1"}, "SLIPWAY_NODE_RANK is '-1'"),
        (without(SLURM, "SLURM_NODEID"), "SLURM_NODEID is not set"),
        ({**SLURM, "SLURM_STEP_ID": "x"}, "SLURM_STEP_ID is 'x', not a whole number"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        ({**SLURM, "SLURM_NODEID": "zero"}, "SLURM_NODEID is 'zero'"),
        ({**SLURM, "SLURM_NODEID": "4"}, "node rank 4 is not below 4 nodes"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[01-04"}, r"SLURM_STEP_NODELIST is 'n\[01-04'"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[01-03]"}, "3 hosts are listed for 4 nodes"),
        ({"SLURM_JOB_ID": "5"}, "SLURM_JOB_NODELIST and SLURM_NODELIST are not set"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES is '1:4'"),
        ({"NNODES": "2", "MASTER_ADDR": "h0"}, "PET_NODE_RANK and NODE_RANK and GROUP_RANK are not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR are not set"),
        ({"NNODES": "0", "NODE_RANK": "0"}, "not at least 1"),
        (
            {"NODE_RANK": "1", "MASTER_ADDR": "h0"},
            "NODE_RANK is 1, so there are other nodes, but nothing says how many",
        ),
        ({"RANK": "3"}, "RANK is 3, so there are other nodes"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h0"}, "may count nodes or processes"),
        ({**WORKER_OF_TORCHRUN, "WORLD_SIZE": "15"}, "not a multiple"),
        (
            {**without(WORKER_OF_TORCHRUN, "GROUP_RANK"), "NNODES": "1", "RANK": "8", "LOCAL_RANK": "0"},
            r"this is node 0 of 1 \(NNODES=1\), but also node 1 of 2 \(RANK=8 WORLD_SIZE=16 ",
        ),
        ({**WORKER_OF_TORCHRUN, "NNODES": "2", "NODE_RANK": "0"}, "node 0 of 2 .*, but also node 1 of 2"),
        ({"SLIPWAY_HOSTS": "n[1-2", "SLIPWAY_NODE_RANK": "0"}, r"'\[' is never closed"),
        ({"SLIPWAY_HOSTFILE": "/nowhere"}, "SLIPWAY_HOSTFILE is /nowhere, which cannot be read"),
        ({"SLIPWAY_NODE_RANK": "1"}, "SLIPWAY_HEAD is not set"),
        ({"SLIPWAY_NODE_RANK": "1", "SLIPWAY_HEAD": "a"}, "SLIPWAY_NODES is not set"),
        ({"SLIPWAY_NODES": "2"}, "SLIPWAY_NODES is 2, but no scheduler, launcher or service is recognised"),
        ({**SLURM, "SLIPWAY_NODES": "8"}, "SLIPWAY_NODES is 8, but slurm says 4 nodes"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 8 b"}, "not pairs of a host and its slots"),
        ({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 8 b 8"}, "this host is me, which is not in LSB_MCPU_HOSTS=a,b"),
        ({"LSB_JOBID": "1"}, "LSB_HOSTS is not set"),
        ({"PBS_JOBID": "1"}, "PBS_NODEFILE is not set"),
        ({"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere"}, "PBS_NODEFILE is /nowhere, which cannot be read here"),
        ({"JOB_ID": "1", "PE_HOSTFILE": "/nowhere"}, "PE_HOSTFILE is /nowhere, which cannot be read here"),
        ({"JOB_ID": "1", "SGE_TASK_ID": "undefined", "PE": "mpi"}, "PE_HOSTFILE is not set for this task of mpi"),
        ({"FLUX_JOB_ID": "f1", "FLUX_JOB_NNODES": "2"}, "FLUX_TASK_RANK is not set"),
        (
            {"FLUX_JOB_ID": "f1", "FLUX_JOB_NNODES": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "1"},
            "FLUX_TASK_LOCAL_ID is not set for 4 tasks on 2 nodes",
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, "MPI_LOCALNRANKS is not set for task 3"),
        ({"VC_WORKER_NUM": "2"}, "neither VC_WORKER_HOSTS nor /etc/volcano/worker.host lists a host"),
        ({**MPI, "OMPI_COMM_WORLD_RANK": "1"}, "task 1 of 4 is task 0 of 2 on its node"),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "3"}, "task 2 of 3 is task 0 of 2 on its node"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALRANKID is not set"),
        ({"PRTE_LAUNCHED": "1", "PMIX_RANK": "0"}, "SLIPWAY_NODES is not set"),
        ({"LWS_LEADER_ADDRESS": "v-0.v", "LWS_GROUP_SIZE": "2"}, "me is not a pod of the leader v-0.v"),
        ({"JOB_COMPLETION_INDEX": "1"}, "SLIPWAY_NODES is not set"),
        ({"JOB_COMPLETION_INDEX": "1", "SLIPWAY_NODES": "2"}, "this pod is called me"),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "not a JSON list of host names"),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "not in SM_HOSTS=algo-1"),
        ({"CLUSTER_SPEC": '{"workerpool0": 1}'}, "does not have Vertex AI's format"),
        ({"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "3"}, "lists 2: a b"),
        ({"VC_WORKER_HOSTS": "a,b", "VC_TASK_INDEX": "2"}, "node rank 2 is not below 2 nodes"),
        ({"PRIMARY_ADDR": "a", "NUM_NODES": "2"}, "NODE_RANK is not set"),
        ({"DSTACK_NODES_NUM": "2"}, "DSTACK_NODE_RANK is not set"),
        ({"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1"}, "dstack does not name the head of 2 nodes"),
        ({"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1"}, "AWS_BATCH_JOB_MAIN_NODE_INDEX is not set"),
        ({"MLP_WORKER_NUM": "2", "MLP_ROLE": "SCHEDULER"}, "MLP_ROLE is SCHEDULER, but only workers are nodes"),
        ({"LEPTON_JOB_TOTAL_WORKERS": "2", "LEPTON_JOB_WORKER_INDEX": "1"}, "LEPTON_JOB_WORKER_PREFIX and"),
        ({"ARNOLD_WORKER_NUM": "2", "ARNOLD_ID": "2", "ARNOLD_WORKER_0_HOST": "a"}, "node rank 2 is not below 2 nodes"),
        ({"SENSECORE_PYTORCH_NNODES": "2"}, "SENSECORE_PYTORCH_NODE_RANK is not set"),
        ({"BEAKER_REPLICA_COUNT": "2", "BEAKER_REPLICA_RANK": "1"}, "beaker does not name the head of 2 nodes"),
        ({"NGC_ARRAY_SIZE": "2"}, "NGC_ARRAY_INDEX is not set"),
        ({"MF_PARALLEL_NUM_NODES": "2"}, "MF_PARALLEL_NODE_INDEX is not set"),
        ({"BATCH_TASK_COUNT": "2", "BATCH_TASK_INDEX": "0"}, "BATCH_HOSTS_FILE is not set"),
        ({"BATCH_HOSTS_FILE": "/nowhere"}, "BATCH_HOSTS_FILE is /nowhere, which cannot be read here"),
        ({"PAI_CURRENT_TASK_ROLE_NAME": "w", "PAI_TASK_ROLE_LIST": "a,b"}, "which is not in PAI_TASK_ROLE_LIST=a,b"),
        ({"COORDINATOR_ADDRESS": "w-0", "NUM_PROCESSES": "2"}, "PROCESS_ID and JAX_PROCESS_ID are not set"),
        ({"TF_CONFIG": "{"}, "does not have TensorFlow's format"),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'},
            "TF_CONFIG has no task 0 of kind 'evaluator'",
        ),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "HOROVOD_CROSS_SIZE is not set"),
        ({"FLUX_URI": "local:///run/flux/local", "PATH": ""}, "FLUX_URI is set, but the `flux` command"),
        ({"OAR_JOB_ID": "1"}, "OAR_NODEFILE is not set"),
        ({"PJM_JOBID": "1", "PJM_O_NODEINF": "/nowhere"}, "PJM_O_NODEINF is /nowhere, which cannot be read here"),
        ({"_CONDOR_PROCNO": "0"}, "_CONDOR_NPROCS is not set"),
        ({"AZ_BATCH_HOST_LIST": "10.0.0.1,10.0.0.2"}, "not in AZ_BATCH_HOST_LIST=10.0.0.1,10.0.0.2"),
        ({"AWS_BATCH_JOB_ARRAY_SIZE": "8", "AWS_BATCH_JOB_ARRAY_INDEX": "3"}, "AWS_BATCH_JOB_ARRAY_SIZE is '8'"),
    ],
)
def test_never_guesses_an_identity(variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(DetectionError, match=message):
        detect(variables, "me")


def test_a_batch_script_of_a_heterogeneous_job_has_the_nodes_of_all_components() -> None:
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "cpu1", "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[1-2]"}
    script = {"SLURM_JOB_ID": "9", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "cpu1"}
    allocation = detect({**script, **lists}, "cpu1").allocation
    assert (allocation.hosts, allocation.node_rank) == (("cpu1", "gpu1", "gpu2"), 0)
    assert allocation.alone == "srun --het-group=0-1 --ntasks-per-node=1 launch ..."


def test_disagreement_names_the_winner() -> None:
    detection = detect({**SLURM, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h0"}, "me")
    assert detection.allocation.environment == "slurm"
    assert [other.environment for other in detection.runners_up] == ["torchrun"]
    count, rank = detection.conflicts
    assert count.startswith("nodes: slurm says 4")
    assert "torchrun says 2 (NNODES=2" in count
    assert count.endswith("slurm wins")
    assert rank.startswith("node rank: slurm says 2")


def test_ambiguous_variables_of_a_lower_environment_are_a_conflict() -> None:
    detection = detect({**SLURM, "RANK": "0", "WORLD_SIZE": "32", "MASTER_ADDR": "h0"}, "me")
    assert detection.allocation.node_count == 4
    (conflict,) = detection.conflicts
    assert "WORLD_SIZE is 32" in conflict
    assert conflict.endswith("slurm wins")


def test_an_existing_cluster_outranks_every_scheduler() -> None:
    detection = detect({**SLURM, "RAY_ADDRESS": "10.0.0.1:6379"}, "me")
    assert detection.allocation.environment == "slurm"
    assert detection.allocation.attach == "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("where", "head", "attach"),
    [
        ({"FQ_RAY_IP": "c-head.ns.svc"}, "c-head.ns.svc", "c-head.ns.svc:6379"),
        ({"RAY_IP": "fd00::7", "RAY_PORT": "6380"}, "fd00::7", "[fd00::7]:6380"),
        ({"RAY_ADDRESS": "[fd00::7]:6379"}, "fd00::7", "[fd00::7]:6379"),
    ],
)
def test_a_ray_cluster_of_kubernetes_is_found_by_name_and_by_either_kind_of_address(
    where: dict[str, str], head: str, attach: str
) -> None:
    detection = detect({"RAY_CLUSTER_NAME": "c", **where}, "me")
    assert detection.allocation.environment == "kuberay"
    assert (detection.allocation.head, detection.allocation.attach) == (head, attach)


@pytest.mark.parametrize("variables", [{}, SLURM, {"SLIPWAY_HOSTS": "a,me"}])
def test_local_is_no_existing_cluster(variables: dict[str, str]) -> None:
    detection = detect({**variables, "RAY_ADDRESS": "local"}, "me")
    assert detection.allocation.attach is None
    assert detection.conflicts == ("RAY_ADDRESS=local names no cluster: this job forms one",)


def test_a_list_of_hosts_outranks_an_existing_cluster() -> None:
    detection = detect({"SLIPWAY_HOSTS": "a,me", "RAY_ADDRESS": "10.0.0.1:6379"}, "me")
    assert detection.allocation.attach is None
    assert detection.conflicts == ("RAY_ADDRESS=10.0.0.1:6379 names a cluster that exists already; explicit wins",)


def test_local_ranks_inside_each_other_are_a_conflict() -> None:
    detection = detect({**SLURM, "LOCAL_RANK": "3"}, "me")
    assert detection.allocation.local_rank == 3
    assert detection.conflicts == (
        "local rank: LOCAL_RANK says 3, SLURM_LOCALID says 0; only the process with 0 in all of them leads its node",
    )
    assert detect({**SLURM, "SLURM_LOCALID": "3", "LOCAL_RANK": "3"}, "me").conflicts == ()
    assert detect({**SLURM, "SLURM_LOCALID": "1", "LOCAL_RANK": "0"}, "me").allocation.local_rank == 1
    with pytest.raises(DetectionError, match="LOCAL_RANK is 'x', not a whole number"):
        detect({**SLURM, "LOCAL_RANK": "x"}, "me")


@pytest.mark.parametrize(
    "variable", ["LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]
)
@pytest.mark.parametrize(
    "job",
    [
        {"SLIPWAY_HOSTS": "me,other"},
        {"SLIPWAY_HEAD": "me", "SLIPWAY_NODES": "2", "SLIPWAY_NODE_RANK": "0"},
        {"SKYPILOT_NODE_IPS": "a\nb", "SKYPILOT_NODE_RANK": "0"},
        {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "0", "DSTACK_MASTER_NODE_IP": "a"},
        {"VC_WORKER_HOSTS": "a,b", "VC_TASK_INDEX": "0"},
        {"JOB_COMPLETION_INDEX": "0", "SLIPWAY_NODES": "2", "SLIPWAY_HEAD": "a"},
        {"COORDINATOR_ADDRESS": "a", "NUM_PROCESSES": "2", "PROCESS_ID": "0"},
        {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"},
    ],
)
def test_every_environment_knows_the_further_processes_of_its_nodes(job: dict[str, str], variable: str) -> None:
    assert detect({**job, variable: "2"}, "me").allocation.local_rank == 2
    assert detect({**job, variable: "0"}, "me").allocation.local_rank == 0


def test_a_script_that_sets_torchruns_variables_is_told_that_it_is_the_only_process() -> None:
    script = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0"}
    detection = detect({**script, "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "n1"}, "n1")
    assert detection.allocation.environment == "torchrun"
    assert detection.conflicts == ("slurm: 2 nodes are allocated, but only this process was started; torchrun wins",)


def test_a_scheduler_keeps_its_job_of_one_node_below_mpirun() -> None:
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    tasks = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    detection = detect({**job, **{f"OMPI_COMM_WORLD_{name}": value for name, value in tasks.items()}}, "n1").allocation
    assert (detection.environment, detection.node_count, detection.node_rank, detection.local_rank) == (
        "slurm",
        1,
        0,
        1,
    )


def test_torchruns_workers_wait_for_each_other() -> None:
    assert detect(WORKER_OF_TORCHRUN, "me").allocation.task_count is None
    elastic = {**WORKER_OF_TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}
    assert detect(elastic, "me").allocation.task_count == 16
    assert detect({**SLURM, **elastic}, "me").allocation.task_count == 32


def test_environments_that_agree_are_no_conflict() -> None:
    detection = detect({**SLURM, "NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "n01.cluster"}, "me")
    assert detection.conflicts == ()


def test_the_deciding_variables_are_kept() -> None:
    allocation = detect(SLURM, "me").allocation
    assert allocation.variables["SLURM_STEP_NODELIST"] == "n[01-04]"
    assert "SLURM_JOB_NUM_NODES" not in allocation.variables
    assert allocation.hosts == ("n01", "n02", "n03", "n04")
    assert allocation.job_id == "77.0"


def test_a_batch_script_does_not_wait_for_other_tasks() -> None:
    script = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n7", "SLURM_NTASKS": "4"}
    assert detect(script, "n7").allocation.task_count is None
    assert detect({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, "me").allocation.task_count == 8


def test_nodes_agree_on_the_job() -> None:
    ids = {detect({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": str(rank)}, "me").allocation.job_id for rank in (0, 1)}
    assert len(ids) == 1


@pytest.mark.parametrize("nodes", [{"SLIPWAY_HOSTS": "a,b"}, {"SLIPWAY_HEAD": "a", "SLIPWAY_NODES": "2"}])
def test_nodes_agree_on_the_job_if_the_scheduler_is_known_to_one_of_them_only(nodes: dict[str, str]) -> None:
    in_a_batch_script = detect({**nodes, "SLIPWAY_NODE_RANK": "0", "SLURM_JOB_ID": "7"}, "a").allocation
    by_ssh = detect({**nodes, "SLIPWAY_NODE_RANK": "1"}, "b").allocation
    assert in_a_batch_script.job_id == by_ssh.job_id
    named = detect({**nodes, "SLIPWAY_NODE_RANK": "0", "SLIPWAY_JOB_ID": "mine"}, "a").allocation
    assert named.job_id == "mine"


@pytest.mark.parametrize(
    ("of_head", "of_worker"), [("localhost", "gpu-0"), ("127.0.0.1", "gpu-0.lan"), ("gpu-0.lan", "gpu-0")]
)
def test_nodes_agree_on_the_job_if_the_head_calls_itself_by_another_name(of_head: str, of_worker: str) -> None:
    template = {"NNODES": "2", "MASTER_PORT": "29500"}
    head = detect({**template, "NODE_RANK": "0", "MASTER_ADDR": of_head}, "gpu-0.lan").allocation
    worker = detect({**template, "NODE_RANK": "1", "MASTER_ADDR": of_worker}, "gpu-1.lan").allocation
    assert head.job_id == worker.job_id
    assert bool(head.warnings) == (of_head in ("localhost", "127.0.0.1"))
    other = detect({**template, "NODE_RANK": "0", "MASTER_ADDR": "gpu-7"}, "gpu-7").allocation
    assert other.job_id != head.job_id


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nme\n", ("a", "me")),
        ("# nodes\na slots=8\n\nme slots=8  # the second\n", ("a", "me")),
        ("a:8\na:8\nme:8\n", ("a", "me")),
        ("10.0.0.1:8\nme\n", ("10.0.0.1", "me")),
        ("fd00::1\nme\n", ("fd00::1", "me")),
        ("[fd00::1]\nme\n", ("fd00::1", "me")),
        ("[fd00::1]:8 # the head\nme\n", ("fd00::1", "me")),
    ],
)
def test_a_host_file_has_one_host_per_line(tmp_path: Path, text: str, hosts: tuple[str, ...]) -> None:
    (tmp_path / "hosts").write_text(text, encoding="utf-8")
    allocation = detect({"SLIPWAY_HOSTFILE": "/hosts"}, "me", tmp_path).allocation
    assert (allocation.hosts, allocation.node_rank) == (hosts, 1)


def test_a_relative_host_file_is_read_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("a\nme\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert detect({"SLIPWAY_HOSTFILE": "hosts"}, "me").allocation.hosts == ("a", "me")


def test_a_host_file_with_several_hosts_on_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a,me\n", encoding="utf-8")
    with pytest.raises(DetectionError, match="SLIPWAY_HOSTFILE: 'a,me' is not a host name"):
        detect({"SLIPWAY_HOSTFILE": "/hosts"}, "me", tmp_path)


def test_this_node_is_found_by_its_ipv6_address(tmp_path: Path) -> None:
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "if_inet6").write_text(f"fd00{'0' * 27}2 02 40 00 80 eth0\n", encoding="ascii")
    (tmp_path / "hosts").write_text("[fd00::1]:8\n[FD00:0::2]:8\n", encoding="ascii")
    allocation = detect({"SLIPWAY_HOSTFILE": "/hosts"}, "me", tmp_path).allocation
    assert (allocation.node_count, allocation.node_rank, allocation.head) == (2, 1, "fd00::1")


def test_this_node_is_found_by_its_address_in_a_list_of_addresses(tmp_path: Path) -> None:
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "fib_trie").write_text(
        "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.0.0\n        /8 universe UNICAST\n"
        "     |-- 10.0.0.7\n        /32 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\n",
        encoding="ascii",
    )
    assert detect({"SLIPWAY_HOSTS": "10.0.0.6,10.0.0.7"}, "me", tmp_path).allocation.node_rank == 1


def test_replicas_of_a_service_are_found_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Docker's name server is missing here, so its answers are replaced.
    names = {"tasks.ppo": ["10.0.1.10", "10.0.1.9"]}

    def answer(name: str, *_: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise OSError("unknown")
        return [(2, 1, 6, "", (address, 0)) for address in names[name]]

    monkeypatch.setattr("socket.getaddrinfo", answer)
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "fib_trie").write_text("|-- 10.0.1.10\n   /32 host LOCAL\n", encoding="ascii")
    allocation = detect({"SLIPWAY_SERVICE": "ppo", "SLIPWAY_NODES": "2"}, "c0ffee", tmp_path).allocation
    assert (allocation.environment, allocation.hosts, allocation.node_rank) == ("compose", ("10.0.1.9", "10.0.1.10"), 1)
    with pytest.raises(NotYetThereError, match=r"tasks.ppo has 2 addresses so far, not 3"):
        detect({"SLIPWAY_SERVICE": "ppo", "SLIPWAY_NODES": "3"}, "c0ffee", tmp_path)


def test_an_unknown_head_is_an_error_only_when_needed() -> None:
    allocation = detect(
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, "me"
    ).allocation
    assert allocation.head is None
    with pytest.raises(DetectionError, match="hydra does not name the head of 2 nodes"):
        _ = allocation.heads


def test_every_address_of_a_launcher_is_tried() -> None:
    allocation = detect(
        {**MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1,10.0.0.1,10.1.0.1:5;usock"}, "me"
    ).allocation
    assert allocation.heads == ("10.0.0.1", "10.1.0.1")
