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

START_SECONDS = 120.0  # the user's file may import a lot


class RewardProcess:
    """One process, which scores one answer at a time."""

    def __init__(self, settings: RewardConfig) -> None:
        """Starts it. Raises ConfigError if the function cannot be loaded, WorkerError if the process does not start."""
        ours, theirs = socketpair()
        with theirs:
            command = [sys.executable, "-m", "trainer.rewards.process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.row = -1
        self.deadline = float("inf")
        try:
            self.connection.send(settings)
            if not self.connection.poll(START_SECONDS):
                raise WorkerError(f"a reward process did not start within {START_SECONDS:g} s")
            reply: Reply = self.connection.recv()
        except (EOFError, OSError) as error:
            self.kill()
            raise WorkerError(
                "a reward process ended while starting", hint="see its output in the worker's log"
            ) from error
        except WorkerError:
            self.kill()
            raise
        if reply.refusal:
            self.kill()
            raise ConfigError(*reply.refusal)

    def start(self, row: int, answer: Answer, timeout: float) -> None:
        """Sends it an answer to score."""
        self.row, self.deadline = row, time.monotonic() + timeout
        self.connection.send(answer)

    def kill(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


class RewardPool:
    """A number of reward processes; a context manager. Processes that die or time out are replaced."""

    def __init__(self, settings: RewardConfig, processes: int) -> None:
        self._settings = settings
        self._count = processes
        self._idle: list[RewardProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """The reward of each answer, in order. Raises RewardError if a score is not a finite number."""
        waiting = deque(enumerate(answers))
        scored: dict[int, Scored] = {}
        busy: list[RewardProcess] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self._count:
                    process = self._idle.pop() if self._idle else RewardProcess(self._settings)
                    busy.append(process)
                    process.start(*waiting.popleft(), self._settings.timeout)
                for process in self._finished(busy):
                    busy.remove(process)
                    scored[process.row] = self._result(process)
        finally:
            for process in busy:
                process.kill()
        return [scored[row] for row in range(len(answers))]

    def _finished(self, busy: Sequence[RewardProcess]) -> list[RewardProcess]:
        """The processes that answered, died or timed out; waits until there is one."""
        first = min(process.deadline for process in busy)
        ready = wait([process.connection for process in busy], max(0.0, first - time.monotonic()))
        now = time.monotonic()
        return [process for process in busy if process.connection in ready or process.deadline <= now]

    def _result(self, process: RewardProcess) -> Scored:
        """The result of a finished process, which becomes idle unless it is lost."""
        if not process.connection.poll():
            process.kill()
            return self._failed(f"no reward within {self._settings.timeout:g} s")
        try:
            reply: Reply = process.connection.recv()
        except (EOFError, OSError):
            process.kill()
            return self._failed("the reward process died")
        self._idle.append(process)
        if reply.refusal:
            raise RewardError(*reply.refusal)
        return self._failed(reply.failure) if reply.failure else Scored(reply.score)

    def _failed(self, reason: str) -> Scored:
        return Scored(self._settings.failure_score, reason)
