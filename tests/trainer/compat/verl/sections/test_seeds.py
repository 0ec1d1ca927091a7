"""verl's seeds: a run here has a single one, so they must agree where they have an effect."""

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout.seed=7"
ACTOR = "actor_rollout_ref.actor"
SHUFFLED = f"{ACTOR}.shuffle=True"
DETERMINISTIC = f"{ACTOR}.fsdp_config.full_determinism=True"
MEGATRON = f"{ACTOR}.strategy=megatron"


@pytest.mark.parametrize(
    ("line", "seed"),
    [
        ([], 0),
        ([ROLLOUT], 7),
        (["actor_rollout_ref.rollout.seed=42"], 0),
        ([ROLLOUT, "data.seed=null"], 7),
        ([ROLLOUT, "data.seed=7"], 7),
        (["actor_rollout_ref.rollout.seed=42", "data.seed=7"], 7),
        ([f"{ACTOR}.data_loader_seed=7", SHUFFLED], 7),
        (["critic.data_loader_seed=7", SHUFFLED, "actor_rollout_ref.rollout.seed=42"], 7),
        ([f"{ACTOR}.fsdp_config.seed=7", DETERMINISTIC], 7),
        ([f"{ACTOR}.megatron.seed=7", MEGATRON], 7),
    ],
)
def test_a_seed_with_an_effect_is_the_run_s(line: list[str], seed: int) -> None:
    config, notes = load_config(["verl"], line)
    assert (config.trainer.seed, [note for note in notes if "seed" in note]) == (seed, [])


@pytest.mark.parametrize(
    "line",
    [
        [ROLLOUT, "data.seed=8"],
        [ROLLOUT, "trainer.seed=8"],
        [f"{ACTOR}.data_loader_seed=8", SHUFFLED, ROLLOUT],
        [f"{ACTOR}.fsdp_config.seed=8", DETERMINISTIC, "data.seed=7"],
        [f"{ACTOR}.megatron.seed=8", MEGATRON, "data.seed=7"],
    ],
)
def test_seeds_that_differ_are_refused(line: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"contradicts .*: a run has a single seed"):
        load_config(["verl"], line)


@pytest.mark.parametrize("key", [f"{ACTOR}.data_loader_seed", "critic.data_loader_seed", f"{ACTOR}.fsdp_config.seed"])
def test_a_seed_that_verl_does_not_use_is_noted(key: str) -> None:
    config, notes = load_config(["verl"], [f"{key}=7", "critic.shuffle=False"])
    assert config.trainer.seed == 0
    assert [note.partition(" has no effect")[0] for note in notes] == [key]
