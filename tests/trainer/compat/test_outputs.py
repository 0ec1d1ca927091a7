"""verl's keys for data, logging and samples."""

import pytest

from trainer.config.overrides import load_config
from trainer.config.tree import Config
from trainer.errors import ConfigError


def load(*overrides: str) -> Config:
    return load_config(["verl"], list(overrides))[0]


def test_loggers_that_always_record_are_left_out() -> None:
    assert load("trainer.logger=[console,wandb,swanlab,mlflow,tensorboard,file]").trainer.loggers == [
        "wandb",
        "swanlab",
        "mlflow",
    ]
    assert load("trainer.logger=console").trainer.loggers == []


@pytest.mark.parametrize("name", ["clearml", "trackio", "vemlp_wandb", "wand"])
def test_another_logger_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"trainer.logger=[console,{name}]")
    assert str(caught.value) == f"trainer.logger={name} is not supported here"
    assert caught.value.hint == "supported: console, tensorboard, file, mlflow, swanlab, wandb"
