"""The words that the tagged answer shares with an accepted answer: question answering."""

from trainer.rewards.squad import accepted_answers, f1, tagged_answer
from trainer.rows import RewardRule


def qa_f1(response: str, ground_truth: object) -> float:
    """The best F1 score, 0.0 to 1.0, of the last `<answer>...</answer>`, or of the whole response without one."""
    answer = tagged_answer(response)
    truths = accepted_answers(ground_truth)
    return max((f1(response if answer is None else answer, truth) for truth in truths), default=0.0)


ROW = RewardRule(name="qa_f1", score=qa_f1)
