"""Stalls real workers at random places and judges the explanations: `python -m tests.stalls --ranks 4 --injections 50`.

Runs in the image, with Ray, PyTorch and a small file system at /full:

    docker run --rm --shm-size 2g --tmpfs /full:size=8m -v $PWD:/src:ro -e PYTHONPATH=/src --entrypoint python \\
        slipway:cpu -m tests.stalls

It prints a table. `--healthy SECONDS` takes healthy steps instead and counts false alarms.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.stalls.faults import FAULTS, draw
from tests.stalls.injecting import Job, healthy_steps, inject


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stalls", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--injections", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600.0, help="longest time")
    parser.add_argument("--seed", type=int, default=0, help="number of the first injection")
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--stall-seconds", type=float, default=2.0, help="the run's trainer.stall_seconds")
    parser.add_argument("--results", type=Path, help="file that gets a line of JSON per injection")
    parser.add_argument("--healthy", type=float, default=0.0, help="seconds of healthy steps")
    given = parser.parse_args()
    begin = time.monotonic()
    found: dict[str, list[tuple[bool, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), given.ranks, given.stall_seconds) as job:
        if given.healthy:
            steps, alarms = healthy_steps(job, given.healthy)
            sys.stdout.write(f"{steps} healthy phases in {given.healthy:.0f} s: {alarms} false alarms\n")
            return 1 if alarms else 0
        for seed in range(given.seed, given.seed + given.injections):
            if time.monotonic() - begin > given.seconds:
                break
            injection = draw(seed, given.ranks, given.only)
            result = inject(job, injection)
            found.setdefault(injection.fault.name, []).append((result.right, result.seconds))
            record = {
                "seed": seed,
                "ranks": given.ranks,
                "fault": injection.fault.name,
                "rank": injection.rank,
                "phase": injection.phase,
                "round": injection.round,
                "right": result.right,
                "seconds": round(result.seconds, 1),
                "lines": result.lines,
            }
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if not result.right:
                sys.stderr.write(f"wrong: {json.dumps(record, indent=2)}\n")
    sys.stdout.write("| fault | injections | right | seconds to the explanation, median |\n| --- | --- | --- | --- |\n")
    for name in [fault.name for fault in FAULTS if fault.name in found]:
        right = sum(one for one, _ in found[name])
        seconds = statistics.median(seconds for _, seconds in found[name])
        sys.stdout.write(f"| {name} | {len(found[name])} | {right} | {seconds:.1f} |\n")
    return 0 if all(right for rows in found.values() for right, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
