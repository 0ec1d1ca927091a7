"""What a reward function may return."""

import pytest

from trainer.config.tree import Config
from trainer.errors import RewardError
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.scores import as_scored, weighted_sums

ANSWER = Answer("a b c", "x", sampled_ids=(5, 6, 7))


def test_a_mapping_holds_the_score_and_numbers_to_log() -> None:
    scored = as_scored({"score": 1, "acc": True, "format": 0.5, "pred": "text", "ratio": float("inf")}, ANSWER)
    assert (scored.value, scored.info) == (1.0, {"acc": 1.0, "format": 0.5})


@pytest.mark.parametrize("given", [[0.5, 0, -0.25], [(0, 0.5), (2, -0.25)], [[2, -0.25], [0, 0.5]]])
def test_rewards_of_tokens_are_added_to_the_score(given: list[object]) -> None:
    scored = as_scored({"score": 1.0, "token_rewards": given}, ANSWER)
    assert (scored.value, sorted(scored.by_token)) == (1.25, [(0, 0.5), (2, -0.25)])
    assert as_scored({"token_rewards": given}, ANSWER).value == 0.25


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned None"),
        ("1.0", "returned '1.0'"),
        ({"acc": 1.0}, "returned {'acc': 1.0}"),
        ({"score": float("nan")}, "returned nan"),
        (1e39, "returned 1e+39"),
        (-1e19, "returned -1e+19"),
        ({"token_rewards": [6e17, 6e17, 0.0]}, "returned 1.2e+18"),
        ({"token_rewards": [1.0, 2.0]}, "2 token_rewards for 3 tokens"),
        ({"token_rewards": [(3, 1.0)]}, "a reward at token 3 of 3"),
        ({"token_rewards": [(0, float("nan"))]}, "returned nan"),
        ({"token_rewards": [(0.5, 1.0)]}, "token_rewards that hold (0.5, 1.0)"),
    ],
)
def test_anything_but_finite_numbers_is_refused(returned: object, words: str) -> None:
    with pytest.raises(RewardError) as caught:
        as_scored(returned, ANSWER)
    assert words in str(caught.value)


def test_a_weight_applies_to_rewards_of_tokens_too() -> None:
    reward = {"weight": 2.0, "model": {"path": "/judge", "weight": 10.0}}
    settings = Config.model_validate({"model": {"path": "/nowhere"}, "reward": reward}).reward
    (total,) = weighted_sums([Scored(1.5, by_token=((0, 0.5),))], [0.1], settings)
    assert (total.value, total.by_token) == (4.0, ((0, 1.0),))
