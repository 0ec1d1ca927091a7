"""verl's keys for data, logging and samples."""

import pytest

from trainer.compat.settings import load_config
from trainer.config.tree import Config
from trainer.errors import ConfigError


def load(*overrides: str) -> Config:
    return load_config(["verl"], list(overrides))[0]


def test_loggers_that_always_record_are_left_out() -> None:
    assert load("trainer.logger=[console,wandb,swanlab,mlflow,trackio,tensorboard,file]").trainer.loggers == [
        "wandb",
        "swanlab",
        "mlflow",
        "trackio",
    ]
    assert load("trainer.logger=console").trainer.loggers == []


@pytest.mark.parametrize("name", ["clearml", "vemlp_wandb", "wand"])
def test_another_logger_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"trainer.logger=[console,{name}]")
    assert str(caught.value) == f"trainer.logger={name} is not supported here"
    assert caught.value.hint == "supported: console, tensorboard, file, mlflow, swanlab, trackio, wandb"


def test_the_rows_and_their_order_are_chosen_as_in_verl() -> None:
    config = load("data.train_max_samples=1000", "data.val_max_samples=50", "data.shuffle=False", "data.seed=7")
    assert (config.data.train_max_samples, config.data.validation_max_samples) == (1000, 50)
    assert (config.data.shuffle, config.trainer.seed) == (False, 7)
    every = load("data.train_max_samples=-1", "data.val_max_samples=-1", "data.seed=null")
    assert (every.data.train_max_samples, every.data.validation_max_samples) == (-1, -1)


def test_your_own_dataset_class_chooses_its_rows() -> None:
    with pytest.raises(ConfigError, match=r"data.custom_cls reads the files itself"):
        load("data.custom_cls.path=mine.py", "data.train_max_samples=5")


def test_responses_are_recorded_where_verl_would() -> None:
    directories = ["trainer.rollout_data_dir=/tmp/rollouts", "trainer.validation_data_dir=/tmp/held"]
    config, notes = load_config(["verl"], [*directories, "trainer.log_val_generations=10"])
    recorded = config.trainer.trajectories
    assert (str(recorded.dir), str(recorded.validation_dir)) == ("/tmp/rollouts", "/tmp/held")
    assert [note for note in notes if "log_val_generations" in note]
    assert load("trainer.rollout_data_dir=null").trainer.trajectories.dir is None
