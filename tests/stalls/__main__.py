"""Stalls real workers and judges the explanations: `python -m tests.stalls --record FILE`.

Each fault is injected --count times, at ranks, phases and collectives drawn from the seeds --seed, --seed + 1, ….
FILE keeps a line of JSON per injection; a later call injects only what is missing there. --table prints the table of
benchmarks/measured/faults.md from it, also with what `python -m tests.stalls.nodes` wrote. --healthy takes healthy
steps instead and counts false alarms.

Runs in the image, with Ray, PyTorch and a small file system at /full:

    docker run --rm --shm-size 2g --tmpfs /full:size=8m -v $PWD:/src:ro -v $PWD/build:/results -e PYTHONPATH=/src \\
        --entrypoint python slipway:cpu -m tests.stalls --record /results/stalls.jsonl
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.stalls.injecting import Job, healthy_steps, inject
from tests.stalls.running import options, run, say


def main() -> int:
    parser = options("tests.stalls", __doc__, "ranks")
    parser.add_argument("--healthy", type=float, default=0.0, metavar="MINUTES", help="only take healthy steps")
    given = parser.parse_args()
    if given.healthy:
        return max(healthy(size, given) for size in given.sizes)
    if not given.record:
        parser.error("--record FILE or --healthy MINUTES is needed")
    return run(given, ("rank", "controller"), "ranks", partial(started, given.stall_seconds), inject)


@contextmanager
def started(stall_seconds: float, ranks: int) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), ranks, stall_seconds) as job:
        yield job


def healthy(ranks: int, given: argparse.Namespace) -> int:
    """Takes healthy steps for a share of the time; 1 if any was called a stall."""
    with started(given.stall_seconds, ranks) as job:
        steps, alarms = healthy_steps(job, 60 * given.healthy / len(given.sizes))
    say(f"{ranks} ranks: {steps} healthy phases in {given.healthy / len(given.sizes):g} minutes, {alarms} false alarms")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
