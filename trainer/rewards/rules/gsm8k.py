"""The number after the last `####` must equal the ground truth."""

from fractions import Fraction
from typing import Literal

from trainer.data.answers import final_answer, final_lines, last_number, only_number
from trainer.rewards.truth import as_text
from trainer.rows import Parameter, RewardRule


def gsm8k(response: str, ground_truth: object, gsm8k_method: str = "strict") -> float:
    """1.0 if the answer equals the ground truth; `1,000`, `$1000.00` and `1e3` are equal, and `50%` to `50` and `0.5`.

    A truth that is no number must be spelt alike.
    """
    truth = as_text(ground_truth).strip()
    number = only_number(truth)
    if number is None:
        return float(truth in final_lines(response))
    answer = _answer(response, gsm8k_method)
    return float(answer is not None and bool(_values(answer) & _values(number)))


def _answer(response: str, gsm8k_method: str) -> str | None:
    return final_answer(response) if gsm8k_method == "strict" else last_number(response)


def _values(number: str) -> set[Fraction]:
    """The value of a number, and that of its digits alone if it is a percentage."""
    value = Fraction(number.removesuffix("%"))
    return {value, value / 100} if number.endswith("%") else {value}


ROW = RewardRule(
    name="gsm8k",
    score=gsm8k,
    answer=_answer,
    sources=("openai/gsm8k", "slipway/arithmetic", "slipway/synthetic-gsm8k"),
    parameters={
        "gsm8k_method": Parameter(
            type=Literal["strict", "flexible"],
            default="strict",
            description="strict: the answer is the number after the last `####`; flexible: the last number",
        )
    },
)
