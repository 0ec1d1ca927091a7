"""Reward functions in processes of their own: a call that hangs, raises or dies costs one sample, not the run."""

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from trainer.config.sections.reward import RewardConfig
from trainer.errors import ConfigError, RewardError, WorkerError
from trainer.rewards.answer import Answer, Cause, Reply, Scored
from trainer.rewards.function import time_limit
from trainer.rewards.processes.channel import BrokenChannelError, readable
from trainer.rewards.processes.reward_process import START_SECONDS, RewardProcess
from trainer.rewards.scores import failed_score

_MOST_AT_ONCE = 16  # answers that a process gets in one message
_MOST_STARTS = 3  # starts in a row that may fail, once one has succeeded


class RewardPool:
    """A number of reward processes; a context manager. Processes that die or time out are replaced."""

    def __init__(self, settings: RewardConfig, processes: int) -> None:
        self._settings = settings
        self._batched = settings.custom_function.batched
        self._count = 1 if self._batched else processes
        self._processes: list[RewardProcess] = []
        self._failed_starts = _MOST_STARTS - 1  # the first must succeed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._processes:
            self._processes.pop().kill()

    def start(self, wanted: int | None = None) -> None:
        """Starts processes until there are `wanted` of them, or all; they become ready side by side."""
        for process in [process for process in self._processes if not process.busy and not process.alive]:
            self._lose(process)
        while len(self._processes) < min(self._count, wanted or self._count):
            self._processes.append(RewardProcess(self._settings))

    def check(self) -> None:
        """Starts a process, which loads the function. Raises as `score` does."""
        self.start(1)
        while any(process.busy for process in self._processes):
            for process in self._heard_from():
                self._take(process, deque(), {})

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """The reward of each answer, in order.

        Raises RewardError if a score is not a finite number, ConfigError if the function cannot be loaded or called,
        WorkerError if a process does not start.
        """
        waiting = deque(enumerate(answers))
        scored: dict[int, Scored] = {}
        try:
            while len(scored) < len(answers):
                self.start(len(answers) - len(scored))
                self._hand_out(waiting)
                for process in self._heard_from():
                    self._take(process, waiting, scored)
        finally:
            for process in [process for process in self._processes if process.pending]:
                self._lose(process)
        return [scored[row] for row in range(len(answers))]

    def _hand_out(self, waiting: deque[tuple[int, Answer]]) -> None:
        """Gives each idle process its next answers: several while many wait, so that none waits for a message."""
        for process in self._processes:
            if waiting and not process.busy:
                share = -(-len(waiting) // (4 * self._count))
                count = len(waiting) if self._batched else min(_MOST_AT_ONCE, share)
                batch = [waiting.popleft() for _ in range(count)]
                try:
                    process.send(batch)
                except BrokenChannelError:  # it died while it had nothing to do
                    self._lose(process)
                    waiting.extendleft(reversed(batch))
                    return

    def _heard_from(self) -> list[RewardProcess]:
        """The processes that answered, died or timed out; waits until there is one."""
        busy = [process for process in self._processes if process.busy]
        first = min((process.deadline for process in busy), default=0.0)
        ready = readable([process.channel for process in busy], max(0.0, first - time.monotonic()))
        now = time.monotonic()
        return [process for process in busy if process.channel in ready or process.deadline <= now]

    def _take(self, process: RewardProcess, waiting: deque[tuple[int, Answer]], scored: dict[int, Scored]) -> None:
        """Adds a process's rewards to `scored`. If the process is lost, its other answers are queued again."""
        cause: Cause = "reward_error"
        try:
            for row, reply in process.replies():
                scored[row] = self._result(reply)
            self._failed_starts = 0 if process.ready else self._failed_starts
            if not process.busy or process.deadline > time.monotonic():
                return
            cause = "reward_timeout"
            reason = (
                f"no reward within {time_limit(self._settings, process.pending[0][1]):g} s" if process.ready else ""
            )
        except BrokenChannelError as error:
            reason = f"the reward process {error}" if process.ready else ""
        except ConfigError:
            self._lose(process)
            raise
        self._lose(process)
        if not reason:
            self._failed_starts += 1
            if self._failed_starts < _MOST_STARTS:
                return
            raise WorkerError(
                f"a reward process ended while starting, or did not start within {START_SECONDS:g} s",
                hint="see its output in the worker's log",
            )
        count = len(process.pending) if self._batched else min(1, len(process.pending))
        lost = [process.pending.popleft() for _ in range(count)]
        scored.update({row: self._failed(cause, reason) for row, _ in lost})
        waiting.extendleft(reversed(process.pending))

    def _lose(self, process: RewardProcess) -> None:
        self._processes.remove(process)
        process.kill()

    def _result(self, reply: Reply) -> Scored:
        if reply.refusal:
            raise RewardError(*reply.refusal)
        return self._failed(reply.cause, reply.failure, reply.traceback) if reply.failure else reply.scored

    def _failed(self, cause: Cause, reason: str, traceback: str = "") -> Scored:
        return failed_score(self._settings, cause, reason, traceback)
