"""What `python -m tests.stalls` and `python -m tests.stalls.nodes` share: options, and one injection after another."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar

from tests.chaos.injection import NotStartedError
from tests.stalls.faults import FAULTS, Fault, Injection, draw
from tests.stalls.records import Record, in_turn, markdown, record, recorded

J = TypeVar("J")


def options(command: str, description: str | None, sizes: str) -> argparse.ArgumentParser:
    """The options of both commands; `sizes` is what one of them counts."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="a line of JSON per injection")
    parser.add_argument(f"--{sizes}", dest="sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--count", type=int, default=5, help=f"injections per fault and number of {sizes}")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--fault", default="", help="only faults whose names hold this")
    parser.add_argument("--minutes", type=float, default=60.0, help="after so many, nothing more is injected")
    parser.add_argument("--stall-seconds", type=float, default=2.0, help="the run's trainer.stall_seconds")
    parser.add_argument("--table", action="store_true", help="only print the table")
    return parser


def run(
    given: argparse.Namespace,
    places: Sequence[str],
    sizes: str,
    start: Callable[[int], AbstractContextManager[J]],
    inject: Callable[[J, Injection], Record],
) -> int:
    """Injects what the file lacks of the faults of these places, each size in turn; the exit status.

    What was not injected is tried once more, and counted at the end.
    """
    if given.table:
        sys.stdout.write("\n".join(markdown(recorded(given.record))) + "\n")
        return 0
    faults = [fault for fault in FAULTS if fault.at in places and given.fault in fault.name]
    seeds = range(given.seed, given.seed + given.count)
    end, wrong = time.monotonic() + 60 * given.minutes, 0

    def missing(size: int) -> list[tuple[Fault, int]]:
        return in_turn(faults, f"{size} {sizes}", given.record, seeds)

    for size in [*given.sizes, *given.sizes]:
        with ExitStack() as stack:
            job: J | None = None
            for fault, seed in missing(size):
                if time.monotonic() > end:
                    break
                try:
                    job = job or stack.enter_context(start(size))
                    outcome = inject(job, draw(fault, seed, size))
                except NotStartedError as error:
                    say(f"{size} {sizes}, {fault.name}, seed {seed}: not injected: {error}")
                    stack.close()
                    job = None
                    continue
                record(given.record, outcome)
                wrong += not outcome.right
                said = f"right after {outcome.seconds} s" if outcome.right else "\n  ".join(["wrong:", *outcome.lines])
                say(f"{outcome.where}, {fault.name}, seed {seed}: {said}")
    if absent := sum(len(missing(size)) for size in given.sizes):
        say(f"{absent} were not injected: run it again")
    return 1 if wrong or absent else 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
