"""Which rule scores which data source."""

from pathlib import Path

import pytest

from trainer.config.tree import Config
from trainer.errors import ConfigError, RewardError
from trainer.rewards.answer import Answer
from trainer.rewards.function import reward_function
from trainer.rewards.sources import check_sources, source_lines

TRAIN, TEST = Path("/data/train.parquet"), Path("/data/test.parquet")


def config(**reward: object) -> Config:
    return Config.model_validate({"model": {"path": "/nowhere"}, "reward": reward})


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("slipway/arithmetic", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("numina_olympiads", "math"),
        ("math_dapo", "dapo"),
        ("aime2025", "dapo"),
        ("searchR1_nq", "qa_em"),
        ("hiyouga/geometry3k", None),
        ("", None),
    ],
)
def test_a_known_source_has_its_rule(source: str, rule: str | None) -> None:
    match = config().reward.rule_for(source)
    assert (match.name if match else None) == rule


def test_the_user_s_own_sources_come_first_and_may_be_patterns() -> None:
    reward = config(sources={"aime2025": "math", "exam_*": "multiple_choice"}).reward
    rules = [reward.rule_for(source) for source in ("aime2025", "aime2024", "exam_7", "mine")]
    assert [rule.name if rule else None for rule in rules] == ["math", "dapo", "multiple_choice", None]


def test_rows_of_different_sources_are_scored_by_different_rules() -> None:
    reward = reward_function(config().reward)
    assert reward(Answer("#### 3", "3", "openai/gsm8k"))["score"] == 1.0
    assert reward(Answer("#### 3", "3", "math_dapo"))["score"] == -1.0


def test_a_source_that_no_rule_knows_is_refused_with_file_and_count() -> None:
    counts = {(TRAIN, "openai/gsm8k"): 10, (TRAIN, "mine"): 3, (TEST, "mine"): 1}
    with pytest.raises(ConfigError) as caught:
        check_sources(config(), counts)
    assert str(caught.value) == (
        "no reward rule knows these data sources: /data/train.parquet: 'mine' (3 prompts); "
        "/data/test.parquet: 'mine' (1 prompts)"
    )
    assert "reward.sources={SOURCE: RULE}" in caught.value.hint
    with pytest.raises(RewardError, match="no reward rule knows the data source 'mine'"):
        reward_function(config().reward)(Answer("#### 3", "3", "mine"))


@pytest.mark.parametrize(
    "reward",
    [
        {"name": "gsm8k"},
        {"sources": {"mine": "gsm8k"}},
        {"custom_function": {"path": Path(__file__).with_name("own_reward.py")}},
        {"weight": 0, "model": {"path": "/judge"}},
    ],
)
def test_any_source_is_accepted_where_something_else_scores_it(reward: dict[str, object]) -> None:
    assert check_sources(config(**reward), {(TRAIN, "mine"): 3}) == []


@pytest.mark.parametrize(
    "rollout",
    [
        {"environment": {"path": "/mine.py", "name": "Game"}},
        {"agent": "program", "program": {"command": ["agent"]}},
    ],
)
def test_a_run_whose_conversations_score_themselves_says_what_becomes_of_the_others(rollout: dict[str, object]) -> None:
    config = Config.model_validate({"model": {"path": "/nowhere"}, "rollout": rollout})
    (note,) = check_sources(config, {(TRAIN, "mine"): 3, (TEST, "mine"): 1, (TEST, "openai/gsm8k"): 5})
    assert note == (
        "no reward rule knows these data sources: /data/train.parquet: 'mine' (3 prompts); /data/test.parquet: 'mine' "
        "(1 prompts): a conversation that ends without a score of its own, like one cut at data.max_response_length, "
        "scores 0"
    )
    assert check_sources(config, {(TEST, "openai/gsm8k"): 5}) == []


def test_a_run_says_what_scores_each_source() -> None:
    counts = {(TRAIN, "math_dapo"): 2, (TEST, "openai/gsm8k"): 5}
    assert source_lines(config(), counts) == [
        "/data/test.parquet: 5 prompts of 'openai/gsm8k', scored by gsm8k",
        "/data/train.parquet: 2 prompts of 'math_dapo', scored by dapo",
    ]
    assert source_lines(config(custom_function={"path": "/mine.py"}), {(TRAIN, "x"): 2}) == [
        "/data/train.parquet: 2 prompts of 'x', scored by mine.py:compute_score"
    ]
