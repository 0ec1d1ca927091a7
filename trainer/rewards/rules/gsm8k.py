"""The number after the last `####` must equal the ground truth."""

import re
from decimal import Decimal
from typing import Literal

from trainer.data.answers import NUMBER, final_answer, last_number
from trainer.rewards.truth import as_text
from trainer.rows import Parameter, RewardRule

_WHOLE_NUMBER = re.compile(NUMBER)


def gsm8k(response: str, ground_truth: object, gsm8k_method: str = "strict") -> float:
    """1.0 if the answer equals the ground truth; `1,000`, `+1000`, `$1000` and `1000.0` are equal."""
    answer = _answer(response, gsm8k_method)
    truth = as_text(ground_truth).strip().replace("$", "")
    if answer is None:
        return 0.0
    if _WHOLE_NUMBER.fullmatch(truth) is None:
        return float(answer == truth)
    return float(_value(answer) == _value(truth))


def _answer(response: str, gsm8k_method: str) -> str | None:
    return final_answer(response) if gsm8k_method == "strict" else last_number(response)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))


ROW = RewardRule(
    name="gsm8k",
    score=gsm8k,
    answer=_answer,
    sources=("openai/gsm8k", "slipway/arithmetic"),
    parameters={
        "gsm8k_method": Parameter(
            type=Literal["strict", "flexible"],
            default="strict",
            description="strict: the answer is the number after the last `####`; flexible: the last number",
        )
    },
)
