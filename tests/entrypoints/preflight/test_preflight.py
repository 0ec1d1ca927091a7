"""Each check, `launch preflight`, and launches stopped by an unfit node."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoints.environments import detect
from entrypoints.errors import PreflightError
from entrypoints.host.settings import examine_host
from entrypoints.host.tree import Tree
from entrypoints.preflight import CHECKS, Verdict, failures, gather_facts, refuse
from entrypoints.preflight.check import GIB, MIB, Finding, NodeFacts
from entrypoints.preflight.devices import driver, gpu_access, rdma
from entrypoints.preflight.limits import (
    judge_address_space,
    judge_locked_memory,
    judge_memory,
    judge_open_files,
    judge_processes,
    judge_shared_memory,
    judge_stack,
    memory,
    processes,
    shared_memory,
)
from entrypoints.preflight.resources import disk, judge_disk, leftovers, ports, privacy
from entrypoints.ray.directory import NodeDirectory, directory_prefix
from tests.entrypoints import hosts
from tests.entrypoints.conftest import Start
from tests.entrypoints.hosts import HostTree

TWO_NODES = {"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "0"}


def facts_of(root: Path, target: str = "cuda", pins: dict[str, str] | None = None, **variables: str) -> NodeFacts:
    HostTree(root).image(target=target, pins=pins or {})
    tree = Tree(root)
    host = examine_host(tree, variables)
    allocation = detect({**TWO_NODES, **variables}, "a", root).allocation
    return replace(gather_facts(tree, host, allocation, variables, None), temporary=root)


@pytest.mark.parametrize(
    ("finding", "verdict", "words"),
    [
        (judge_shared_memory(64 * MIB, 8), "fail", "64 MiB, NCCL needs 1024"),
        (judge_shared_memory(64 * MIB, 0), "warn", "goes to disk"),
        (judge_shared_memory(2 * GIB, 8), "ok", "2048 MiB"),
        (judge_stack(8 * MIB, 8), "warn", "8 MiB"),
        (judge_stack(8 * MIB, 0), "skip", "no GPU"),
        (judge_stack(-1, 8), "ok", "unlimited"),
        (judge_open_files(2048), "fail", "at most 2048 files"),
        (judge_open_files(1 << 20), "ok", "1048576 files"),
        (judge_open_files(-1), "ok", "unlimited"),
        (judge_processes({}, 8), "ok", "unlimited"),
        (
            judge_processes({"ulimit -u": (150, 3)}, 2),
            "fail",
            "only 150 processes and threads may run (ulimit -u), 3 do",
        ),
        (judge_processes({"ulimit -u": (4096, 3900)}, 2), "fail", "Ray needs about 250 for 2 CPUs"),
        (judge_processes({"ulimit -u": (4096, 20)}, 2), "ok", "4096 processes"),
        (judge_processes({"ulimit -u": (4096, 20)}, 192), "warn", "Ray needs about 5000 for 192 CPUs"),
        (judge_processes({"ulimit -u": (65536, 9), "/pids.max": (100, 9)}, 1), "fail", "only 100 processes"),
        (judge_memory({"RAM": 64 * GIB}, None), "ok", "65536 MiB may be used (RAM)"),
        (
            judge_memory({"RAM": 64 * GIB, "/memory.max": 256 * MIB}, None),
            "fail",
            "only 256 MiB may be used (/memory.max)",
        ),
        (judge_memory({"RAM": 64 * GIB, "/memory.max": 2 * GIB}, None), "ok", "2048 MiB may be used (/memory.max)"),
        (judge_memory({"RAM": 64 * GIB, "/memory.max": 2 * GIB}, 3 * GIB), "fail", "3072 for its object store"),
        (judge_address_space(-1, 8), "ok", "unlimited"),
        (judge_address_space(16 * GIB, 8), "warn", "CUDA and Ray reserve more than is used"),
        (judge_address_space(16 * GIB, 0), "warn", "(ulimit -v); Ray reserves"),
        (judge_disk(MIB, Path("/tmp")), "fail", "/tmp has 0.0 GiB free, Ray needs 1"),
        (judge_disk(5 * GIB, Path("/tmp")), "warn", "5.0 GiB"),
        (judge_disk(50 * GIB, Path("/tmp")), "ok", "50.0 GiB"),
    ],
)
def test_limits_are_judged(finding: Finding, verdict: str, words: str) -> None:
    assert finding.verdict == verdict
    assert words in finding.message
    assert bool(finding.fix) == (verdict in ("warn", "fail"))


def test_missing_shared_memory_is_a_failure(tmp_path: Path) -> None:
    assert shared_memory(facts_of(tmp_path), tmp_path / "absent").verdict is Verdict.FAIL


@pytest.mark.parametrize(("limit", "verdict"), [(64 * 1024, "fail"), (-1, "ok"), (64 * GIB, "ok")])
def test_rdma_needs_locked_memory(tmp_path: Path, limit: int, verdict: str) -> None:
    hosts.dgx_h100(tmp_path)
    finding = judge_locked_memory(limit, facts_of(tmp_path))
    assert finding.verdict == verdict
    if verdict == "fail":
        assert "--ulimit memlock=-1" in finding.fix
        assert "on Kubernetes add IPC_LOCK" in finding.fix


@pytest.mark.parametrize(
    ("capabilities", "users", "verdict"),
    [
        ("0000000000004000", "0 0 4294967295", "ok"),
        ("00000000a80425fb", "0 0 4294967295", "fail"),  # Docker's default set
        ("0000000000004000", "0 1000 1\n1 100000 65536", "fail"),
    ],
)
def test_the_capability_to_lock_memory_lifts_the_limit_except_in_a_user_namespace(
    tmp_path: Path, capabilities: str, users: str, verdict: str
) -> None:
    tree = hosts.dgx_h100(tmp_path)
    tree.write("proc/self/status", f"Name:\tlaunch\nCapEff:\t{capabilities}\nCapBnd:\t000001ffffffffff")
    tree.write("proc/self/uid_map", users)
    assert judge_locked_memory(64 * 1024, facts_of(tmp_path)).verdict == verdict


def test_a_limit_of_processes_in_the_jobs_control_group_counts(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.write("proc/self/cgroup", "0::/job_7/step_0")
    tree.write("proc/self/status", "CapEff:\t000001ffffffffff")
    tree.write("proc/self/uid_map", "0 0 4294967295")
    assert processes(facts_of(tmp_path)).message == "unlimited"
    tree.write("sys/fs/cgroup/job_7/pids.max", "150")
    tree.write("sys/fs/cgroup/job_7/pids.current", "12")
    tree.write("sys/fs/cgroup/job_7/step_0/pids.max", "max")
    finding = processes(facts_of(tmp_path))
    assert finding.verdict is Verdict.FAIL
    assert "only 150 processes and threads may run (/sys/fs/cgroup/job_7/pids.max), 12 do" in finding.message
    assert "--num-cpus" in finding.fix


def test_the_users_limit_of_processes_binds_who_has_no_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root is exempt, so user and limit are replaced.
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("resource.getrlimit", lambda _: (150, 150))
    tree = HostTree(tmp_path)
    tree.write("proc/7/status", "Name:\tbash\nUid:\t1000\t1000\t1000\t1000\nThreads:\t3")
    tree.write("proc/8/status", "Name:\tsshd\nUid:\t0\t0\t0\t0\nThreads:\t9")
    assert "only 150 processes and threads may run (ulimit -u), 3 do" in processes(facts_of(tmp_path)).message
    tree.write("proc/self/status", "CapEff:\t0000000001000000")
    tree.write("proc/self/uid_map", "0 0 4294967295")
    assert processes(facts_of(tmp_path)).verdict is Verdict.OK


def test_one_node_alone_is_only_warned_about_its_network(tmp_path: Path) -> None:
    hosts.dgx_h100(tmp_path)
    alone = facts_of(tmp_path, SLIPWAY_HOSTS="a")
    assert judge_locked_memory(64 * 1024, alone).verdict is Verdict.WARN
    assert rdma(alone).verdict is Verdict.WARN


def test_without_rdma_the_locked_memory_limit_is_ignored(tmp_path: Path) -> None:
    assert judge_locked_memory(64 * 1024, facts_of(tmp_path)).verdict is Verdict.SKIP


def test_adapters_that_cannot_be_opened_are_reported_as_a_fallback(tmp_path: Path) -> None:
    hosts.dgx_h100(tmp_path)
    finding = rdma(facts_of(tmp_path))
    assert finding.verdict is Verdict.FAIL
    assert (
        "has 8 infiniband adapters, but NCCL would silently use sockets: the container has no /dev/infiniband"
        in finding.message
    )
    assert "--device /dev/infiniband" in finding.fix


def test_libraries_that_do_not_load_are_reported_as_a_fallback(tmp_path: Path) -> None:
    # Some machines have the library, so the loader is replaced.
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    hosts.dgx_h100(tmp_path).write("dev/infiniband/uverbs0", "")
    finding = rdma(facts_of(tmp_path), load)
    assert "silently use sockets: libibverbs.so.1: cannot open shared object file" in finding.message
    assert rdma(facts_of(tmp_path), lambda name: name).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("variables", "plugin"),
    [
        ({}, "libnccl-net.so"),
        ({"NCCL_NET_PLUGIN": "ofi"}, "libnccl-net-ofi.so"),
        ({"NCCL_NET_PLUGIN": "/opt/net.so"}, "/opt/net.so"),
    ],
)
def test_efa_needs_libfabric_and_the_plug_in(tmp_path: Path, variables: dict[str, str], plugin: str) -> None:
    def without(absent: str) -> Callable[[str], None]:
        def load(name: str) -> None:
            if name == absent:
                raise OSError(f"{name}: cannot open shared object file")

        return load

    hosts.aws_p5(tmp_path).write("dev/infiniband/uverbs0", "")
    facts = facts_of(tmp_path, **variables)
    for library in ("libfabric.so.1", plugin):
        finding = rdma(facts, without(library))
        assert finding.verdict is Verdict.FAIL
        assert f"silently use sockets: {library}" in finding.message
        assert "-v /opt/amazon:/opt/amazon:ro" in finding.fix
        assert "rdma-core" not in finding.fix
    assert "rdma-core" in rdma(facts, without("libibverbs.so.1")).fix
    assert rdma(facts, without("other")).verdict is Verdict.OK


def test_the_lowest_limit_of_memory_is_named(tmp_path: Path) -> None:
    HostTree(tmp_path).write("proc/self/cgroup", "0::/job/step")
    for group, limit in (("job", 300 * MIB), ("job/step", 900 * MIB)):
        HostTree(tmp_path).write(f"sys/fs/cgroup/{group}/memory.max", str(limit))
    finding = memory(facts_of(tmp_path))
    assert finding.verdict is Verdict.FAIL
    assert "only 300 MiB may be used (/sys/fs/cgroup/job/memory.max)" in finding.message


def test_active_adapters_that_no_rule_allows_are_a_warning(tmp_path: Path) -> None:
    hosts.flat_vm(tmp_path, adapters=1, gpus=4)
    finding = rdma(facts_of(tmp_path))
    assert finding.verdict is Verdict.WARN
    assert finding.message.startswith("RDMA is off, so NCCL uses sockets")
    assert "SLIPWAY_HCAS" in finding.fix


def test_the_user_can_disable_rdma(tmp_path: Path) -> None:
    hosts.dgx_h100(tmp_path)
    assert rdma(facts_of(tmp_path, SLIPWAY_HCAS="none")).verdict is Verdict.SKIP


def test_rocm_devices_name_the_flag_that_is_missing(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "rocm")
    assert gpu_access(facts).message == "/dev/kfd is missing"
    tree = hosts.mi300x(tmp_path)
    tree.write("dev/kfd", "")
    assert gpu_access(facts).message == "no device file matches /dev/dri/renderD*"
    tree.write("dev/dri/renderD128", "")
    assert gpu_access(facts).verdict is Verdict.OK


def test_a_foreign_render_group_is_named_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may open every file, so the kernel's answer to another user is replaced.
    tree = hosts.mi300x(tmp_path)
    tree.write("dev/kfd", "")
    tree.write("dev/dri/renderD128", "")
    (tmp_path / "dev/dri/renderD128").chmod(0o660)
    monkeypatch.setattr("os.access", lambda path, _: "renderD" not in str(path))
    finding = gpu_access(facts_of(tmp_path, "rocm"))
    gid = (tmp_path / "dev/dri/renderD128").stat().st_gid
    assert finding.message == f"/dev/dri/renderD128 belongs to group {gid}, and this user is not in it"
    assert f"--group-add {gid}" in finding.fix


@pytest.mark.parametrize(
    ("version", "cuda", "verdict"),
    [
        ("580.95.05", "13.0.96", "ok"),
        ("570.86.15", "13.0.96", "fail"),
        ("535.104.05", "12.8", "ok"),
        (None, "13.0", "fail"),
    ],
)
def test_the_driver_must_suit_the_images_cuda(tmp_path: Path, version: str | None, cuda: str, verdict: str) -> None:
    if version:
        words = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Aug 27 11:01:06 UTC 2025"
        hosts.HostTree(tmp_path).write("proc/driver/nvidia/version", words)
    assert driver(facts_of(tmp_path, "cuda", {"nvidia-cuda-runtime": cuda})).verdict == verdict


@pytest.mark.parametrize(("version", "verdict"), [("6.14.14", "ok"), ("6.7.0", "warn"), (None, "ok")])
def test_an_old_amd_driver_is_a_warning(tmp_path: Path, version: str | None, verdict: str) -> None:
    tree = hosts.mi300x(tmp_path)
    if version:
        tree.write("sys/module/amdgpu/version", version)
    assert driver(facts_of(tmp_path, "rocm", {"torch": "2.13.0+rocm7.2"})).verdict == verdict


def test_the_cpu_image_needs_no_gpu(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "cpu")
    assert gpu_access(facts).verdict is Verdict.SKIP
    assert driver(facts).verdict is Verdict.SKIP
    hosts.dgx_h100(tmp_path)
    assert rdma(facts_of(tmp_path, "cpu")).verdict is Verdict.SKIP


def test_a_head_that_uses_no_gpu_needs_none(tmp_path: Path) -> None:
    hosts.dgx_h100(tmp_path)
    facts = replace(facts_of(tmp_path, "cuda"), use_gpus=False)
    for check in (gpu_access, driver, rdma):
        assert check(facts).verdict is Verdict.SKIP
        assert check(replace(facts, use_gpus=True)).verdict is Verdict.FAIL


def test_a_temporary_directory_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    finding = disk(replace(facts_of(tmp_path), temporary=tmp_path / "absent"))
    assert finding.verdict is Verdict.FAIL
    assert "cannot be written: No such file or directory" in finding.message


def test_a_private_tmp_is_fine(tmp_path: Path) -> None:
    (tmp_path / "ours").touch()
    assert privacy(facts_of(tmp_path)).verdict is Verdict.OK


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_tmp_with_files_of_other_users_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    os.chown(tmp_path / "theirs", 65_534, 65_534)
    finding = privacy(facts_of(tmp_path))
    assert finding.verdict is Verdict.WARN
    assert "is shared: 1 other users have files there" in finding.message
    assert "--tmpfs" in finding.fix


def test_a_tmp_without_sticky_bit_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "its sticky bit is missing" in privacy(facts_of(tmp_path)).message


def test_a_tmp_on_a_network_file_system_is_a_warning(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    HostTree(tmp_path).write("proc/self/mountinfo", f"21 1 0:40 / {tmp_path} rw - nfs4 server:/tmp rw\n")
    finding = privacy(facts)
    assert finding.verdict is Verdict.WARN
    assert "is on nfs4, which other nodes share" in finding.message


def test_a_taken_control_port_is_a_failure_on_the_head(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        facts = replace(facts_of(tmp_path), control_port=other.getsockname()[1])
        assert ports(facts).verdict is Verdict.FAIL
        assert "is taken" in ports(facts).message
        worker = replace(facts, allocation=replace(facts.allocation, node_rank=1))
        assert ports(worker).verdict is not Verdict.FAIL


def test_a_control_port_in_the_ephemeral_range_is_a_warning(tmp_path: Path) -> None:
    assert ports(replace(facts_of(tmp_path), control_port=65_000)).verdict is Verdict.WARN


def test_a_leftover_ray_is_named(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    prefix = directory_prefix(facts.allocation.job_id, 0, None)
    for pid, words in {
        "11": f"raylet\0--temp-dir=/tmp/{prefix}x1/session",
        "12": "raylet\0/tmp/slipway-ray-other",
    }.items():
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "cmdline").write_text(words, encoding="ascii")
    finding = leftovers(facts, tmp_path / "proc")
    assert finding.verdict is Verdict.FAIL
    assert finding.fix == "end them: kill -9 11"
    other = replace(facts, allocation=replace(facts.allocation, node_rank=1))
    assert leftovers(other, tmp_path / "proc").verdict is Verdict.OK
    beside = replace(facts, chosen_port=20_001)  # another job on the same hosts
    assert leftovers(beside, tmp_path / "proc").verdict is Verdict.OK


def test_what_killed_launches_of_other_jobs_left_is_named(tmp_path: Path) -> None:
    facts = replace(facts_of(tmp_path), temporary=tmp_path)
    alive, dead = (NodeDirectory(directory_prefix(job, 0, None), tmp_path) for job in ("alive", "dead"))
    os.close(dead._lock)  # as the kernel does when the launch is killed
    for pid, directory in (("11", alive), ("12", dead), ("13", dead)):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "cmdline").write_text(f"raylet\0--temp-dir={directory.ray}", encoding="ascii")
    finding = leftovers(facts, tmp_path / "proc")
    assert finding.verdict is Verdict.WARN
    assert finding.message == f"launches that were killed left {dead.path}, and Ray running: 12, 13"
    assert finding.fix == f"kill -9 12 13; rm -r {dead.path}"
    for pid in ("12", "13"):
        (tmp_path / "proc" / pid / "cmdline").unlink()
    assert leftovers(facts, tmp_path / "proc").fix == f"rm -r {dead.path}"
    alive.remove()


def test_a_running_job_on_the_same_nodes_is_named_and_never_killed(tmp_path: Path) -> None:
    facts = replace(facts_of(tmp_path), temporary=tmp_path)
    first = NodeDirectory(directory_prefix(facts.allocation.job_id, 0, None), tmp_path)
    (tmp_path / "proc" / "11").mkdir(parents=True)
    (tmp_path / "proc" / "11" / "cmdline").write_text(f"raylet\0--temp-dir={first.ray}", encoding="ascii")
    finding = leftovers(facts, tmp_path / "proc")
    assert finding.verdict is Verdict.FAIL
    assert "another job with the same nodes and control port runs on this node" in finding.message
    assert "--control-port" in finding.fix
    assert "kill" not in finding.fix
    beside = replace(facts, chosen_port=20_001)
    assert leftovers(beside, tmp_path / "proc").verdict is Verdict.OK
    first.remove()


def test_unfit_hosts_are_listed_for_the_scheduler(tmp_path: Path) -> None:
    bad = failures(
        [Finding("shm", Verdict.FAIL, "too small", "--shm-size"), Finding("disk", Verdict.WARN, "low", "more")]
    )
    with pytest.raises(PreflightError) as caught:
        refuse({"n1": [], "n2": bad}, tmp_path)
    assert caught.value.message.startswith("1 of 2 hosts are not fit")
    assert "n2: shm: too small" in caught.value.message
    assert caught.value.hint == "--shm-size"
    assert (tmp_path / "failing_hosts.txt").read_text(encoding="utf-8") == "n2\n"
    assert json.loads((tmp_path / "preflight.json").read_text(encoding="utf-8"))["n2"][0]["check"] == "shm"


def test_fit_hosts_need_no_report(tmp_path: Path) -> None:
    refuse({"n1": [], "n2": []}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_preflight_prints_every_check(start: Start) -> None:
    ended = start("preflight", "--json").wait()
    document = json.loads(ended.stdout)
    assert ended.status == (15 if any(finding["verdict"] == "fail" for finding in document["findings"]) else 0)
    assert len(document["findings"]) == len(CHECKS)


def test_preflight_of_a_recorded_host_fails_with_the_fix(start: Start, tmp_path: Path) -> None:
    hosts.dgx_h100(tmp_path / "dgx").image(target="cuda")
    ended = start("preflight", "--sysfs-root", str(tmp_path / "dgx"), **TWO_NODES).wait()
    assert ended.status == 15
    assert "fail  rdma" in ended.stdout
    assert "hint: " in ended.stderr
    assert (tmp_path / "failing_hosts.txt").read_text(encoding="utf-8").strip()


def test_an_unfit_worker_stops_the_job_before_it_starts(start_node: Start, tmp_path: Path) -> None:
    head = start_node(0, "--no-ray", "--", "echo", "ran")
    worker = start_node(1, "--no-ray", "--", "true", SLIPWAY_TEST_NOFILE="1000")
    ends = [head.wait(), worker.wait()]
    assert [end.status for end in ends] == [15, 15]
    assert ends[0].stdout == ""
    assert all("nofile: at most 1000 files may be open" in end.stderr for end in ends)
    assert (tmp_path / "failing_hosts.txt").read_text(encoding="utf-8").strip()


def test_no_preflight_lets_an_unfit_node_join(start_node: Start) -> None:
    head = start_node(0, "--no-preflight", "--no-ray", "--", "echo", "ran", SLIPWAY_TEST_NOFILE="1000")
    worker = start_node(1, "--no-ray", "--", "true")
    assert (head.wait().stdout, worker.wait().status) == ("ran\n", 0)


def test_a_single_node_without_ray_skips_the_checks(start: Start) -> None:
    ended = start("--no-ray", "--", "echo", "ran", SLIPWAY_TEST_NOFILE="1000").wait()
    assert (ended.status, ended.stdout) == (0, "ran\n")
