"""Reads random inputs until a number or a time is reached: `python -m tests.fuzz ROOM --inputs 1000000 --seconds 600`.

ROOM is build, launch or train. It prints the inputs of each target, and a finding with the seed that repeats it.
"""

import argparse
import importlib
import logging
import sys
import time
import traceback
from random import Random

from tests.fuzz.damage import Target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("room", choices=("build", "launch", "train"))
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs per target")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time per target")
    parser.add_argument("--seed", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", default="", help="name of a target")
    given = parser.parse_args()
    logging.disable()  # what the readers warn of
    total = 0
    for target in importlib.import_module(f"tests.fuzz.{given.room}").TARGETS:
        if given.only in ("", target.name):
            started = time.monotonic()
            done, findings = run(target, given.seed, given.inputs, given.seconds)
            total += findings
            sys.stdout.write(f"| {target.name} | {done:,} | {findings} | {time.monotonic() - started:.0f} s |\n")
            sys.stdout.flush()
    return 1 if total else 0


def run(target: Target, first: int, inputs: int, seconds: float) -> tuple[int, int]:
    """Reads inputs of a target: their number, and that of the different findings."""
    started, done, findings = time.monotonic(), 0, set[str]()
    while done < inputs and time.monotonic() - started < seconds:
        seed = first + done
        try:
            target.attempt(Random(seed))
        except Exception as error:  # noqa: BLE001 - any error is a finding
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} in {last.filename}:{last.lineno}"
            if place not in findings:
                findings.add(place)
                sys.stderr.write(f"{target.name}, seed {seed}: {place}\n")
                traceback.print_exception(error, limit=-6)
        done += 1
    return done, len(findings)


if __name__ == "__main__":
    sys.exit(main())
