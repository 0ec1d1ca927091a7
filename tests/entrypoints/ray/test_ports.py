import socket
from typing import cast

import pytest

from entrypoints.errors import RayFailedError
from entrypoints.options import RayOptions
from entrypoints.processes import ProcessTree
from entrypoints.ray.node import RayNode
from entrypoints.ray.ports import CONTROL_PORTS, ClaimedPorts, RayPorts, claim_ray_ports, control_port, ray_blocks


@pytest.mark.parametrize("cpus", [1, 512])
@pytest.mark.parametrize("floor", [32_768, 60_000, 22_000, 9_000])
def test_blocks_lie_below_the_ephemeral_range_and_apart(floor: int, cpus: int) -> None:
    blocks = ray_blocks("77", 0, floor, cpus)
    used = [port for block in blocks for port in (*block.named.values(), *block.workers)]
    assert len(used) == len(set(used))
    assert max(used) < min(floor, 32_768)
    assert min(used) > 1023
    assert not set(used) & set(CONTROL_PORTS)


def ports_of(claimed: ClaimedPorts) -> set[int]:
    return {*claimed.ports.named.values(), *claimed.ports.workers}


def test_launches_of_equal_jobs_that_start_at_once_choose_different_ports() -> None:
    claimed = [claim_ray_ports("77", 0, cpus) for cpus in (1, 512, 300, 1)]
    ports = [port for claim in claimed for port in ports_of(claim)]
    for claim in claimed:
        claim.release()
    assert len(ports) == len(set(ports))


def test_released_ports_are_chosen_again() -> None:
    first, again = (claim_ray_ports("77", 0, 512) for _ in range(2))
    first.release()
    third = claim_ray_ports("77", 0, 512)
    for claim in (again, third):
        claim.release()
    assert third.ports == first.ports != again.ports


@pytest.mark.parametrize("cpus", [1, 256, 512, 1_024])
def test_each_cpu_has_ports_for_its_worker_and_an_actor(cpus: int) -> None:
    assert all(len(block.workers) >= max(480, 2 * cpus) for block in ray_blocks("77", 0, 32_768, cpus))


def test_no_room_is_an_error() -> None:
    with pytest.raises(RayFailedError, match="the ephemeral range starts at 1024"):
        ray_blocks("77", 0, 1_024, 1)


def test_nodes_on_one_host_start_at_different_blocks() -> None:
    firsts = {ray_blocks("77", rank, 32_768, 64)[0] for rank in range(8)}
    assert len(firsts) == 8


def test_jobs_differ_but_nodes_agree() -> None:
    assert len({control_port(str(job)) for job in range(50)}) > 40
    assert control_port("77.0") == control_port("77.0")


def test_an_unwritable_directory_is_an_error() -> None:
    no_processes, ports = cast(ProcessTree, None), claim_ray_ports("77", 0)
    with pytest.raises(RayFailedError, match="/tmp cannot be written: No such file or directory"):
        RayNode(no_processes, RayOptions(), ports, {}, "token", prefix="no/such/")
    ports.release()


def test_a_taken_port_is_noticed() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert not RayPorts(other.getsockname()[1] - 3).free()
