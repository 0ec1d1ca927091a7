"""The tagged answer must be one of the accepted answers: search and question answering, as in Search-R1."""

from trainer.rewards.squad import accepted_answers, exact, tagged_answer
from trainer.rows import RewardRule

_MOST_TAGS = 10  # a response with more tags earns a quarter (Search-R1, Jin et al. 2025, arXiv:2503.09516)


def qa_em(response: str, ground_truth: object) -> float:
    """1.0 if the last `<answer>...</answer>` holds an accepted answer, compared as SQuAD does."""
    answer = tagged_answer(response)
    if answer is None:
        return 0.0
    best = max((exact(answer, truth) for truth in accepted_answers(ground_truth)), default=0.0)
    tags = max(response.count("<answer>"), response.count("</answer>"))
    return best / 4 if tags > _MOST_TAGS else best


ROW = RewardRule(name="qa_em", score=qa_em, sources=("searchR1_*",))
