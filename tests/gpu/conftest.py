"""Fixtures for tests on GPUs, which are skipped if there are too few GPUs.

`SLIPWAY_REHEARSE_ON_CPU=1` runs all of them on CPU, over gloo and Ray's object store, without checks that need a GPU.
Measured values are printed at the end, also for tests that passed.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import Ranks
from tests.gpu.whole_runs import Machine, write_job
from tests.trainer.whole_run import Runs

LINE = 400  # longest measured value to print, in characters
REHEARSAL = os.environ.get("SLIPWAY_REHEARSE_ON_CPU") == "1"


@cache
def gpus() -> int:
    if REHEARSAL:
        return 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the host's drivers and packages
        try:
            import torch
        except ImportError:
            return 0
        return torch.cuda.device_count() if torch.cuda.is_available() and torch.version.hip is None else 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(count): NVIDIA GPUs that a test needs; 1 without the marker")
    config.addinivalue_line("markers", "timeout(seconds): pytest-timeout's; hosts without GPUs may lack it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1
        # The machine may have other releases of torch and Ray than the image, with other warnings.
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.skipif(gpus() < needed, reason=f"needs {needed} NVIDIA GPU(s), found {gpus()}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and report.user_properties and "gpu/" in report.nodeid
    ]
    if reports:
        terminalreporter.section("measured on GPUs" if not REHEARSAL else "measured in a rehearsal on CPU")
    for report in reports:
        terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]} ({report.duration:.1f} s)")
        for name, value in report.user_properties:
            terminalreporter.write_line(f"    {name}: {str(value)[:LINE]}")


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if REHEARSAL else "cuda"


@pytest.fixture(scope="session")
def one_rank(device: str) -> Iterator[Ranks]:
    with Ranks(1, device) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two_ranks(device: str) -> Iterator[Ranks]:
    with Ranks(2, device) as ranks:
        yield ranks


@pytest.fixture
def measure(record_property: Callable[[str, object], None]) -> Callable[..., dict[str, Any]]:
    """Runs a function of `tests.gpu` on ranks and records its results."""

    def run(ranks: Ranks, function: str, **arguments: Any) -> dict[str, Any]:
        results = ranks.run(function, **arguments)
        for name, value in results.items():
            record_property(name, value)
        return results

    return run


@pytest.fixture(scope="session")
def machine(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    directory = tmp_path_factory.mktemp("gpu-runs")
    model, data = write_job(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        if device == "cuda":
            yield Machine(Runs("local", directory, model, data), device, "0", "1")
            return
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            yield Machine(Runs(cluster.address, directory, model, data), device, "node0:0", "node1:0")
        finally:
            cluster.shutdown()
