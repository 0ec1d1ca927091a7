"""verl's keys of the algorithm: which groups are sampled again, and the KL in the reward."""

import pytest

from trainer.compat.settings import load_config
from trainer.errors import ConfigError

ON = ["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
METRIC = "algorithm.filter_groups.metric"
FUNCTION = "custom_reward_function.path=/mine.py"
OVERLONG = ["reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=True"]
OVERLONG += ["reward_model.overlong_buffer.len=16", "reward_model.overlong_buffer.penalty_factor=1.0"]


@pytest.mark.parametrize(
    "line",
    [
        [],
        [f"{METRIC}=acc"],
        [f"{METRIC}=score"],
        [f"{METRIC}=null"],
        [f"{METRIC}=reward"],
        [f"{METRIC}=seq_reward"],
        [f"{METRIC}=seq_final_reward"],
        [f"{METRIC}=score", FUNCTION],
        [f"{METRIC}=acc", *OVERLONG],
    ],
)
def test_groups_that_verl_compares_by_what_equals_the_score_are_compared_by_score(line: list[str]) -> None:
    config, notes = load_config(["verl"], [*ON, *line])
    assert config.algorithm.dynamic_sampling
    assert [note for note in notes if "filter_groups" in note] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([f"{METRIC}=response_filter"], "metric=response_filter is not supported here"),
        ([f"{METRIC}=acc", FUNCTION], "its acc may differ from its score"),
        ([f"{METRIC}=acc", "reward_model.enable=True", "reward_model.model.path=/judge"], "the reward model alone"),
        ([f"{METRIC}=reward", *OVERLONG], "without the penalty on long responses"),
        (OVERLONG, "metric=reward: groups are compared"),
        ([f"{METRIC}=seq_reward", "reward.overlong_buffer=16"], "without the penalty on long responses"),
        ([f"{METRIC}=seq_final_reward", "algorithm.use_kl_in_reward=True"], "without the KL"),
        ([f"{METRIC}=seq_final_reward", "algorithm.kl_coefficient=0.1"], "without the KL"),
    ],
)
def test_groups_that_verl_compares_by_something_else_are_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(["verl"], [*ON, *line])


def test_the_metric_of_groups_counts_only_if_groups_are_filtered() -> None:
    config, notes = load_config(["verl"], [f"{METRIC}=response_filter"])
    assert not config.algorithm.dynamic_sampling
    assert notes == [f"{METRIC} has no effect: algorithm.filter_groups.enable is not true"]


@pytest.mark.parametrize("preset", ["verl", "verl_dapo"])
def test_verl_samples_without_a_limit_until_the_batch_is_full(preset: str) -> None:
    assert load_config([preset], ON)[0].algorithm.max_sampling_rounds is None


def test_the_kind_of_kl_control_counts_only_with_a_kl_in_the_reward() -> None:
    line = ["algorithm.kl_ctrl.type=adaptive"]
    config, notes = load_config(["verl"], line)
    assert config.algorithm.kl_control == "fixed"
    assert notes == ["algorithm.kl_ctrl.type has no effect: algorithm.use_kl_in_reward is not true"]
    config, notes = load_config(["verl"], [*line, "algorithm.use_kl_in_reward=True"])
    assert (config.algorithm.kl_control, notes) == ("adaptive", [])
    with pytest.raises(ConfigError, match=r"kl_ctrl\.type=other is not supported"):
        load_config(["verl"], ["algorithm.kl_ctrl.type=other", "algorithm.use_kl_in_reward=True"])
