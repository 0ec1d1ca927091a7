"""The weights of a batch that other weights sampled."""

from trainer.algorithms.off_policy.treatment import OffPolicyCorrection
from trainer.data.batches.batch import Batch


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
