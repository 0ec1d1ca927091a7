from pathlib import Path

import pytest

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.overrides import parse_overrides, settings


def test_values_get_the_types_of_their_fields() -> None:
    arguments = ["data.train_files=[a.parquet,b.parquet]", "actor.learning_rate=1e-6", "trainer.stop_at=0.5"]
    config: Config = parse_overrides([*arguments, "data.shuffle=false", "trainer.nnodes=null"])
    assert config.data.train_files == [Path("a.parquet"), Path("b.parquet")]
    assert config.actor.learning_rate == 1e-6
    assert config.trainer.stop_at == 0.5
    assert config.data.shuffle is False
    assert config.trainer.nnodes is None


def test_the_last_of_two_counts_and_values_may_hold_equals_signs() -> None:
    config: Config = parse_overrides(["trainer.run_id=a", "trainer.run_id=b=c"])
    assert config.trainer.run_id == "b=c"


@pytest.mark.parametrize(
    ("argument", "words", "hint"),
    [
        ("actor.learning_rte=1", "actor.learning_rte", "actor.learning_rate"),
        ("critic.clip_ratio=1", "critic.clip_ratio", "actor.clip_ratio"),
        ("actor=1", "actor", "actor is a section"),
        ("--seed=1", "--seed", "trainer.seed"),
        ("trainer.total_steps", "KEY=VALUE", "trainer.total_steps"),
        ("trainer.total_steps=many", "trainer.total_steps=many: expected integer > 0", ""),
        ("trainer.total_steps=0", "trainer.total_steps=0: expected integer > 0", ""),
        ("model.dtype=int8", "expected float32 | bfloat16", ""),
    ],
)
def test_a_bad_override_is_named_with_the_nearest_match(argument: str, words: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([argument])
    assert words in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_every_setting_has_a_default_and_a_type_in_words() -> None:
    known = {setting.key: setting for setting in settings(Config)}
    assert known["trainer.seed"].default == 0
    assert all(setting.expected for setting in known.values())
