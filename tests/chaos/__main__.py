"""Injects faults and checks what they leave behind: `python -m tests.chaos ROOM… [--count N] [--kind WORD]`.

Each kind is injected --count times, at moments drawn from the seeds 0, 1, …. A line says what each of them showed; the
status is 1 if a promise was broken.
"""

import argparse
import importlib
import sys

from tests.chaos.injection import Kind, NotStartedError

HOST = ("processes", "disks", "networks", "mirrors")
"""Rooms that need what `ci/setup` and `ci/engine` install, and root."""
IMAGE = ("jobs",)
"""Rooms that need Ray, in a container: what a job leaves in /tmp must not be another program's."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("rooms", nargs="+", choices=HOST + IMAGE)
    parser.add_argument("--count", type=int, default=10, help="injections per kind")
    parser.add_argument("--kind", default="", help="only kinds whose names hold this")
    given = parser.parse_args()
    kinds = [kind for room in given.rooms for kind in importlib.import_module(f"tests.chaos.{room}").KINDS]
    kinds = [kind for kind in kinds if given.kind in kind.name]
    broken = 0
    for seed in range(given.count):  # the first of every kind, then the second, and so on
        for kind in kinds:
            kept = inject(kind, seed)
            if kept is None:
                kept = inject(kind, seed)
            broken += not kept
    return 1 if broken else 0


def inject(kind: Kind, seed: int) -> bool | None:
    """Whether every promise was kept; None if a machine that is too busy did not start what the fault was meant for."""
    try:
        injection = kind.inject(seed)
    except NotStartedError as error:
        say(f"{kind.name}, seed {seed}: not injected: {error}")
        return None
    say(f"{kind.name}, seed {seed}, {injection.moment}: {'; '.join(injection.problems) or injection.cause or 'passed'}")
    return not injection.problems


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
