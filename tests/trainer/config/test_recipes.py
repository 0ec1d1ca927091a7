"""Every file in examples/recipes is accepted, is planned on the GPUs that it is sized for, and says how to start it and
which command makes its data. The table beside them says the same."""

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trainer.planning.sizes import MIXTURES, write_mixture, write_sizes
from trainer.cluster.nodes import ClusterNode, Slot
from trainer.commands.data import data
from trainer.compat.settings import load_config
from trainer.config.dpo import DpoConfig
from trainer.config.overrides import parse_overrides
from trainer.config.tree import Config
from trainer.data.dataset import PromptDataset
from trainer.data.preferences import read_pairs
from trainer.models.small import build_tokenizer
from trainer.planning.flops import Rows, update_flops
from trainer.planning.memory import by_device, tight
from trainer.planning.memory import size_of as model_size
from trainer.planning.placement import roles_of
from trainer.planning.plan import Plan, plan_of
from trainer.rewards.sources import has_scorer

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
TABLE = RECIPES / "README.md"
GPU_GIB = 79.0
PEAK, MFU = 989e12, 0.4  # of an H100 SXM in bfloat16; its share that the table assumes
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
    """A directory with a model of the size that the name says, like 7B, or with a mixture of that name."""
    if mixture := next((known for known in MIXTURES if known in name), None):
        return write_mixture(mixture, directory)
    size = re.search(r"(?:Llama-3\.1-)?\d+(?:\.\d+)?B\b", name)
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


def sized_for(name: str) -> tuple[int, int]:
    """Nodes, and GPUs of each."""
    sized = re.search(r"Sized for (\d+) nodes? of (\d+) GPUs? with 80 GB", header(name))
    assert sized
    return int(sized[1]), int(sized[2])


def planned(name: str, directory: Path) -> Plan:
    config = with_sizes(read(name), directory)
    roles = ROLES_OF_DPO if name.startswith("dpo") else roles_of(config)
    return plan_of(config, slots(*sized_for(name)), roles)


def data_command(name: str) -> str:
    command = re.search(r"^# Data: +(python -m trainer data .*)$", header(name), re.MULTILINE)
    assert command
    return command[1]


def gib(plan: Plan) -> float:
    """What the fullest GPU needs: all that stays on it, and the largest turn."""
    return max(
        sum(share.resting for share in on_device) + max(share.working + share.passes for share in on_device)
        for on_device in by_device(plan.shares)
    )


def update_seconds(name: str, plan: Plan) -> float:
    """The arithmetic of a step's updates of actor and critic, every response at its limit."""
    config = plan.config
    size = model_size(config, "actor")
    assert size
    copies = 2 if name.startswith("dpo") else config.rollout.samples_per_prompt
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    rows = config.data.train_batch_size * copies
    work = Rows([prompt + response] * rows, head_tokens=response * rows)
    needed = update_flops(size, work, frozen=config.actor.lora.rank > 0)
    needed += update_flops(size, work) if "critic" in plan.placement else 0
    return needed / (len(plan.placement["actor"]) * PEAK * MFU)


def line(name: str, directory: Path) -> str:
    """The recipe's line of the table."""
    plan = planned(name, directory)
    nodes, gpus = sized_for(name)
    command = data_command(name).removeprefix("python -m trainer ")
    return (
        f"| [{name}]({name}.yaml) | {read(name).model.path} | {f'{nodes} x {gpus}' if nodes > 1 else gpus} "
        f"| `{command}` | {gib(plan):.0f} | {update_seconds(name, plan) / 60:.1f} |"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_the_gpus_that_it_names(name: str, tmp_path: Path) -> None:
    trainer = read(name).trainer
    assert (trainer.nnodes or 1, trainer.n_gpus_per_node or 1) == sized_for(name)
    assert tight(planned(name, tmp_path).shares) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_a_recipe_as_it_is_planned(name: str, tmp_path: Path) -> None:
    assert line(name, tmp_path) in TABLE.read_text(encoding="utf-8").splitlines()


def test_the_table_has_no_other_recipe() -> None:
    assert re.findall(r"^\| \[(\S+)\]\(", TABLE.read_text(encoding="utf-8"), re.MULTILINE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_recipe_makes_the_data_that_it_names(name: str, tmp_path: Path) -> None:
    words = shlex.split(data_command(name).removeprefix("python -m trainer data "))
    command = [*words, *(() if words[0] == "arithmetic" else ("--synthetic", "16"))]
    with contextlib.chdir(tmp_path):
        data(command, standalone_mode=False)
        config = read(name)  # whose relative paths begin here
        files = [*config.data.train_files, *config.data.validation_files]
        settings = config.data.model_copy(update={"max_prompt_length": 2048, "max_response_length": 256})
        tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
        if name.startswith("dpo"):
            assert read_pairs(files, tokenizer, settings)
            return
        prompts = PromptDataset(files, tokenizer, settings)
    assert len(prompts) > 0
    unscored = [source for _, source in prompts.count_sources() if not has_scorer(config.reward, source)]
    assert unscored == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_lines_for_docker_slurm_and_kubernetes(name: str) -> None:
    text = header(name)
    command = "dpo" if name.startswith("dpo") else "train"
    for place in ("Docker", "Slurm", "Kubernetes"):
        assert re.search(rf"^# {place}: ", text, re.MULTILINE)
    assert text.count(f"{command} --config examples/recipes/{name}.yaml") == 3
    assert re.findall(r"--nodes (\d+) --gpus (\d+)", text) == 2 * re.findall(r"for (\d+) nodes? of (\d+) GPU", text)
