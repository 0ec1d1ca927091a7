"""DAPO's rule (Yu et al. 2025, arXiv:2503.14476): 1 for a right `Answer: ...`, -1 for anything else."""

import re
from decimal import Decimal

from trainer.data.latex import last_boxed
from trainer.rewards.minerva import minerva_normalized
from trainer.rewards.truth import as_text
from trainer.rows import RewardRule

_ANSWER = re.compile(r"answer[*_]*\s*:[*_]*\s*([^\n]+)", re.IGNORECASE)
_MARKUP = re.compile(r"\*\*|__|`|\\[()\[\]]|\\?%|\.\s*$")
_NUMBER = re.compile(r"[-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_END = 300  # characters at the end of a response in which its answer must stand
_BOX_END = 100  # the same for a boxed answer


def dapo(response: str, ground_truth: object) -> dict[str, float]:
    """The score 1.0 or -1.0, and `acc` 1.0 or 0.0.

    The answer follows the last `Answer:`. Without one it is the last boxed answer, which must be spelt like the truth.
    """
    truth, end = as_text(ground_truth), response[-_END:]
    stated = _ANSWER.findall(end)
    if stated:
        right = _value(_normalized(stated[-1])) == _value(_normalized(truth))
    else:
        right = (last_boxed(end[-_BOX_END:]) or "").strip() == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _normalized(answer: str) -> str:
    return minerva_normalized(_MARKUP.sub("", answer))


def _value(answer: str) -> str | Decimal:
    """The value of a number; any other answer as it is."""
    return Decimal(answer) if _NUMBER.fullmatch(answer) else answer


def _answer(response: str) -> str | None:
    stated = _ANSWER.findall(response[-_END:])
    return _normalized(stated[-1]) if stated else last_boxed(response[-_BOX_END:])


ROW = RewardRule(
    name="dapo",
    score=dapo,
    answer=_answer,
    sources=("math_dapo", "math", "math_dapo_reasoning", "aime*", "slipway/synthetic-dapo"),
)
