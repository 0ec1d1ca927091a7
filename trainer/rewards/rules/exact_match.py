"""The response must equal the ground truth."""

from trainer.rows import RewardRule


def exact_match(response: str, ground_truth: str) -> float:
    """1.0 if the response is the ground truth, apart from white space at either end."""
    return float(response.strip() == ground_truth.strip())


ROW = RewardRule(name="exact_match", score=exact_match)
