"""verl's reward settings mean here what they mean there, or are refused."""

from pathlib import Path

import pytest

from trainer.compat.settings import load_config
from trainer.config.sections.reward import RewardConfig
from trainer.errors import ConfigError

DAPO = "reward_model.reward_manager=dapo"
BUFFER = "reward_model.overlong_buffer"
LATER = "reward.reward_kwargs.overlong_buffer_cfg"


def reward(*line: str) -> RewardConfig:
    return load_config([], line)[0].reward


@pytest.mark.parametrize("manager", ["naive", "dapo", "prime", "gdpo"])
@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward.reward_manager.name"])
def test_a_manager_scores_each_row_by_its_data_source(manager: str, key: str) -> None:
    scoring = reward(f"{key}={manager}")
    assert scoring.name == "auto"
    rule = scoring.rule_for("lighteval/MATH")
    assert rule is not None
    assert rule.name == "math"


def test_the_gdpo_manager_hands_a_function_no_name_of_the_experiment() -> None:
    line = ["reward.reward_manager.name=gdpo", "custom_reward_function.path=/mine.py"]
    assert load_config([], line)[1] == [
        "reward.reward_manager.name=gdpo: the function's extra_info has no experiment_name; "
        "give it as custom_reward_function.reward_kwargs.NAME=VALUE"
    ]


@pytest.mark.parametrize(
    ("line", "buffer"),
    [
        ([DAPO, f"{BUFFER}.enable=True", f"{BUFFER}.len=64", f"{BUFFER}.penalty_factor=0.5"], (64, 0.5)),
        ([DAPO, f"{BUFFER}.enable=False", f"{BUFFER}.len=64", f"{BUFFER}.penalty_factor=0.5"], (0, 1.0)),
        ([DAPO, f"{BUFFER}.len=64"], (0, 1.0)),
        ([f"{BUFFER}.enable=True", f"{BUFFER}.len=64"], (0, 1.0)),
        (["reward.reward_manager.name=dapo", f"+{LATER}.enable=True", f"+{LATER}.len=64"], (64, 1.0)),
    ],
)
def test_the_penalty_on_length_is_on_only_if_it_is_enabled(line: list[str], buffer: tuple[int, float]) -> None:
    scoring = reward("data.max_response_length=128", *line)
    assert (scoring.overlong_buffer, scoring.overlong_penalty) == buffer


@pytest.mark.parametrize("buffer", [BUFFER, LATER])
def test_dapo_s_recipe_has_no_penalty_until_its_factor_is_given(buffer: str) -> None:
    line = [f"{buffer}.enable=True", f"{buffer}.len=64"]
    assert load_config(["verl_dapo"], line)[0].reward.overlong_penalty == 0
    assert load_config(["verl_dapo"], [*line, f"{buffer}.penalty_factor=1.0"])[0].reward.overlong_penalty == 1


@pytest.mark.parametrize("length", [[], [f"{BUFFER}.len=0"]])
def test_an_enabled_penalty_on_length_needs_its_buffer(length: list[str]) -> None:
    with pytest.raises(ConfigError, match="enable=True needs a buffer") as caught:
        reward(DAPO, f"{BUFFER}.enable=True", *length)
    assert caught.value.hint == f"set {BUFFER}.len to a number of tokens above 0"


def test_a_penalty_that_the_manager_does_not_read_is_noted() -> None:
    _, notes = load_config([], [f"{BUFFER}.enable=True"])
    assert notes == [f"{BUFFER}.enable has no effect: only the reward manager dapo reads it"]


