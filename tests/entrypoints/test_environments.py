from collections.abc import Mapping

import pytest

from entrypoints.environments import REGISTRY, detect
from entrypoints.errors import DetectionError

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


def test_order_is_precedence() -> None:
    assert [environment.name for environment in REGISTRY] == ["explicit", "slurm", "torchrun", "single"]


@pytest.mark.parametrize(
    ("variables", "environment", "node_count", "node_rank", "local_rank", "head"),
    [
        ({}, "single", 1, 0, 0, "me"),
        ({"SLIPWAY_HOSTS": ""}, "single", 1, 0, 0, "me"),
        ({"SLIPWAY_HOSTS": "a, me ,c"}, "explicit", 3, 1, 0, "a"),
        ({"SLIPWAY_HOSTS": "a.lan,me.lan"}, "explicit", 2, 1, 0, "a.lan"),
        ({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "1"}, "explicit", 2, 1, 0, "a"),
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
        ({name: v for name, v in WORKER_OF_TORCHRUN.items() if name != "GROUP_RANK"}, "torchrun", 2, 1, 3, "h0"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "me"}, "single", 1, 0, 0, "me"),
    ],
)  # fmt: skip
def test_detects(
    variables: Mapping[str, str], environment: str, node_count: int, node_rank: int, local_rank: int, head: str
) -> None:
    found = detect(variables, "me").allocation
    assert (found.environment, found.node_count, found.node_rank, found.local_rank, found.head) == (
        environment, node_count, node_rank, local_rank, head,
    )  # fmt: skip


def without(variables: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLIPWAY_HOSTS": "a,b"}, "this host is me, which is not in SLIPWAY_HOSTS=a,b"),
        ({"SLIPWAY_HOSTS": "me.x,me.y"}, "ambiguous"),
        ({"SLIPWAY_HOSTS": "a,,b"}, "a host name is empty"),
        ({"SLIPWAY_HOSTS": "a,a"}, "a is listed twice"),
        ({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "2"}, "SLIPWAY_NODE_RANK is 2"),
        ({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "-1"}, "SLIPWAY_NODE_RANK is '-1'"),
        (without(SLURM, "SLURM_NODEID"), "SLURM_NODEID is not set"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (without(SLURM, "SLURM_STEP_ID"), "runs on one node only"),
        ({**SLURM, "SLURM_NODEID": "zero"}, "SLURM_NODEID is 'zero'"),
        ({**SLURM, "SLURM_NODEID": "4"}, "node rank 4 is not below 4 nodes"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[01-04"}, r"SLURM_STEP_NODELIST is 'n\[01-04'"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[01-03]"}, "3 hosts are listed for 4 nodes"),
        ({"SLURM_JOB_ID": "5"}, "SLURM_JOB_NUM_NODES"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES is '1:4'"),
        ({"NNODES": "2", "MASTER_ADDR": "h0"}, "PET_NODE_RANK and NODE_RANK and GROUP_RANK are not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR are not set"),
        ({"NNODES": "0", "NODE_RANK": "0"}, "not at least 1"),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h0"}, "may count nodes or processes"),
        ({**WORKER_OF_TORCHRUN, "WORLD_SIZE": "15"}, "not a multiple"),
    ],
)
def test_never_guesses_an_identity(variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(DetectionError, match=message):
        detect(variables, "me")


def test_disagreement_names_the_winner() -> None:
    found = detect({**SLURM, "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h0"}, "me")
    assert found.allocation.environment == "slurm"
    assert [other.environment for other in found.runners_up] == ["torchrun"]
    count, rank = found.conflicts
    assert count.startswith("nodes: slurm says 4")
    assert "torchrun says 2 (NNODES=2" in count
    assert count.endswith("slurm wins")
    assert rank.startswith("node rank: slurm says 2")


def test_variables_that_cannot_be_trusted_are_a_conflict_below_a_winner() -> None:
    found = detect({**SLURM, "RANK": "0", "WORLD_SIZE": "32", "MASTER_ADDR": "h0"}, "me")
    assert found.allocation.node_count == 4
    (conflict,) = found.conflicts
    assert "WORLD_SIZE is 32" in conflict
    assert conflict.endswith("slurm wins")


def test_agreement_is_no_conflict() -> None:
    found = detect({**SLURM, "NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "n01.cluster"}, "me")
    assert found.conflicts == ()


def test_what_decided_is_remembered() -> None:
    found = detect(SLURM, "me").allocation
    assert found.variables["SLURM_STEP_NODELIST"] == "n[01-04]"
    assert "SLURM_JOB_NUM_NODES" not in found.variables
    assert found.hosts == ("n01", "n02", "n03", "n04")
    assert found.job_id == "77.0"


def test_nodes_agree_on_the_job() -> None:
    ids = {detect({"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": str(rank)}, "me").allocation.job_id for rank in (0, 1)}
    assert len(ids) == 1
