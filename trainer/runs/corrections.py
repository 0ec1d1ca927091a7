"""The gap between engines and trainer: correction weights, or the proof that there is none."""

import logging

from trainer.algorithms.off_policy.treatment import OffPolicyCorrection
from trainer.data.batches.batch import Batch
from trainer.errors import WorkerError

logger = logging.getLogger(__name__)


def corrected(batch: Batch, correction: OffPolicyCorrection) -> tuple[Batch, dict[str, float]]:
    """The batch with correction weights and without rejected tokens in its mask, and metrics of both."""
    mask, metrics = batch.response_mask, {}
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
