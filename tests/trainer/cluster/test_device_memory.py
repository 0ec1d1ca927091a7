"""The memory of nodes' devices, on a cluster of two Ray nodes on this machine."""

from pathlib import Path

import psutil
import pytest

from tests.trainer.whole_run import Runs
from trainer.cluster import device_memory
from trainer.cluster.connection import connected
from trainer.cluster.device_memory import with_memory
from trainer.cluster.nodes import find_nodes
from trainer.errors import WorkerError


def test_each_node_tells_its_own_memory(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", runs.address)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    total = psutil.virtual_memory().total / 2**30
    with connected():
        nodes = find_nodes(2, 0)
        assert [node.device_gib for node in nodes] == [None, None]
        assert [node.device_gib for node in with_memory(nodes, "cpu", timeout=60)] == [pytest.approx(total)] * 2
        with pytest.raises(WorkerError, match="did not tell the memory"):
            with_memory(nodes, "cpu", timeout=0)


def test_a_node_with_different_gpus_counts_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_nvidia_memory", lambda: [79.6, 39.5])
    assert device_memory.device_memory("cuda") == 39.5
    monkeypatch.setattr(device_memory, "_nvidia_memory", list)
    assert device_memory.device_memory("cuda") is None
