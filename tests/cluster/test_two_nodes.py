"""Two containers as two nodes: forming the cluster, the common status, losses, refusals and what listens."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Job = Any  # conftest.Job

NODE_LOST = 13
PEERS_MISSING = 12
PREFLIGHT_FAILED = 15

COUNT_NODES = "import ray; ray.init(log_to_driver=False); print('alive', sum(node['Alive'] for node in ray.nodes()))"
CONTROL_PORT = 'awk \'$2 ~ /:504B$/ && $4 == "0A" {print "control", $2}\' /proc/net/tcp /proc/net/tcp6'
"""Prints where port 20555 is open, as the kernel writes it."""


def wait_for_output(job: Job, name: str, words: str, deadline: float = 90) -> None:
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if words in job.output(name):
            return
        time.sleep(0.2)
    pytest.fail(f"{name} did not say `{words}` within {deadline} s:\n{job.outputs()}")


def test_cluster_forms_and_the_command_sees_every_node(job: Callable[..., Job]) -> None:
    nodes = job(SLIPWAY_CONTROL_PORT="20555")
    for rank in (1, 0):
        nodes.start(rank, "--", "sh", "-c", f'python -c "{COUNT_NODES}"; {CONTROL_PORT}')
    assert nodes.wait() == {"node1": 0, "node0": 0}, nodes.outputs()
    assert "alive 2" in nodes.output("node0")
    listening = [line.split()[1] for line in nodes.output("node0").splitlines() if line.startswith("control ")]
    assert len(listening) == 1, nodes.output("node0")  # the address of the containers' network alone
    assert listening[0] != "00000000:504B"
    assert "alive" not in nodes.output("node1")


def test_exit_code_of_the_command_reaches_every_node(job: Callable[..., Job]) -> None:
    nodes = job()
    for rank in (0, 1):
        nodes.start(rank, "--", "sh", "-c", "exit 7")
    assert nodes.wait() == {"node0": 7, "node1": 7}, nodes.outputs()


def test_a_killed_worker_ends_the_job_and_is_named(job: Callable[..., Job]) -> None:
    nodes = job()
    for rank in (0, 1):
        nodes.start(rank, "--", "sh", "-c", "echo running; sleep 600")
    wait_for_output(nodes, "node0", "running")
    nodes.containers["node1"].kill("SIGKILL")
    status = nodes.containers["node0"].wait(timeout=60)["StatusCode"]
    assert status == NODE_LOST, nodes.outputs()
    assert "node1" in nodes.output("node0").split("running")[1]


def test_a_wrong_token_is_named_on_both_sides(job: Callable[..., Job]) -> None:
    nodes = job(SLIPWAY_DEADLINE="15")
    nodes.start(0, "--", "true")
    nodes.start(1, "--", "true", SLIPWAY_TOKEN="another-secret-altogether")
    assert set(nodes.wait().values()) == {PEERS_MISSING}, nodes.outputs()
    assert "token" in nodes.output("node1")
    head = nodes.output("node0")
    assert "node1" in head
    assert "token" in head
    assert "another-secret" not in nodes.outputs()


def test_a_missing_peer_is_named_at_the_deadline(job: Callable[..., Job]) -> None:
    nodes = job(size=3, SLIPWAY_DEADLINE="12")
    for rank in (0, 1):
        nodes.start(rank, "--", "true")
    assert set(nodes.wait().values()) == {PEERS_MISSING}, nodes.outputs()
    assert "node2" in nodes.output("node0")


def test_a_worker_names_the_head_that_it_could_not_reach(job: Callable[..., Job]) -> None:
    nodes = job(SLIPWAY_DEADLINE="8")
    nodes.start(1, "--", "true")
    assert nodes.wait() == {"node1": PEERS_MISSING}, nodes.outputs()
    assert "node0" in nodes.output("node1")


def test_sigterm_on_the_head_ends_every_node(job: Callable[..., Job]) -> None:
    nodes = job()
    for rank in (0, 1):
        nodes.start(rank, "--", "sh", "-c", "trap 'echo asked to stop; exit 0' TERM; echo running; sleep 600 & wait")
    wait_for_output(nodes, "node0", "running")
    nodes.containers["node0"].kill("SIGTERM")
    assert nodes.wait(timeout=30) == {"node0": 143, "node1": 143}, nodes.outputs()
    assert "asked to stop" in nodes.output("node0")


def test_a_node_that_loses_its_network_ends_the_job_on_both_sides(job: Callable[..., Job]) -> None:
    nodes = job()
    for rank in (0, 1):
        nodes.start(rank, "--", "sh", "-c", "echo running; sleep 600")
    wait_for_output(nodes, "node0", "running")
    nodes.network.disconnect(nodes.containers["node1"])
    assert nodes.wait(timeout=60) == {"node0": NODE_LOST, "node1": NODE_LOST}, nodes.outputs()
    assert "no heartbeat for 10 s" in nodes.output("node0")
    assert "no heartbeat for 10 s" in nodes.output("node1")


def test_preflight_names_the_slow_node(job: Callable[..., Job]) -> None:
    nodes = job()
    measured = "until [ -e /tmp/go ]; do sleep 0.2; done; python -m entrypoints.preflight.measure"
    for rank in (0, 1):
        nodes.start(rank, "--", "sh", "-c", f"echo running; {measured} --speed --output /tmp")
    wait_for_output(nodes, "node0", "running")
    nodes.containers["node1"].update(cpu_period=100_000, cpu_quota=15_000)
    nodes.containers["node0"].exec_run(["touch", "/tmp/go"])
    assert nodes.wait()["node0"] == PREFLIGHT_FAILED, nodes.outputs()
    slow = [line for line in nodes.output("node0").splitlines() if "slow: " in line]
    assert slow
    assert all("node1 cpu: " in line and "is usual here" in line for line in slow)


TRAINING = Path(__file__).with_name("training.py").read_text()
LISTENERS = """
import os, socket
from pathlib import Path
owners = {}
for process in Path("/proc").glob("[0-9]*"):
    for descriptor in process.glob("fd/*"):
        try:
            owners[os.readlink(descriptor)] = (process / "comm").read_text().strip()
        except OSError:
            continue
for table in ("tcp", "tcp6"):
    for row in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
        address, port = row[1].split(":")
        if row[3] == "0A" and not (address.endswith("0100007F") or address == "0" * 24 + "01000000"):
            print("all" if not int(address, 16) else "own", int(port, 16), owners.get(f"socket:[{row[9]}]"), sep=";")
"""
"""Prints what listens beyond loopback: on all addresses or one of its own, the port, the program."""


def test_only_rays_ports_listen_on_all_addresses_during_training(job: Callable[..., Job]) -> None:
    nodes = job()
    nodes.start(1, "--", "true")
    nodes.start(0, "--", "python", "-c", TRAINING, "/tmp/training", "1000")
    wait_for_output(nodes, "node0", "step_000002", deadline=90)
    for container in nodes.containers.values():
        rows = container.exec_run(["python", "-c", LISTENERS]).output.decode().split()
        listeners = [(scope, int(port), program) for scope, port, program in (row.split(";") for row in rows)]
        everywhere = {port: program for scope, port, program in listeners if scope == "all"}
        block = min(port for port, program in everywhere.items() if program == "raylet") - 1
        assert {port: program for port, program in everywhere.items() if port not in range(block, block + 500)} == {}
        assert ("own", "ray::ActorWorke") in {(scope, program) for scope, _, program in listeners}  # store and Gloo
