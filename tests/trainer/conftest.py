"""What tests of several rooms use: a cluster of two Ray nodes on this machine, and a process group of one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster

from tests.trainer.small_model import write_small_model
from tests.trainer.whole_run import Runs
from trainer.data.arithmetic import write_arithmetic
from trainer.training.ranks.process_group import join, open_store


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that no test changes."""
    return write_small_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Runs]:
    directory = tmp_path_factory.mktemp("runs")
    train, _, validation = write_arithmetic(directory / "data", 64, 8, max_number=9, dropped_carries=0.75, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            yield Runs(cluster.address, directory, model, [train, validation])
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process is the only rank of a process group."""
    join(open_store("127.0.0.1", 1, 60), 0, 1, torch.device("cpu"), "127.0.0.1", 60)
    yield
    dist.destroy_process_group()
