"""The function that scores a response: a rule or the user's own; and its weighted sum with a reward model."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from trainer.config.custom_code import load_custom
from trainer.config.reward import RewardConfig
from trainer.errors import RewardError
from trainer.rewards.answer import Answer, Scored
from trainer.rows import RewardRule, find_rows

RULES = find_rows("trainer.rewards.rules", RewardRule)
_SHOWN = 200  # characters of a response in an error

Reward = Callable[[Answer], Any]


def needs_processes(settings: RewardConfig) -> bool:
    """Whether the reward may hang or die, and therefore runs in processes of its own."""
    return settings.custom_function.path is not None or RULES[settings.name].may_hang


def reward_function(settings: RewardConfig) -> Reward:
    """The user's function if there is one, otherwise the rule `reward.name`.

    The user's function is called as verl does: (data_source, solution_str, ground_truth, extra_info), by name. Raises
    ConfigError if it cannot be loaded.
    """
    custom = settings.custom_function
    if custom.path is not None:
        function = load_custom("reward.custom_function", custom.path, custom.name or "compute_score")
        return lambda answer: function(
            data_source=answer.data_source,
            solution_str=answer.response,
            ground_truth=answer.ground_truth,
            extra_info=dict(answer.extra_info),
        )
    rule = RULES[settings.name]
    parameters = {name: getattr(settings, name) for name in rule.parameters}
    return lambda answer: rule.score(answer.response, answer.ground_truth, **parameters)


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
        Scored(
            settings.weight * scored.value + settings.model.weight * number,
            scored.failure,
            {"rule": scored.value, "model": number},
        )
        for scored, number in zip(by_rule, by_reward_model, strict=True)
    ]


def as_score(returned: Any, answer: Answer) -> float:
    """The number that a reward function returned, or that its mapping holds under `score`.

    Raises RewardError if it is not a finite number, because such a reward would reach every weight of the policy.
    """
    value = returned.get("score") if isinstance(returned, Mapping) else returned
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(
        f"the reward function returned {value!r} for the response {answer.response[:_SHOWN]!r} "
        f"(ground truth {answer.ground_truth!r}, data source {answer.data_source!r})",
        hint="return a finite number, or raise an error for a response that cannot be scored",
    )
