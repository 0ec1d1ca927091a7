"""Metrics of validation with several responses to each prompt, by verl's definitions.

For each data source, means over its prompts of

    mean@N, std@N           mean and standard deviation of the rewards of a prompt's N responses
    best@K/mean, .../std    largest reward of K responses drawn with replacement, over 1000 draws
    worst@K/mean, .../std   smallest reward of them
    maj@K/mean, .../std     reward of the answer that most of them gave; ties go to the answer drawn first

with K = 2, 4, 8, … below N, and N. `maj@K` needs the answers (`pred`) of all responses to a prompt.
"""

from collections.abc import Sequence
from functools import cache
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from trainer.rewards.answer import Scored

DRAWS = 1000
SEED = 42  # verl's, so that the same responses give the same numbers


def validation_metrics(
    sources: Sequence[str], scored: Sequence[Scored], samples: int, left_out: Sequence[bool]
) -> dict[str, float]:
    """The metrics by name, `validation/SOURCE/mean@4`. A further number of a rule is `validation/SOURCE/NAME/mean@4`.

    Args:
        sources: the data source of each row; scored: the reward of each row. `samples` consecutive rows belong to one
            prompt.
        left_out: whether each row is no answer; its prompt is in no metric.
    """
    metrics: dict[str, list[float]] = {}
    for start in range(0, len(scored), samples):
        if any(left_out[start : start + samples]):
            continue
        rows = scored[start : start + samples]
        answers = [score.pred for score in rows]
        for name, values in _numbers(rows).items():
            for metric, value in prompt_metrics(values, answers).items():
                metrics.setdefault(f"validation/{sources[start]}/{name}{metric}", []).append(value)
    return {name: fmean(values) for name, values in sorted(metrics.items())}


def _numbers(rows: Sequence[Scored]) -> dict[str, list[float]]:
    """The rewards of a prompt's responses under "", and each further number that all of them have under its name."""
    shared = set.intersection(*(set(score.info) for score in rows))
    return {
        "": [score.value for score in rows],
        **{f"{name}/": [score.info[name] for score in rows] for name in shared},
    }


def prompt_metrics(values: Sequence[float], answers: Sequence[str | None]) -> dict[str, float]:
    """The metrics of the responses to one prompt, by name."""
    rewards, count = torch.tensor(values, dtype=torch.float64), len(values)
    mean, std = _mean_and_std(rewards)
    metrics = {f"mean@{count}": mean}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = std
    numbers = {answer: number for number, answer in enumerate(answers)}
    votes = torch.tensor([numbers[answer] for answer in answers])
    for size in _sizes(count):
        drawn = _draws(count, size)
        picked = {"best": rewards[drawn].amax(dim=1), "worst": rewards[drawn].amin(dim=1)}
        if None not in answers:
            picked["maj"] = _of_majority(rewards[drawn], votes[drawn])
        for name, of_draws in picked.items():
            metrics[f"{name}@{size}/mean"], metrics[f"{name}@{size}/std"] = _mean_and_std(of_draws)
    return metrics


def _mean_and_std(rewards: Tensor) -> tuple[float, float]:
    """Exact for equal rewards, of which a sum may be rounded: the smallest is subtracted first."""
    smallest = rewards.amin()
    shifted = rewards - smallest
    return (smallest + shifted.mean()).item(), shifted.std(correction=0).item()


def _sizes(count: int) -> list[int]:
    """2, 4, 8, … below `count`, and `count`."""
    return [*(2**power for power in range(1, count.bit_length()) if 2**power < count), count]


@cache
def _draws(count: int, size: int) -> Tensor:
    """Rows drawn with replacement, [DRAWS, size] int64."""
    return torch.from_numpy(np.random.RandomState(SEED).choice(count, size=(DRAWS, size), replace=True))


def _of_majority(rewards: Tensor, votes: Tensor) -> Tensor:
    """For each draw, the reward of the first response with the most frequent answer, [draws].

    Args:
        rewards, votes: [draws, size].
    """
    counts = (votes[:, :, None] == votes[:, None, :]).sum(dim=2)
    first = (counts == counts.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
    return rewards.gather(1, first).squeeze(1)
