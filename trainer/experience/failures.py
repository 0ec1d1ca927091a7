"""Responses that are no answer, because an environment, a program or the reward failed: their metrics and limits."""

import logging
from collections import Counter
from collections.abc import Sequence

from trainer.config.tree import Config
from trainer.errors import FailedResponsesError
from trainer.experience.trajectory import Trajectory
from trainer.rewards.answer import REWARD_CAUSES, Scored

logger = logging.getLogger(__name__)


def failed_fraction(scored: Sequence[Scored]) -> float:
    """The share of responses whose reward failed; logs the first reason."""
    failures = [score.failure for score in scored if score.failure]
    if failures:
        logger.warning("%d of %d rewards failed; first failure: %s", len(failures), len(scored), failures[0])
    return len(failures) / len(scored)


def failed_shares(name: str, scored: Sequence[Scored]) -> dict[str, float]:
    """Metrics: the share of responses that are no answer under a name, and below it the shares by cause."""
    causes = Counter(score.cause for score in scored if score.cause)
    by_cause = {f"{name}/{cause}": number / len(scored) for cause, number in sorted(causes.items())}
    return {name: causes.total() / len(scored), **by_cause}


def retried_shares(rows: Sequence[Trajectory], scored: Sequence[Scored]) -> dict[str, float]:
    """Metrics: further attempts per response, by the cause of the failure before."""
    attempts = [*(row.retried for row in rows), *(score.retried for score in scored)]
    causes = Counter(cause for retried in attempts for cause in retried)
    return {f"rollout/retried/{cause}": number / len(scored) for cause, number in sorted(causes.items())}


def check_failed_shares(scored: Sequence[Scored], config: Config) -> None:
    """Raises FailedResponsesError if a larger share of a step's responses failed than the settings allow."""
    of_rewards = config.reward.max_failed_share
    apart = () if of_rewards is None else REWARD_CAUSES
    failed = [score for score in scored if score.cause]
    others = [score for score in failed if score.cause not in apart]
    _check_failed(others, len(scored), "rollout.max_failed_share", config.rollout.max_failed_share)
    if of_rewards is not None:
        rewards = [score for score in failed if score.cause in apart]
        _check_failed(rewards, len(scored), "reward.max_failed_share", of_rewards)


def _check_failed(failed: Sequence[Scored], responses: int, setting: str, most: float) -> None:
    if len(failed) <= most * responses:
        return
    causes = ", ".join(f"{number} {cause}" for cause, number in Counter(score.cause for score in failed).most_common())
    first = failed[0]
    raise FailedResponsesError(
        f"{len(failed)} of {responses} responses of a step failed ({causes}), more than "
        f"{setting}={most:g} allows; first failure: {first.failure}"
        + (f"\n\n{first.traceback.rstrip()}" if first.traceback else ""),
        hint=f"fix the cause; a higher {setting} leaves more responses out of the training",
    )
