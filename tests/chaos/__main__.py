"""Injects faults and checks what they leave behind: `python -m tests.chaos ROOM… --record FILE`.

Each kind is injected --count times, at moments drawn from the seeds 0, 1, …. FILE keeps a JSON line per injection;
a later call injects only what is missing there. --table prints the table of docs/concepts/reliability.md from it.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from shutil import which

from tests.chaos.injection import Kind, NotStartedError, markdown, record, recorded

ROOMS = {
    "checkpoints": True,
    "processes": True,
    "rewards": find_spec("psutil") is not None,
    "disks": os.geteuid() == 0 and which("mount") is not None,
    "jobs": find_spec("ray") is not None,
    "registries": find_spec("buildkit") is not None and find_spec("trustme") is not None,
}
"""Each room, and whether this Python has what it needs."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("rooms", nargs="*", help=f"{', '.join(ROOMS)}; without any, those that can run here")
    parser.add_argument("--record", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=10, help="injections per kind, those in FILE included")
    parser.add_argument("--kind", default="", help="only kinds whose names hold this")
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    if unknown := set(given.rooms) - set(ROOMS):
        parser.error(f"no room {', '.join(unknown)}; there are {', '.join(ROOMS)}")
    if given.table:
        sys.stdout.write("\n".join(markdown(recorded(given.record))) + "\n")
        return 0
    rooms = given.rooms or [room for room, able in ROOMS.items() if able]
    if left_out := [room for room in ROOMS if room not in rooms]:
        say(f"without {' and '.join(left_out)}")
    kinds = [kind for room in rooms for kind in importlib.import_module(f"tests.chaos.{room}").KINDS]
    failed = 0
    for kind, seeds in in_turn([kind for kind in kinds if given.kind in kind.name], given.record, given.count):
        try:
            for found in kind.inject(seeds):
                record(given.record, found)
                failed += bool(found.problems)
                say(f"{found.kind}, seed {found.seed}: {'; '.join(found.problems) or found.cause}")
        except NotStartedError as error:
            say(f"{kind.name}, seeds {seeds}: not injected: {error}")
    return 1 if failed else 0


def in_turn(kinds: Sequence[Kind], file: Path, count: int) -> Iterator[tuple[Kind, list[int]]]:
    """The missing seeds of each kind: the first of every kind, then the second, and so on."""
    done = {(one.kind, one.seed) for one in recorded(file)}
    missing = {kind: [seed for seed in range(count) if (kind.name, seed) not in done] for kind in kinds}
    turns = [
        [(kind, seeds)] if kind.together else [(kind, [seed]) for seed in seeds] for kind, seeds in missing.items()
    ]
    for turn in zip_longest(*turns):
        yield from (own for own in turn if own and own[1])


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
