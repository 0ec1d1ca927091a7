"""Every file in examples/recipes is accepted, is planned on the GPUs that it is sized for, and says how to start it."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trainer.planning.sizes import write_sizes
from trainer.cluster.nodes import ClusterNode, Slot
from trainer.compat.settings import load_config
from trainer.config.dpo import DpoConfig
from trainer.config.overrides import parse_overrides
from trainer.config.tree import Config
from trainer.planning.memory import tight
from trainer.planning.placement import roles_of
from trainer.planning.plan import plan_of

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
GPU_GIB = 79.0
ROLES_OF_DPO = ("actor", "reference")


def read(name: str) -> Config:
    """The settings of a recipe; those of its workers for DPO."""
    file = str(RECIPES / f"{name}.yaml")
    if name.startswith("dpo"):
        return parse_overrides([], DpoConfig, [file]).for_workers()
    config, notes = load_config([file], [])
    assert notes == []
    return config


def header(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").split("\n\n")[0]


def size_of(name: str, directory: Path) -> Path:
    """A directory with a model of the size that the name says, like 7B."""
    size = re.search(r"\d+(?:\.\d+)?B\b", name)
    assert size
    return write_sizes(size[0], directory)


def with_sizes(config: Config, directory: Path) -> Config:
    model = config.model.model_copy(update={"path": size_of(str(config.model.path), directory / "model")})
    reward = config.reward
    if reward.model.path is not None:
        path = size_of(str(reward.model.path), directory / "reward")
        reward = reward.model_copy(update={"model": reward.model.model_copy(update={"path": path})})
    return config.model_copy(update={"model": model, "reward": reward})


def slots(nodes: int, gpus: int) -> Sequence[Slot]:
    cluster = [ClusterNode(f"id{at}", f"10.0.0.{at}", cpus=64, gpus=gpus, device_gib=GPU_GIB) for at in range(nodes)]
    return [Slot(rank, cluster[rank // gpus], "cuda", rank % gpus, gpus, group=None) for rank in range(nodes * gpus)]


def test_there_are_a_dozen() -> None:
    assert len(NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_the_gpus_that_it_names(name: str, tmp_path: Path) -> None:
    config = with_sizes(read(name), tmp_path)
    sized = re.search(r"Sized for (\d+) nodes? of (\d+) GPUs? with 80 GB", header(name))
    assert sized
    nodes, gpus = int(sized[1]), int(sized[2])
    assert (config.trainer.nnodes or 1, config.trainer.n_gpus_per_node or 1) == (nodes, gpus)
    roles = ROLES_OF_DPO if name.startswith("dpo") else roles_of(config)
    plan = plan_of(config, slots(nodes, gpus), roles)
    assert tight(plan.shares) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_lines_for_docker_slurm_and_kubernetes(name: str) -> None:
    text = header(name)
    command = "dpo" if name.startswith("dpo") else "train"
    for place in ("Docker", "Slurm", "Kubernetes"):
        assert re.search(rf"^# {place}: ", text, re.MULTILINE)
    assert text.count(f"{command} --config examples/recipes/{name}.yaml") == 3
    assert re.findall(r"--nodes (\d+) --gpus (\d+)", text) == 2 * re.findall(r"for (\d+) nodes? of (\d+) GPU", text)
