"""All reward workers of a run as one: spreads answers over them and replaces workers that fail."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from trainer.cluster.calls import task
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.errors import RewardError, WorkerError
from trainer.rewards.answer import PASSING_CAUSES, Answer, Cause, Scored
from trainer.rewards.function import longest_scoring
from trainer.rollout.engines import split

# A row whose scoring kills a worker each time must not restart workers for ever.
MOST_FAILURES = 3
_SHOWN = 20  # rows in an error

logger = logging.getLogger(__name__)


class Scorer(Protocol):
    """A worker that scores responses, as the controller calls it."""

    def score(self, answers: Sequence[Answer]) -> list[Scored]: ...


class RewardWorkers:
    """Scores with all workers. One that dies, fails or does not answer is replaced, and its answers are scored again.

    The run ends after `MOST_FAILURES` failures in a row on the same answers, and if the first answers all fail.
    """

    def __init__(self, group: WorkerGroup[Scorer], config: Config) -> None:
        self._group = group
        self._settings = config.reward
        self._timeout = config.trainer.worker_timeout
        self._retries = config.rollout.retries
        self._warned: set[str] = set()
        # Counted by the thread that scores, read by the one that writes the metrics.
        self._repairs = 0
        self._succeeded = False  # once
        self._reported_repairs = 0

    def score(self, answers: Sequence[Answer], rows: Sequence[int]) -> list[Scored]:
        """The reward of each answer, in order. Failures that may pass are scored again, `rollout.retries` times at
        most. Errors name the answers by `rows`, their rows of the data.

        Raises RewardError if one is not a finite number, or if all fail and none has succeeded before; WorkerError
        after too many failures in a row.
        """
        scored = self._scored(answers, rows)
        for _ in range(self._retries):
            again = [place for place, score in enumerate(scored) if score.cause in PASSING_CAUSES]
            repeated = self._scored([answers[place] for place in again], [rows[place] for place in again])
            for place, score in zip(again, repeated, strict=True):
                scored[place] = replace(score, retried=self._retried(scored[place]))
        return self._checked(scored)

    def _retried(self, failed: Scored) -> tuple[Cause, ...]:
        """The causes of all attempts so far; logs the first failure of each."""
        assert failed.cause is not None
        if failed.cause not in self._warned:
            self._warned.add(failed.cause)
            logger.warning("a reward failed and is computed again (%s): %s", failed.cause, failed.failure)
        return (*failed.retried, failed.cause)

    def _scored(self, answers: Sequence[Answer], rows: Sequence[int]) -> list[Scored]:
        """The reward of each answer, asked for once."""
        # A batched function sees all responses of the step in one call.
        spread = split(range(len(answers)), 1 if self._settings.custom_function.batched else len(self._group))
        parts = {rank: [answers[place] for place in places] for rank, places in enumerate(spread) if places}
        timeout = self._timeout + max((longest_scoring(self._settings, part) for part in parts.values()), default=0.0)
        scored: dict[int, list[Scored]] = {}
        failed = 0
        while parts:
            asked = {rank: task(Scorer.score, part) for rank, part in parts.items()}
            answered, failures = self._group.attempt(asked, timeout)
            scored |= answered
            parts = {rank: parts[rank] for rank in failures}
            failed += 1
            for rank, failure in failures.items():
                self._replace(rank, failure, failed, [rows[place] for place in spread[rank]])
        return [score for rank in sorted(scored) for score in scored[rank]]

    def _checked(self, scored: list[Scored]) -> list[Scored]:
        """The scores. Raises RewardError if none has ever succeeded."""
        self._succeeded |= any(not score.failure for score in scored)
        if scored and not self._succeeded:
            first = scored[0]
            raise RewardError(
                f"all {len(scored)} rewards of the first responses failed; first failure: {first.failure}"
                + (f"\n\n{first.traceback.rstrip()}" if first.traceback else ""),
                hint="fix what scores the responses; once one reward has succeeded, a failure costs its response only",
            )
        return scored

    def take_repairs(self) -> int:
        """Workers replaced since the last call."""
        repairs = self._repairs
        new, self._reported_repairs = repairs - self._reported_repairs, repairs
        return new

    def _replace(self, rank: int, failure: WorkerError, failed: int, rows: Sequence[int]) -> None:
        """Restarts a worker. Raises WorkerError if these rows have failed too often."""
        if failed == MOST_FAILURES:
            raise WorkerError(
                f"rewards failed {failed} times in a row for {named(rows)}: {failure}",
                hint="; ".join(filter(None, [failure.hint, "score these rows alone to find the one that fails"])),
            )
        logger.warning("reward worker %d is restarted and scores its rows again: %s", rank, failure)
        self._repairs += 1
        self._group.restart(rank)


def named(rows: Sequence[int]) -> str:
    """Rows of the data, each once: `rows 3, 7 and 12 more of the data`."""
    distinct = sorted(set(rows))
    shown = ", ".join(map(str, distinct[:_SHOWN]))
    more = f" and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
    return f"row{'s' if len(distinct) > 1 else ''} {shown}{more} of the data"
