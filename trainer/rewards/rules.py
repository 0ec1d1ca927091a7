"""Rules that score a response against the ground truth: 1.0 for right, 0.0 for wrong; and the user's own."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from trainer.config.custom_code import load_custom
from trainer.config.tree import RewardConfig
from trainer.errors import ConfigError, RewardError

Rule = Callable[[str, str], float]


@dataclass(frozen=True)
class Answer:
    """A response with what it is scored by; tokens and messages (of the prompt) are for a reward model only."""

    response: str
    ground_truth: str
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Scored:
    """The reward of a response; `failure` says why there was none to be had, in which case `value` is a stand-in.

    With a reward model, `parts` are the scores that `value` is made of.
    """

    value: float
    failure: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def rule(self) -> float:
        """What the rule or the user's function says."""
        return self.parts.get("rule", self.value)


@dataclass(frozen=True)
class Reply:
    """What a reward process says: a score, why this answer has none, or why the run cannot go on (message, hint)."""

    score: float = 0.0
    failure: str = ""
    refusal: tuple[str, str] | None = None


Reward = Callable[[Answer], Any]

# `#### 1,234.50`: what GSM8K writes before its final answer. A number's commas must group three digits.
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_FINAL_ANSWER = re.compile(rf"####[^\S\n]*\$?({_NUMBER})(?![\d,]*\d)", re.ASCII)
_WHOLE_NUMBER = re.compile(_NUMBER, re.ASCII)
_SHOWN = 200  # characters of a response in an error


def final_answer(response: str) -> str | None:
    """The number after the last `####` of a response as it is written there, None if no number follows one."""
    found = _FINAL_ANSWER.findall(response)
    return found[-1] if found else None


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def gsm8k(response: str, ground_truth: str) -> float:
    """1.0 if the number after the last `####` equals the ground truth; `1,000`, `+1000` and `1000.0` are equal."""
    answer, truth = final_answer(response), ground_truth.strip()
    if answer is None:
        return 0.0
    if _WHOLE_NUMBER.fullmatch(truth) is None:
        return float(answer == truth)
    return float(_value(answer) == _value(truth))


def exact_match(response: str, ground_truth: str) -> float:
    """1.0 if the response is the ground truth, white space at the ends aside."""
    return float(response.strip() == ground_truth.strip())


def last_match(pattern: re.Pattern[str], response: str, ground_truth: str) -> float:
    """1.0 if the last match of the pattern, or of its first group if it has one, is the ground truth."""
    found = [match.group(1 if pattern.groups else 0) for match in pattern.finditer(response)]
    return float(bool(found) and found[-1] is not None and found[-1].strip() == ground_truth.strip())


_RULES: dict[str, Rule] = {"gsm8k": gsm8k, "exact_match": exact_match}


def needs_processes(settings: RewardConfig) -> bool:
    """Whether the reward may hang or die, and so runs in processes of its own."""
    return settings.custom_function.path is not None or settings.name == "regex"


def reward_function(settings: RewardConfig) -> Reward:
    """What scores an answer: the user's function, or the rule of that name. Raises ConfigError if there is none.

    The user's function is called as verl calls one: (data_source, solution_str, ground_truth, extra_info), by name.
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
    if settings.name == "regex":
        try:
            pattern = re.compile(settings.pattern or "")
        except re.error as error:
            raise ConfigError(
                f"reward.pattern={settings.pattern}: {error}", hint="its syntax is Python's re"
            ) from error
        return lambda answer: last_match(pattern, answer.response, answer.ground_truth)
    rule = _RULES[settings.name]
    return lambda answer: rule(answer.response, answer.ground_truth)


def combined(ruled: Sequence[Scored], modelled: Sequence[float], settings: RewardConfig) -> list[Scored]:
    """The weighted sums of what the rule and the reward model say. Raises RewardError if one is no finite number."""
    for number in modelled:
        if not math.isfinite(number):
            raise RewardError(
                f"the reward model {settings.model.path} returned {number}",
                hint="set reward.model.dtype=float32, or look whether its weights are whole",
            )
    return [
        Scored(
            settings.weight * scored.value + settings.model.weight * number,
            scored.failure,
            {"rule": scored.value, "model": number},
        )
        for scored, number in zip(ruled, modelled, strict=True)
    ]


def as_score(returned: Any, answer: Answer) -> float:
    """The number that a reward function returned, also under `score` in a mapping.

    Raises RewardError if it is no finite number: as a reward it would spread to every weight of the policy.
    """
    value = returned.get("score") if isinstance(returned, Mapping) else returned
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(
        f"the reward function returned {value!r} for the response {answer.response[:_SHOWN]!r} "
        f"(ground truth {answer.ground_truth!r}, data source {answer.data_source!r})",
        hint="let it return a finite number, or raise an error for a response that it cannot score",
    )
