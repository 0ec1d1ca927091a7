"""The chosen letter must equal the ground truth."""

import re
import string

from trainer.data.latex import last_boxed
from trainer.rewards.truth import as_text
from trainer.rows import RewardRule

_BEFORE = r"(?:[(\[*_$\s]|\\\(|\\(?:text|textbf|mathrm)\{)*+"
_AFTER = (
    r"\b(?![a-z])(?![)\]*_\s]*(?:[,/&]|or\b|and\b)[(\[*_\s]*(?:[A-HJ-Z]|I(?! [a-z]))\b)"  # `A or B` chooses nothing
)
_CHOICE = rf"{_BEFORE}([A-Z]|[0-9]{{1,2}}|[a-z](?=[)\]*_.\s]*$)){_AFTER}"
_IS = r"[*_\s]*+(?:(?i:is|(?:must|should|would) be)|[:=-])"
_STATED = re.compile(  # `Option A ignores friction` chooses nothing
    rf"(?:(?i:answer)(?:{_IS})?[*_\s]*+:?[*_\s]*+(?i:option|choice)?|(?i:option|choice){_IS}[*_\s]*+:?){_CHOICE}",
    re.MULTILINE,
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_ALONE = re.compile(rf"(?![AI]\s+[a-z]){_CHOICE}(?:[).\]}}:,*$\\\s].*)?", re.DOTALL)


def multiple_choice(response: str, ground_truth: object) -> float:
    """1.0 if the response chooses the ground truth: a letter or label, or a whole number that counts choices from 0.

    The choice stands in the last `<answer>...</answer>` or `\\boxed{...}`, or follows the last `answer is`,
    `answer:` or `option is`, or begins the response.
    """
    truth = string.ascii_uppercase[ground_truth] if isinstance(ground_truth, int) else as_text(ground_truth)
    return float(_choice(response) == truth.strip(" ().").upper())


def _choice(response: str) -> str | None:
    tagged = _TAGGED.findall(response)
    framed = tagged[-1] if tagged else last_boxed(response)
    if framed is not None:
        match = _ALONE.fullmatch(framed.strip())
        return match.group(1).upper() if match else None
    stated = _STATED.findall(response)
    if stated:
        return str(stated[-1]).upper()
    match = _ALONE.fullmatch(response.strip())
    return match.group(1).upper() if match else None


ROW = RewardRule(
    name="multiple_choice",
    score=multiple_choice,
    answer=_choice,
    sources=("cais/mmlu", "TIGER-Lab/MMLU-Pro", "allenai/ai2_arc"),
)
