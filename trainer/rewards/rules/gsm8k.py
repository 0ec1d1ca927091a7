"""The number after the last `####` must equal the ground truth."""

import re
from decimal import Decimal

from trainer.data.answers import NUMBER, final_answer
from trainer.rows import RewardRule

_WHOLE_NUMBER = re.compile(NUMBER, re.ASCII)


def gsm8k(response: str, ground_truth: str) -> float:
    """1.0 if the number after the last `####` equals the ground truth; `1,000`, `+1000` and `1000.0` are equal."""
    answer, truth = final_answer(response), ground_truth.strip()
    if answer is None:
        return 0.0
    if _WHOLE_NUMBER.fullmatch(truth) is None:
        return float(answer == truth)
    return float(_value(answer) == _value(truth))


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


ROW = RewardRule(name="gsm8k", score=gsm8k)
