"""The last match of a regular expression must equal the ground truth."""

import re

from trainer.rewards.truth import as_text
from trainer.rows import Parameter, RewardRule


def last_match(response: str, ground_truth: object, pattern: re.Pattern[str]) -> float:
    """1.0 if the last match of the pattern, or of its first group if it has one, is the ground truth."""
    matches = [match.group(1 if pattern.groups else 0) for match in pattern.finditer(response)]
    return float(bool(matches) and matches[-1] is not None and matches[-1].strip() == as_text(ground_truth).strip())


ROW = RewardRule(
    name="regex",
    score=last_match,
    parameters={
        "pattern": Parameter(
            type=re.Pattern[str] | None,
            description="Python's syntax; its last match, or that of its first group, must be the ground truth",
        )
    },
    may_hang=True,  # a pattern may backtrack for ever
)
