from pathlib import Path

import pytest

from buildkit.host.accelerators import Gpus
from buildkit.host.machine import read_machine
from tests.buildkit.hosts import BARE, DGX, MI300X, P5, Host, own_devices


def test_a_bare_host_reports_no_gpu_no_fabric_and_no_groups(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (set(machine.gpus.values()), machine.fabric, machine.hcas) == ({Gpus()}, "ethernet", ())
    assert machine.ram_bytes == 0
    assert machine.cgroup is None
    assert not machine.rdma_devices


def test_this_host_is_readable() -> None:
    machine = read_machine()
    assert machine.ram_bytes > 2**28
    assert machine.cpus >= 1


def test_nvidia_with_infiniband(tmp_path: Path) -> None:
    machine = read_machine(DGX.write(tmp_path))
    assert machine.gpus["cuda"] == Gpus(8, "580.95.05", models=("NVIDIA H100 80GB HBM3",))
    assert machine.fabric == "infiniband"
    assert machine.hcas == tuple(f"mlx5_{index}" for index in range(8)), "the Ethernet storage adapter is not one"
    assert machine.container_toolkit
    assert machine.cdi
    assert machine.memlock is None
    assert machine.ram_bytes == 2048 * 2**30


def test_amd_with_roce(tmp_path: Path) -> None:
    machine = read_machine(MI300X.write(tmp_path))
    assert machine.gpus["rocm"] == Gpus(8, "6.12.12", ("gfx942",) * 8, ("gfx942",))
    assert machine.render_nodes[0] == "/dev/dri/renderD128"
    assert machine.fabric == "roce"
    assert machine.memlock == 8388608


@pytest.mark.parametrize(
    ("number", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (100300, "gfx1030")]
)
def test_architectures_have_their_usual_names(tmp_path: Path, number: int, name: str) -> None:
    assert read_machine(Host(amd=1, gfx_target=number).write(tmp_path)).gpus["rocm"].architectures == (name,)


def test_efa_is_recognised_among_other_adapters(tmp_path: Path) -> None:
    machine = read_machine(P5.write(tmp_path))
    assert machine.fabric == "efa"
    assert len(machine.hcas) == 32


def test_a_port_without_a_link_is_not_a_fabric(tmp_path: Path) -> None:
    machine = read_machine(Host(hcas={"mlx5_0": "InfiniBand"}, down=("mlx5_0",)).write(tmp_path))
    assert machine.fabric == "ethernet"


def test_the_container_joins_the_groups_that_own_the_devices(tmp_path: Path) -> None:
    root = MI300X.write(tmp_path)
    if not own_devices(root, 4711):
        pytest.skip("only root can give files away")
    assert read_machine(root).device_groups == (4711,)


@pytest.mark.parametrize("host", [BARE, DGX])
def test_a_host_without_amds_devices_knows_nothing_about_their_groups(tmp_path: Path, host: Host) -> None:
    assert read_machine(host.write(tmp_path)).device_groups is None
