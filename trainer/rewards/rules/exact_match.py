"""The response must equal the ground truth."""

from trainer.rewards.truth import as_text
from trainer.rows import RewardRule


def exact_match(response: str, ground_truth: object) -> float:
    """1.0 if the response is the ground truth, apart from white space at either end."""
    return float(response.strip() == as_text(ground_truth).strip())


ROW = RewardRule(name="exact_match", score=exact_match)