def test_the_penalty_is_measured_from_the_longest_response() -> None:
    line = [DAPO, f"{LATER}.enable=True", f"{LATER}.len=64", "data.max_response_length=128"]
    assert reward(*line, "reward.reward_kwargs.max_resp_len=128").overlong_buffer == 64
    with pytest.raises(ConfigError, match=r"max_resp_len=256 differs from data.max_response_length=128"):
        reward(*line, "reward.reward_kwargs.max_resp_len=256")


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_function_keeps_its_arguments(section: str) -> None:
    line = ["path=/mine.py", "name=judge", "+reward_kwargs.scale=1e-2", "+reward_kwargs.mode=strict"]
    scoring = reward(*(f"{'+' if part[0] == '+' else ''}{section}.{part.removeprefix('+')}" for part in line))
    assert (str(scoring.custom_function.path), scoring.custom_function.name) == ("/mine.py", "judge")
    assert scoring.custom_function.kwargs == {"scale": 0.01, "mode": "strict"}


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_function_may_take_as_long_as_in_verl(section: str) -> None:
    path = f"{section}.path=/mine.py"
    assert reward(path).timeout == 3600
    assert reward(path, "reward.timeout=5").timeout == 5
    assert reward(f"{section}.path=null").timeout == reward().timeout == 10


@pytest.mark.parametrize(
    ("line", "most", "score"),
    [
        ([], (0.0, 0.5), None),  # the first that raises ends the run; an environment of ours that fails does not
        (["reward_model.reward_manager=prime"], (1.0, 0.5), 0.0),
        (["rollout.max_failed_share=0.25"], (None, 0.25), None),
        (["reward.failure_score=0.0"], (None, 0.5), 0.0),
    ],
)
def test_a_function_that_raises_does_what_it_does_in_verl_unless_a_setting_says_otherwise(
    line: list[str], most: tuple[float | None, float], score: float | None
) -> None:
    config, _ = load_config([], ["custom_reward_function.path=/mine.py", *line])
    assert (config.reward.max_failed_share, config.rollout.max_failed_share) == most
    assert config.reward.failure_score == score


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_the_name_of_a_function_counts_only_with_its_file(section: str) -> None:
    config, notes = load_config([], [f"{section}.path=null", f"{section}.name=compute_score"])
    assert (config.reward.custom_function.path, notes) == (None, [])
    _, notes = load_config([], [f"{section}.name=judge"])
    assert notes == [f"{section}.name has no effect: {section}.path is not given"]


def test_the_batch_manager_calls_the_function_once_with_its_arguments() -> None:
    line = ["reward_model.reward_manager=batch", "reward_model.reward_kwargs.bonus=2"]
    scoring = reward("custom_reward_function.path=/mine.py", *line)
    assert (scoring.custom_function.batched, scoring.custom_function.kwargs) == (True, {"bonus": 2})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["reward_model.reward_manager=batch"], "needs a reward function for whole batches"),
        (["reward_model.reward_manager=elliptical"], "reward_manager=elliptical is not supported here"),
        (["reward_model.reward_kwargs.anything=1"], "the reward manager naive has no such argument"),
        (["reward_model.enable=True", "custom_reward_function.path=/mine.py"], "cannot ask the reward model here"),
    ],
)
def test_what_would_change_the_reward_is_refused(line: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], line)
    assert words in str(caught.value)


def test_programs_run_on_verl_s_sandbox_server() -> None:
    line = ["reward_model.sandbox_fusion.url=http://box/run_code", "reward_model.sandbox_fusion.memory_limit_mb=512"]
    config, notes = load_config([], line)
    reward = config.reward
    assert (reward.code_sandbox_url, reward.code_memory_mb, reward.code_seconds) == ("http://box/run_code", 512, 10.0)
    assert not notes
    _, notes = load_config([], [*line, "custom_reward_function.path=/mine.py"])
    assert any("custom_reward_function.path scores" in note for note in notes)


def test_an_enabled_reward_model_replaces_the_rule() -> None:
    line = ["reward_model.model.path=judge", "reward_model.max_length=512", "reward_model.model.input_tokenizer=null"]
    on = load_config([], ["reward_model.enable=True", *line])[0].reward
    assert (on.model.path, on.model.max_length, on.model.input, on.weight) == (
        Path("judge").absolute(),
        512,
        "tokens",
        0,
    )
    off = load_config([], ["reward_model.enable=False", *line])[0].reward
    assert (off.model.path, off.weight) == (None, 1)
