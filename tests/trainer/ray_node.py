"""A Ray cluster of one node, to which a test's process is connected as the trainer is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from trainer.cluster.connection import connected

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def ray_node(*modules: Path, num_gpus: int = 0) -> Iterator[None]:
    """Workers also find modules in the directories `modules`.

    Not a node of `ray.init`: Ray forgets processes of such a one that end late, and Python warns of them tests later.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (*modules, REPOSITORY))), prepend=os.pathsep)
        node = {"num_cpus": 2, "num_gpus": num_gpus, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            patch.setenv("RAY_ADDRESS", cluster.address)
            with connected():
                yield
        finally:
            cluster.shutdown()
