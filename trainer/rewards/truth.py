"""Ground truths as rules read them."""

from collections.abc import Sequence

from trainer.errors import RewardError


def as_text(ground_truth: object) -> str:
    """A ground truth that is text or a number, as text. Raises RewardError for a list or a mapping."""
    if isinstance(ground_truth, str | int | float):
        return str(ground_truth)
    raise RewardError(
        f"the rule needs a ground truth that is text or a number, not {ground_truth!r}",
        hint="choose another rule with reward.name or reward.sources, or set reward.custom_function.path",
    )


def as_texts(ground_truth: object) -> list[str]:
    """The accepted answers: one text or number, or a list of them. Raises RewardError for anything else."""
    if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str):
        return [as_text(truth) for truth in ground_truth]
    return [as_text(ground_truth)]
