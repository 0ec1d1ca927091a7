"""A worker with the phases of a step, that misbehaves when it is told to. SIGUSR2 ends most of it, for the next one."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROUNDS = 6  # collectives of a phase
BEGUN = "begun"  # the file that says that the fault has begun
REWARDS = ("wait_for_a_reward", "wait_for_a_busy_reward")  # they begin in another process, which says so


class ReleasedError(Exception):
    """What misbehaves shall end."""


class Rank:
    """A rank of a process group over Gloo."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        from torch import distributed

        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        signal.signal(signal.SIGUSR2, self._release)
        self._folder = Path(folder)
        self._begun = self._folder / BEGUN
        self._fault, self._round = "", 0
        self._waits = False

    def pid(self) -> int:
        return os.getpid()

    def arm(self, fault: str, at: int) -> None:
        """The next phase misbehaves in round `at`."""
        self._fault, self._round = fault, at

    def update(self) -> None:
        self._rounds()

    def log_probs(self) -> None:
        self._rounds()

    def load(self) -> None:
        self._rounds()

    def save(self) -> None:
        self._rounds()

    def generate(self) -> None:
        """Engines do not meet."""
        self._rounds(meet=False)

    def score(self) -> None:
        self._rounds(meet=False)

    def meet(self) -> None:
        """A sum over all ranks."""
        import torch
        from torch import distributed

        distributed.all_reduce(torch.ones(1000))

    def _rounds(self, meet: bool = True) -> None:
        for number in range(ROUNDS):
            if self._fault and number == self._round:
                fault, self._fault = self._fault, ""
                if fault not in REWARDS:
                    self._begun.touch()
                if fault == "skip_a_collective":
                    continue
                misbehave: Callable[[], None] = getattr(self, fault)
                self._waits = True
                with suppress(ReleasedError):
                    misbehave()
                self._waits = False
            if meet:
                self.meet()

    def _release(self, _number: int, _frame: FrameType | None) -> None:
        if self._waits:
            self._waits = False
            raise ReleasedError

    def stop_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def come_late(self) -> None:
        time.sleep(600)

    def take_a_lock_twice(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def loop_for_ever(self) -> None:
        while True:
            pass

    def read_a_fifo(self) -> None:
        path = self._folder / f"fifo{os.getpid()}"
        with suppress(FileExistsError):
            os.mkfifo(path)
        path.read_text()

    def write_to_a_full_disk(self) -> None:
        """Tries again until it fits, as what saves does."""
        file = Path("/full/state")
        try:
            while True:
                with suppress(OSError):
                    file.write_bytes(bytes(2**25))
                    return
                time.sleep(0.2)
        finally:
            file.unlink()

    def score_with(self, name: str) -> None:
        from trainer.config.sections.reward import RewardConfig
        from trainer.rewards.answer import Answer
        from trainer.rewards.processes.pool import RewardPool

        functions = Path(__file__).with_name("rewards.py")
        settings = RewardConfig.model_validate({"timeout": 600, "custom_function": {"path": functions, "name": name}})
        with RewardPool(settings, processes=2) as pool:
            pool.score([Answer("x", "x", "2", {"begun": str(self._begun)}, (1, 2))] * 2)

    def wait_for_a_reward(self) -> None:
        self.score_with("hang")

    def wait_for_a_busy_reward(self) -> None:
        self.score_with("loop")
