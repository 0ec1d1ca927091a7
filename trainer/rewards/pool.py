"""Reward functions in processes of their own: a call that hangs, raises or dies costs one sample, not the run."""

import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from socket import socketpair
from types import TracebackType
from typing import Any, Self

from trainer.config.reward import RewardConfig
from trainer.errors import ConfigError, RewardError, WorkerError
from trainer.rewards.answer import Answer, Reply, Scored
from trainer.rewards.function import time_limit

START_SECONDS = 120.0  # the user's file may import a lot
_MOST_AT_ONCE = 16  # answers that a process gets in one message


class RewardProcess:
    """One process, which scores the answers of a message one after the other."""

    def __init__(self, settings: RewardConfig) -> None:
        """Starts it, without waiting until it is ready."""
        ours, theirs = socketpair()
        with theirs:
            command = [sys.executable, "-m", "trainer.rewards.process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self._settings = settings
        self.ready = False
        self.pending: deque[tuple[int, Answer]] = deque()
        self.deadline = time.monotonic() + START_SECONDS
        self.connection.send(settings)

    @property
    def busy(self) -> bool:
        return bool(self.pending) or not self.ready

    def send(self, answers: Sequence[tuple[int, Answer]]) -> None:
        """Sends answers to score, each with its row."""
        self.pending.extend(answers)
        self.connection.send([answer for _, answer in answers])
        self._set_deadline()

    def receive(self) -> tuple[int, Reply] | None:
        """The row and the reply to the first pending answer, or None if this was the news that the process is ready.

        Raises EOFError or OSError if the process died, ConfigError if the function cannot be loaded.
        """
        reply: Reply = self.connection.recv()
        if not self.ready:
            if reply.refusal:
                raise ConfigError(*reply.refusal)
            self.ready = True
            return None
        row, _ = self.pending.popleft()
        self._set_deadline()
        return row, reply

    def kill(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _set_deadline(self) -> None:
        batched = self._settings.custom_function.batched
        counted = [answer for _, answer in self.pending][: None if batched else 1]
        self.deadline = time.monotonic() + sum(time_limit(self._settings, answer) for answer in counted)


class RewardPool:
    """A number of reward processes; a context manager. Processes that die or time out are replaced."""

    def __init__(self, settings: RewardConfig, processes: int) -> None:
        self._settings = settings
        self._batched = settings.custom_function.batched
        self._count = 1 if self._batched else processes
        self._processes: list[RewardProcess] = []

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
        while len(self._processes) < min(self._count, wanted or self._count):
            self._processes.append(RewardProcess(self._settings))

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """The reward of each answer, in order.

        Raises RewardError if a score is not a finite number, ConfigError if the function cannot be loaded, WorkerError
        if a process does not start.
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
                process.send([waiting.popleft() for _ in range(count)])

    def _heard_from(self) -> list[RewardProcess]:
        """The processes that answered, died or timed out; waits until there is one."""
        busy = [process for process in self._processes if process.busy]
        first = min(process.deadline for process in busy)
        ready = set(wait([process.connection for process in busy], max(0.0, first - time.monotonic())))
        now = time.monotonic()
        return [process for process in busy if process.connection in ready or process.deadline <= now]

    def _take(self, process: RewardProcess, waiting: deque[tuple[int, Answer]], scored: dict[int, Scored]) -> None:
        """Adds what a process found to `scored`. If it is lost, its other answers wait again."""
        try:
            while process.busy and process.connection.poll():
                found = process.receive()
                if found is not None:
                    scored[found[0]] = self._result(found[1])
            if not process.busy or process.deadline > time.monotonic():
                return
            reason = (
                f"no reward within {time_limit(self._settings, process.pending[0][1]):g} s" if process.ready else ""
            )
        except (EOFError, OSError):
            reason = "the reward process died" if process.ready else ""
        except ConfigError:
            self._lose(process)
            raise
        self._lose(process)
        if not reason:
            raise WorkerError(
                f"a reward process ended while starting, or did not start within {START_SECONDS:g} s",
                hint="see its output in the worker's log",
            )
        lost = [process.pending.popleft() for _ in range(len(process.pending) if self._batched else 1)]
        scored.update({row: self._failed(reason) for row, _ in lost})
        waiting.extendleft(reversed(process.pending))

    def _lose(self, process: RewardProcess) -> None:
        self._processes.remove(process)
        process.kill()

    def _result(self, reply: Reply) -> Scored:
        if reply.refusal:
            raise RewardError(*reply.refusal)
        return self._failed(reply.failure) if reply.failure else reply.scored

    def _failed(self, reason: str) -> Scored:
        return Scored(self._settings.failure_score, reason)
