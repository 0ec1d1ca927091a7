"""Reward processes that die or stop while they score a batch: each may cost one sample, and the run goes on."""

import os
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from random import Random

from tests.chaos.injection import Injection, Kind, NotStartedError
from tests.process_table import description, parents
from trainer.config.sections.reward import RewardConfig, RewardFunction
from trainer.errors import WorkerError
from trainer.rewards.answer import Answer
from trainer.rewards.processes.pool import RewardPool

PROCESSES, ANSWERS, SECONDS = 4, 64, 0.01
TIMEOUT, FAILED = 5.0, -1.0
FUNCTION = f"""
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep({SECONDS})
    return float(solution_str)
"""


def inject(number: signal.Signals, random: Random, injection: Injection) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        file = Path(directory) / "reward.py"
        file.write_text(FUNCTION)
        settings = RewardConfig(custom_function=RewardFunction(path=file), timeout=TIMEOUT, failure_score=FAILED)
        answers = [Answer(str(row), "", "chaos", {}) for row in range(ANSWERS)]
        struck: list[float] = []

        def strike() -> None:
            children = [pid for pid, parent in parents().items() if parent == os.getpid() and is_reward_process(pid)]
            time.sleep(random.uniform(0, SECONDS * ANSWERS / PROCESSES))
            os.kill(random.choice(children), number)
            struck.append(time.monotonic())

        with RewardPool(settings, PROCESSES) as pool:
            try:
                pool.score(answers)  # all processes are up
            except WorkerError as error:
                raise NotStartedError(str(error)) from error
            attacker = threading.Thread(target=strike)
            attacker.start()
            scored = pool.score(answers)
            attacker.join()
            injection.detected = round(time.monotonic() - struck[0], 3)
            injection.ended = None
            failures = [score.failure for score in scored if score.failure]
            injection.moment = "while it scored" if failures else "while it waited"
            injection.cause = failures[0] if failures else None
            injection.expect(len(failures) <= 1, f"{len(failures)} samples lost")
            right = [score.value == row for row, score in enumerate(scored) if not score.failure]
            injection.expect(all(right), "a wrong score")
            again = [score.value for score in pool.score(answers)]
            injection.expect(again == list(range(ANSWERS)), "the next batch has wrong scores")
        injection.processes = sum(parent == os.getpid() and is_reward_process(pid) for pid, parent in parents().items())
    injection.expect_clean()


def is_reward_process(pid: int) -> bool:
    return "trainer.rewards.processes.process" in description(pid)


KINDS = (
    Kind("reward process killed", partial(inject, signal.SIGKILL)),
    Kind("reward process stopped", partial(inject, signal.SIGSTOP)),
)
