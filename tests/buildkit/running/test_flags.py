"""The flags of a container, computed for recorded hosts."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.commands.options import parse_size
from buildkit.errors import RunError, UsageError
from buildkit.host.accelerators import Flag
from buildkit.host.machine import Machine, read_machine
from buildkit.host.shared_memory import shm_size
from buildkit.running.flags import RunRequest, assume, check_volumes, container_flags, refuse_absent_gpus
from tests.buildkit.hosts import BARE, DGX, MI300X, P5, Host

HOSTS = {"bare": BARE, "dgx": DGX, "mi300x": MI300X, "p5": P5}


def machine_of(host: Host, root: Path) -> Machine:
    return replace(read_machine(host.write(root)), device_groups=(44, 109))


def request(target: str = "cpu", **changes: object) -> RunRequest:
    return replace(RunRequest(f"slipway:{target}", target, ("train",)), **changes)  # type: ignore[arg-type]


def values(flags: tuple[Flag, ...], name: str) -> list[str]:
    return [flag.value for flag in flags if flag.name == name]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_every_flag_has_a_reason_and_none_is_privileged(tmp_path: Path, host: str, target: str) -> None:
    flags = container_flags(request(target), machine_of(HOSTS[host], tmp_path))
    assert all(flag.reason for flag in flags)
    assert "privileged" not in {flag.name for flag in flags}
    assert len(set(flags)) == len(flags)
    assert int(values(flags, "shm-size")[0]) > 2**30


def test_nvidia_with_infiniband(tmp_path: Path) -> None:
    flags = container_flags(request("cuda"), machine_of(DGX, tmp_path))
    assert values(flags, "gpus") == ["all"]
    assert values(flags, "device") == ["/dev/infiniband"]
    assert values(flags, "cap-add") == ["IPC_LOCK"]
    assert {"memlock=-1", "stack=67108864"} <= set(values(flags, "ulimit"))
    assert values(flags, "network") == ["host"]
    assert values(flags, "group-add") == []


def test_amd_gets_numeric_groups_and_its_two_devices(tmp_path: Path) -> None:
    flags = container_flags(request("rocm"), machine_of(MI300X, tmp_path))
    assert values(flags, "device") == ["/dev/kfd", "/dev/dri", "/dev/infiniband"]
    assert values(flags, "group-add") == ["44", "109"]
    assert values(flags, "cap-add") == ["SYS_PTRACE", "IPC_LOCK"]
    assert values(flags, "security-opt") == ["seccomp=unconfined"]


@pytest.mark.parametrize("target", ["cpu", "rocm"])
def test_debuggers_may_trace_other_processes(tmp_path: Path, target: str) -> None:
    flags = container_flags(request(target, debug=True), machine_of(MI300X, tmp_path))
    assert values(flags, "cap-add").count("SYS_PTRACE") == 1


def test_cpu_requests_no_device_on_any_host(tmp_path: Path) -> None:
    flags = container_flags(request("cpu"), machine_of(DGX, tmp_path))
    assert not {"device", "gpus", "cap-add", "security-opt"} & {flag.name for flag in flags}


def test_nodes_that_share_a_machine_share_its_gpus_and_memory(tmp_path: Path) -> None:
    machine = machine_of(DGX, tmp_path)
    flags = container_flags(request("cuda", nodes=2), machine, "job", rank=0)
    other = container_flags(request("cuda", nodes=2), machine, "job", rank=1)
    assert values(flags, "gpus") == ['"device=0,1,2,3"']
    assert values(other, "gpus") == ['"device=4,5,6,7"']
    alone = container_flags(request("cuda", nodes=2), machine)
    assert values(alone, "gpus") == ["all"], "a node of a cluster has its machine for itself"
    assert int(values(flags, "shm-size")[0]) <= int(values(alone, "shm-size")[0])


def test_amd_nodes_that_share_a_machine_get_render_nodes_of_their_own(tmp_path: Path) -> None:
    flags = container_flags(request("rocm", nodes=4), machine_of(MI300X, tmp_path), "job", rank=3)
    assert [path for path in values(flags, "device") if "render" in path] == [
        "/dev/dri/renderD134",
        "/dev/dri/renderD135",
    ]


@pytest.mark.parametrize(("asked", "gpus"), [({"nodes": 9}, "all"), ({"gpus": 1}, '"device=0"')])
def test_nodes_share_gpus_that_are_too_few_and_leave_the_others(
    tmp_path: Path, asked: dict[str, int], gpus: str
) -> None:
    flags = container_flags(request("cuda", **asked), machine_of(DGX, tmp_path), "job")
    assert values(flags, "gpus") == [gpus]


@pytest.mark.parametrize("count", [0, 4, 8])
def test_each_node_gets_the_gpus_that_are_asked_for(tmp_path: Path, count: int) -> None:
    machine = assume(machine_of(Host(nvidia=count), tmp_path), "cuda", gpus=4)
    both = [container_flags(request("cuda", nodes=2, gpus=4), machine, None, rank) for rank in range(2)]
    assert [values(flags, "gpus") for flags in both] == [['"device=0,1,2,3"'], ['"device=4,5,6,7"']]
    alone = container_flags(request("cuda", nodes=2, gpus=4), machine)
    assert values(alone, "gpus") == ['"device=0,1,2,3"'], "the machine may have more"


def test_each_amd_node_gets_the_gpus_that_are_asked_for(tmp_path: Path) -> None:
    machine = assume(machine_of(BARE, tmp_path), "rocm", gpus=2)
    flags = container_flags(request("rocm", nodes=2, gpus=2), machine, None, 1)
    assert values(flags, "device") == ["/dev/kfd", "/dev/dri/renderD130", "/dev/dri/renderD131"]


def test_more_gpus_than_this_machine_has_are_refused(tmp_path: Path) -> None:
    machine = machine_of(DGX, tmp_path)
    refuse_absent_gpus(request("cuda", nodes=2, gpus=4), machine)
    with pytest.raises(RunError, match=r"3 node\(s\) with 4 GPUs each need 12, and this machine has 8"):
        refuse_absent_gpus(request("cuda", nodes=3, gpus=4), machine)


def test_requested_flags_are_included(tmp_path: Path) -> None:
    asked = request(volumes=("/data:/data:ro",), environment=("A=b",), user="1000:1000", shm_bytes=2**33)
    flags = container_flags(asked, machine_of(BARE, tmp_path))
    assert (values(flags, "volume"), values(flags, "env")) == (["/data:/data:ro"], ["A=b"])
    assert (values(flags, "user"), values(flags, "shm-size")) == (["1000:1000"], [str(2**33)])


def test_options_describe_nodes_other_than_this_machine(tmp_path: Path) -> None:
    machine = assume(machine_of(BARE, tmp_path), "rocm", gpus=8, memory=2**41, fabric="roce")
    flags = container_flags(request("rocm"), machine)
    assert "/dev/infiniband" in values(flags, "device")
    assert int(values(flags, "shm-size")[0]) == shm_size(2**41)
    with pytest.raises(UsageError):
        assume(machine, "cpu", gpus=1)


@given(ram=st.integers(2**28, 2**43), nodes=st.integers(1, 16))
def test_shared_memory_is_larger_than_rays_object_store(ram: int, nodes: int) -> None:
    """Ray wants 30 % of RAM, at most 200 GB (ray/_private/ray_constants.py); `launch` gives it 80 % of /dev/shm."""
    size = shm_size(ram, nodes)
    assert size * 0.8 >= min(0.3 * ram / nodes, 200e9)
    assert size >= 2**30
    assert size <= 0.375 * ram / nodes + 2**30


def test_volumes_get_absolute_host_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_volumes(("runs:/runs:ro",)) == (f"{tmp_path}/runs:/runs:ro",)


@pytest.mark.parametrize("volume", ["/no/such/folder:/data", "/tmp", "missing:/x"])
def test_a_volume_that_cannot_be_mounted_is_refused(volume: str) -> None:
    with pytest.raises(RunError) as caught:
        check_volumes((volume,))
    assert volume in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("64k", 2**16), ("1g", 2**30), ("2TiB", 2**41), ("3 MB", 3 * 2**20)]
)
def test_sizes_are_read_in_dockers_notation(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "much", "1.5g", "-1", "1x"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_size(text, "--memory")
