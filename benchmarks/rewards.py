"""Seconds to score 1,024 responses with a rule of 50 ms, against the ideal on this machine's cores.

python benchmarks/rewards.py in an image, or in ci/setup's .venv with the trainer's packages.
"""

import os
import tempfile
import time
from pathlib import Path

from trainer.config.sections.reward import RewardConfig, RewardFunction
from trainer.rewards.answer import Answer
from trainer.rewards.processes.pool import RewardPool

RESPONSES, SECONDS = 1024, 0.05
# Processor time, so that other work on the machine does not count as the rule's.
RULE = f"""
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    end = time.process_time() + {SECONDS}
    while time.process_time() < end:
        pass
    return 1.0
"""


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rule.py"
        file.write_text(RULE)
        with RewardPool(RewardConfig(custom_function=RewardFunction(path=file)), processes=cores) as pool:
            for start in ("with", "without"):
                begin = time.perf_counter()
                pool.score([Answer("text " * 200, "truth")] * RESPONSES)
                taken, ideal = time.perf_counter() - begin, RESPONSES * SECONDS / cores
                ratio = taken / ideal
                print(f"{start} the start of {cores} processes: {taken:.2f} s, {ratio:.3f} x the ideal")  # noqa: T201


if __name__ == "__main__":
    main()
