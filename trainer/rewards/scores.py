"""Scores from what reward functions return, and their weighted sum with those of a reward model."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from trainer.config.sections.reward import RewardConfig
from trainer.errors import RewardError
from trainer.rewards.answer import Answer, Cause, Scored

_SHOWN = 200  # characters of a response in an error
_LARGEST = 1e18  # of a reward; losses hold its square in float32


def failed_score(settings: RewardConfig, cause: Cause, reason: str, traceback: str = "") -> Scored:
    """The score of a response that failed; it learns only with `reward.failure_score`."""
    return Scored(settings.failure_score or 0.0, reason, traceback=traceback, cause=cause)


def as_scored(returned: Any, answer: Answer) -> Scored:
    """The score from what a reward function returned: a number, or a mapping with one under `score`.

    The mapping's `pred` is the answer in the response, for majority votes. Its other numbers are logged. Its
    `token_rewards` are earned at certain tokens of the response, in addition to `score` at the last one (0 if left
    out): one number per token, or pairs (position, reward). Raises RewardError for anything but finite numbers up to
    1e18, because such a reward would reach every weight of the policy.
    """
    if not isinstance(returned, Mapping):
        return Scored(_finite(returned, returned, answer))
    by_token = _by_token(returned.get("token_rewards", ()), answer)
    outcome = _finite(returned.get("score", 0.0 if by_token else None), returned, answer)
    info = {
        str(name): float(value)
        for name, value in returned.items()
        if name not in ("score", "token_rewards", "pred") and is_finite(value)
    }
    pred = returned.get("pred")
    if isinstance(pred, int):
        pred = _shown(pred)
    value = _finite(outcome + sum(reward for _, reward in by_token), returned, answer)
    return Scored(value, info=info, by_token=by_token, pred=None if pred is None else str(pred))


def is_finite(value: Any) -> bool:
    """Whether the value is a number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def _by_token(given: Any, answer: Answer) -> tuple[tuple[int, float], ...]:
    """(position, reward) for each token with a reward other than 0. Raises RewardError."""
    if not isinstance(given, Iterable):
        raise _unusable(f"token_rewards of type {type(given).__name__}", answer)
    pairs, count = list(given), len(answer.sampled_ids)
    if not any(isinstance(pair, Sequence) for pair in pairs):
        if pairs and len(pairs) != count:
            raise _unusable(f"{len(pairs)} token_rewards for {count} tokens", answer)
        pairs = list(enumerate(pairs))
    rewards: list[tuple[int, float]] = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], int):
            raise _unusable(f"token_rewards that hold {_shown(pair)}", answer)
        if not 0 <= pair[0] < count:
            raise _unusable(f"a reward at token {_shown(pair[0])} of {count}", answer)
        rewards.append((pair[0], _finite(pair[1], pair, answer)))
    return tuple(pair for pair in rewards if pair[1] != 0.0)


def _finite(value: Any, returned: Any, answer: Answer) -> float:
    if is_finite(value) and abs(value) <= _LARGEST:
        return float(value)
    raise _unusable(_shown(returned if isinstance(returned, Mapping) and value is None else value), answer)


def _shown(value: Any) -> str:
    """The value in an error; Python refuses to write integers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return f"a {type(value).__name__} with a number of thousands of digits"


def _unusable(value: str, answer: Answer) -> RewardError:
    return RewardError(
        f"the reward function returned {value} for the response {answer.response[:_SHOWN]!r} "
        f"(ground truth {answer.ground_truth!r}, data source {answer.data_source!r})",
        hint="return a finite number up to 1e18, a mapping with one under `score`, or token_rewards: one number per "
        "token or pairs (position, reward); raise an error for a response that cannot be scored",
    )


def weighted_sums(by_rule: Sequence[Scored], by_reward_model: Sequence[float], settings: RewardConfig) -> list[Scored]:
    """`reward.weight` times the rule's score plus `reward.model.weight` times the model's, for each response.

    Raises RewardError if a score of the reward model is not finite.
    """
    for number in by_reward_model:
        if not math.isfinite(number):
            raise RewardError(
                f"the reward model {settings.model.path} returned {number}",
                hint="set reward.model.dtype=float32, or check that its weights are complete",
            )
    return [
        replace(
            scored,
            value=settings.weight * scored.value + settings.model.weight * number,
            parts={"rule": scored.value, "model": number},
            by_token=tuple((place, settings.weight * reward) for place, reward in scored.by_token),
        )
        for scored, number in zip(by_rule, by_reward_model, strict=True)
    ]
