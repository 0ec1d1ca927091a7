"""Runs the demo's job once per seed and writes the learning results to benchmarks/measured/learning.md.

    ci/setup && ci/engine .venv/bin/python -m benchmarks.learning [--seeds 3]

Needs the cpu image (`buildkit build --target cpu`). Nothing here is a test: it takes minutes per seed.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.results import read_rows, write_section

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """`first` and `last` are the exact match on held-out prompts before and after PPO."""

    seed: int
    first: float
    last: float
    steps: int
    seconds: float
    largest_log_prob_difference: float


def run_seed(seed: int) -> Outcome:
    name = f"learning-seed{seed}-{int(time.time())}"
    start = time.monotonic()
    environment = {**os.environ, "SLIPWAY_DEMO_SEED": str(seed), "SLIPWAY_DEMO_ID": name}
    subprocess.run([ROOT / "ci" / "demo"], cwd=ROOT, env=environment, check=True)
    seconds = time.monotonic() - start
    rows = read_rows(ROOT / "runs" / name / "metrics.jsonl")
    matches = [row["validation/exact_match"] for row in rows if "validation/exact_match" in row]
    differences = [row["rollout/log_prob_difference"] for row in rows if "rollout/log_prob_difference" in row]
    return Outcome(seed, matches[0], matches[-1], rows[-1]["step"], seconds, max(differences))


def table(outcomes: list[Outcome], command: str) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    lines = [
        "Exact match of greedy answers on held-out prompts, before and after PPO; a run ends once it reaches 0.99.",
        f"Measured on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {memory:.0f} GiB, no GPU, by `{command}`.",
        "The time is the whole job once the image exists: data, warm start, both nodes, PPO, report.",
        "",
        "| seed | before | after | PPO steps | whole job | largest difference of log-probs, engine to trainer |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        lines.append(
            f"| {outcome.seed} | {outcome.first:.3f} | {outcome.last:.3f} | {outcome.steps} | {outcome.seconds:.0f} s "
            f"| {outcome.largest_log_prob_difference:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves of the demo's job over several seeds.")
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    outcomes = [run_seed(seed) for seed in range(seeds)]
    text = table(outcomes, "python -m benchmarks.learning")
    write_section("PPO learns to add, on two nodes", text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
