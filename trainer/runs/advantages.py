"""From the scores of a step to what its rows learn: rewards, advantages and returns of each token."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.algorithms.groups import in_large_groups
from trainer.algorithms.losses.kl import adapted_kl_coefficient, kl_estimate, mean_over_responses
from trainer.algorithms.off_policy.agreement import log_prob_agreement
from trainer.algorithms.off_policy.treatment import OffPolicyCorrection
from trainer.algorithms.resampling import resampled_rows
from trainer.algorithms.returns import explained_variance
from trainer.algorithms.rows import Advantages, Sampled
from trainer.algorithms.token_rewards import move_to_tokens, on_trained_tokens, token_rewards
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.errors import WorkerError
from trainer.experience.collector import Collector, Experience, Scores
from trainer.rollout.sampling import request_seed

logger = logging.getLogger(__name__)


class Estimated(NamedTuple):
    """A batch with advantages, metrics of its responses, and the KL coefficient of the next step."""

    batch: Batch
    metrics: dict[str, float]
    kl_coefficient: float


def with_advantages(
    batch: Batch, experience: Experience, scores: Scores, collector: Collector, kl_coefficient: float
) -> Estimated:
    """The batch with advantages, returns and corrections per token.

    Its mask contains only the tokens that train: those that are neither rejected nor in a response that is truncated,
    failed, or in a group with too few answers. A failed response is no part of any baseline.
    """
    config = collector.config
    algorithm, mask = config.algorithm, batch.response_mask
    shaped = collector.shaped(scores.values, experience.lengths)
    rewards, metrics, kl_coefficient = _rewards(batch, shaped, scores.answered, config, kl_coefficient)
    move_to_tokens(rewards, scores.by_token, mask)
    groups, answered = collector.groups(len(batch)), scores.answered
    learning = in_large_groups(answered, groups, _smallest_group(config))
    metrics["rollout/dropped_groups"] = float(len(groups.unique()) - len(groups[learning].unique()))
    batch = batch.with_(response_mask=mask & learning.unsqueeze(1), counted=learning)
    if not config.engines_know_old_log_probs and batch.rollout_log_probs is not None:
        mass = config.rollout.truncation.smallest_mass
        metrics |= log_prob_agreement(batch.rollout_log_probs, batch.old_log_probs, mask, mass)
        batch, corrections = corrected(batch, algorithm.off_policy)
        metrics |= corrections
    truncated = experience.truncated
    metrics["rollout/truncated_fraction"] = truncated.float().mean().item()
    if algorithm.mask_truncated:
        batch = batch.with_(response_mask=batch.response_mask & ~truncated.unsqueeze(1))
    trained = batch.response_mask
    if not trained.any():
        logger.warning(
            "no token of this step trains: responses failed, the limit cut them, or the correction rejected them"
        )
    sampled = Sampled(
        on_trained_tokens(rewards, trained),
        trained,
        groups,
        batch.values,
        scores.greedy,
        batch.old_log_probs,
        batch.squared_probabilities,
        batch.corrections,
        scores.components() if algorithm.estimator.needs_components else {},
    )
    estimated = _estimated(sampled, learning, config)
    batch = batch.with_(advantages=estimated.advantages.float())
    if estimated.returns is not None:
        batch = batch.with_(returns=estimated.returns.float())
        metrics["critic/explained_variance"] = explained_variance(batch.values, estimated.returns, trained)
    if answered.any():
        metrics["reward/mean"] = scores.values[answered].mean().item()
    metrics["rollout/response_length"] = mask.sum(dim=1).float().mean().item()
    return Estimated(batch, scores.metrics | metrics, kl_coefficient)


def resampled(batch: Batch, experience: Experience, scores: Scores, collector: Collector, step: int) -> Batch:
    """The rows to learn from: all, or as many drawn by score from those that have one."""
    algorithm = collector.config.algorithm
    if algorithm.resampling == "none":
        return batch
    generator = torch.Generator().manual_seed(request_seed(collector.config.trainer.seed, step, -1, 0))
    answered = scores.answered.nonzero().squeeze(1)
    if not len(answered):
        return batch
    shaped = collector.shaped(scores.values, experience.lengths)[answered]
    drawn = resampled_rows(shaped, algorithm.resampling, algorithm.resampling_power, generator, count=len(batch))
    return batch.rows(answered[drawn])


def _smallest_group(config: Config) -> int:
    """The least number of answers to a prompt for which the estimator has a baseline."""
    estimator = config.algorithm.estimator
    if not estimator.compares_groups or config.rollout.samples_per_prompt == 1:
        return 1
    return max(2, estimator.smallest_group)


def _estimated(sampled: Sampled, learning: Tensor, config: Config) -> Advantages:
    """The advantages of the learning rows alone, [rows] bool; 0 in all others."""
    estimator = config.algorithm.estimator
    nothing = torch.zeros(sampled.mask.shape, dtype=sampled.rewards.dtype)
    if not learning.any():
        return Advantages(nothing, nothing if estimator.needs_critic else None)
    estimated = estimator.estimate(sampled.rows(learning), **estimator.values(config.algorithm))
    return Advantages(
        *(
            None if part is None else nothing.to(part.dtype).masked_scatter(learning.unsqueeze(1), part)
            for part in estimated
        )
    )


def _rewards(
    batch: Batch, scores: Tensor, answered: Tensor, config: Config, kl_coefficient: float
) -> tuple[Tensor, dict[str, float], float]:
    """The reward of each token, [rows, response length] float64, metrics of its KL term, and the next coefficient of
    that."""
    algorithm, mask = config.algorithm, batch.response_mask
    if batch.reference_log_probs is None or batch.old_log_probs is None:
        return token_rewards(scores, torch.zeros(mask.shape).double(), mask, 0.0), {}, kl_coefficient
    kl = kl_estimate(batch.old_log_probs, batch.reference_log_probs, algorithm.kl_estimator)
    metrics = {"reference/kl": kl[mask].mean().item()}
    rewards = token_rewards(scores, kl.double(), mask, kl_coefficient)
    if algorithm.kl_control == "adaptive" and answered.any():
        controlled = mean_over_responses(kl[answered], mask[answered])
        metrics |= {"reference/kl_coefficient": kl_coefficient, "reference/kl_by_response": controlled}
        kl_coefficient = adapted_kl_coefficient(
            kl_coefficient, controlled, algorithm.kl_target, algorithm.kl_horizon, int(answered.sum())
        )
    return rewards, metrics, kl_coefficient


def corrected(batch: Batch, correction: OffPolicyCorrection) -> tuple[Batch, dict[str, float]]:
    """The batch with correction weights and without rejected tokens in its mask, and metrics of both."""
    mask, metrics = batch.response_mask, {}
    if not mask.any():
        return batch, {}
    weights, bounded, accepted, ratio = correction.apply(batch.old_log_probs, batch.rollout_log_probs, mask)
    if correction.rejection:
        batch = batch.with_(response_mask=accepted)
        metrics["rollout/rejected_fraction"] = 1 - (accepted.sum() / mask.sum()).item()
    if weights is not None:
        batch = batch.with_(corrections=weights)
        metrics["rollout/ratio_largest"] = ratio[mask].max().item()
        metrics["rollout/ratio_smallest"] = ratio[mask].min().item()
        metrics["rollout/corrected_fraction"] = bounded[mask].float().mean().item()
    return batch, metrics


def check_exact(batch: Batch) -> None:
    """Raises WorkerError unless the actor's log-probs before the update equal the engines' to the bit."""
    assert batch.old_log_probs is not None
    assert batch.rollout_log_probs is not None
    apart = (batch.old_log_probs - batch.rollout_log_probs)[batch.response_mask].abs()
    if differing := int((apart != 0).sum()):
        raise WorkerError(
            f"actor.backend=exact: {differing} of {apart.numel()} log-probs of the actor differ from the engines', "
            f"by at most {float(apart.max()):.3g}",
            hint="set actor.backend=fsdp, and please report model, GPU and versions",
        )
    logger.info("engines and actor agree to the bit in all %d log-probs of this step", apart.numel())
