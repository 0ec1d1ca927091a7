"""Rules that score a response against the ground truth: 1.0 for right, 0.0 for wrong."""

import re
from collections.abc import Callable
from decimal import Decimal

from trainer.errors import ConfigError

Reward = Callable[[str, str], float]

# `#### 1,234.50`: what GSM8K writes before its final answer. A number's commas must group three digits.
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_FINAL_ANSWER = re.compile(rf"####[^\S\n]*\$?({_NUMBER})(?![\d,]*\d)", re.ASCII)
_WHOLE_NUMBER = re.compile(_NUMBER, re.ASCII)


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


_REWARDS: dict[str, Reward] = {"gsm8k": gsm8k, "exact_match": exact_match}


def reward_function(name: str) -> Reward:
    """The rule called `name`: (response, ground truth) -> score. Raises ConfigError for an unknown name."""
    if name not in _REWARDS:
        raise ConfigError(f"reward.name={name}: there is no such rule", hint=f"the rules are {', '.join(_REWARDS)}")
    return _REWARDS[name]
