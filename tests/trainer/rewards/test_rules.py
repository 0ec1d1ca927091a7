"""Rules on responses, and the settings that choose them."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.overrides import parse_overrides
from trainer.config.reward import RewardConfig
from trainer.data.answers import final_answer
from trainer.errors import ConfigError
from trainer.rewards.answer import Answer
from trainer.rewards.function import reward_function


def score(name: str, response: str, truth: str, pattern: str | None = None) -> float:
    return reward_function(RewardConfig(name=name, pattern=pattern))(Answer(response, truth))


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("5+4=9\n#### 9", "9", 1.0),
        ("#### 1,000", "1000", 1.0),
        ("#### -7", "-7", 1.0),
        ("#### 3 no, #### 4", "4", 1.0),
        ("#### 12", "1", 0.0),
        ("the answer is 9", "9", 0.0),
        ("####", "9", 0.0),
        ("", "9", 0.0),
    ],
)
def test_gsm8k(response: str, truth: str, expected: float) -> None:
    assert score("gsm8k", response, truth) == expected


@given(number=st.integers(-(10**9), 10**9), before=st.text())
def test_any_number_after_the_last_mark_is_found(number: int, before: str) -> None:
    assert score("gsm8k", f"{before}\n#### {number:,}", str(number)) == 1.0


@given(text=st.text())
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer = final_answer(text)
    assert answer is None or answer in text


def test_exact_match_ignores_space_at_the_ends_only() -> None:
    assert score("exact_match", " a b\n", "a b") == 1.0
    assert score("exact_match", "a  b", "a b") == 0.0


@pytest.mark.parametrize(
    ("pattern", "response", "expected"),
    [
        (r"\d+", "first 3, then 4", 1.0),
        (r"answer: (\d+)", "answer: 4, 5", 1.0),
        (r"answer: (\d+)", "answer: 4, answer: 5", 0.0),
        (r"(a)|4", "4", 0.0),
        (r"\d+", "none", 0.0),
    ],
)
def test_a_regular_expression_finds_the_answer(pattern: str, response: str, expected: float) -> None:
    assert score("regex", response, "4", pattern) == expected


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["reward.name=gsm"], "reward.name=gsm: expected exact_match | gsm8k | regex", "did you mean gsm8k?"),
        (["reward.name=regex"], "reward.name=regex needs reward.pattern", ""),
        (["reward.pattern=x"], "reward.pattern belongs to reward.name=regex, not to gsm8k", ""),
        (["reward.name=regex", "reward.pattern=("], "reward.pattern=(: expected regular expression", "Python's syntax"),
        (["trainer.loggers=[wand]"], "expected list of mlflow | wandb", "did you mean wandb?"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused(arguments: list[str], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(arguments)
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_a_parameter_survives_pickling_and_yaml() -> None:
    settings = RewardConfig(name="regex", pattern=r"\d+")
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert RewardConfig.model_validate_json(settings.model_dump_json()) == settings
