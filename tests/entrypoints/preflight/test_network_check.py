"""`launch preflight --network`. Skipped without Ray and torch, which the images have."""

import json
from pathlib import Path

import pytest

from tests.entrypoints.conftest import Start

pytest.importorskip("ray", reason="needs Ray, which the images have")
pytest.importorskip("torch", reason="needs torch, which the images have")

import ray

from entrypoints.preflight import network
from entrypoints.preflight.network import NodePair, fallback, judge, pairs_of, transport_of

SMALL = ("--num-cpus", "1", "--num-gpus", "0", "--object-store-memory", str(100 * 1024**2))


@pytest.mark.parametrize(
    ("lines", "transport"),
    [
        (("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>", "Using network IB"), "IB"),
        (("NET/IB : No device found.", "Using network Socket"), "Socket"),
        (("Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",), "Socket"),
        (("NET/OFI Initializing aws-ofi-nccl 1.14.0", "Using network Libfabric"), "Libfabric"),
        ((), "none"),
    ],
)
def test_nccls_log_tells_the_transport(lines: tuple[str, ...], transport: str) -> None:
    assert transport_of("".join(f"n1:7:7 [0] NCCL INFO {line}\n" for line in lines)) == transport


def test_sockets_are_a_problem_only_if_a_faster_fabric_exists() -> None:
    assert "fell back to sockets although the hosts have roce adapters" in fallback("Socket", ["ethernet", "roce"])
    assert fallback("Socket", ["ethernet", "ethernet"]) == ""
    assert fallback("IB", ["infiniband"]) == ""


def pair(first: str, second: str, speed: float, problem: str = "") -> NodePair:
    return NodePair((first, second), "nccl", speed, "IB", problem)


def test_a_host_whose_pairs_are_all_slow_is_named() -> None:
    speeds = {("a", "b"): 40.0, ("a", "c"): 9.0, ("b", "c"): 8.0, ("a", "d"): 41.0, ("b", "d"): 39.0, ("c", "d"): 9.0}
    assert judge([pair(*names, speed) for names, speed in speeds.items()]) == ["c"]
    assert judge([pair("a", "b", 40.0), pair("a", "c", 39.0), pair("b", "c", 41.0)]) == []
    assert judge([pair("a", "b", 1.0, "NCCL fell back to sockets")]) == ["a", "b"]


def test_one_bad_link_between_good_hosts_names_both() -> None:
    good = [pair("a", "c", 40.0), pair("b", "c", 41.0)]
    assert judge([pair("a", "b", 0.0, "nothing came through"), *good]) == ["a", "b"]
    assert judge([pair("a", "b", 4.0), *good]) == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ray.exceptions.GetTimeoutError("Get timed out"), "no data arrived within 120 s"),
        (ray.exceptions.OutOfMemoryError("the kernel ended it"), "it failed: the kernel ended it"),
    ],
)
def test_a_pair_that_hangs_or_fails_is_named_with_a_mocked_measurement(
    monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    def fail(*_: object) -> NodePair:
        raise error

    monkeypatch.setattr(network, "measure_pair", fail)
    pair = network.try_pair({"NodeManagerHostname": "a"}, {"NodeManagerHostname": "b"})
    assert (pair.hosts, pair.gigabytes_per_second, pair.problem) == (("a", "b"), 0.0, problem)


def test_many_nodes_are_measured_along_a_ring() -> None:
    assert len(pairs_of(range(4))) == 6
    assert pairs_of(range(20))[-1] == (19, 0)
    assert len(pairs_of(range(20))) == 20


def test_every_pair_of_nodes_and_every_device_is_measured(start_node: Start, tmp_path: Path) -> None:
    variables = {"SLIPWAY_DEADLINE": "240", "OMP_NUM_THREADS": "1"}
    worker = start_node(1, *SMALL, "preflight", "--network", "--speed", "--json", **variables)
    head = start_node(0, *SMALL, "preflight", "--network", "--speed", "--json", **variables)
    ended = head.wait()
    assert worker.wait().status == ended.status, ended.stderr
    report = json.loads(ended.stdout)
    (pair,) = report["pairs"]
    assert pair["backend"] == "gloo"
    assert pair["gigabytes_per_second"] > 0
    assert [device["device"] for device in report["devices"]] == ["cpu", "cpu"]
    assert all(device["matrix"] > 0 and device["memory"] > 0 for device in report["devices"])
    assert ended.status == (15 if report["failing_hosts"] else 0), "a busy core may be slow"
    assert (tmp_path / "failing_hosts.txt").read_text(encoding="utf-8").split() == report["failing_hosts"]
    assert json.loads((tmp_path / "measured.json").read_text(encoding="utf-8")) == report
