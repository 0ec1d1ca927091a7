"""Injects faults and checks what they leave behind: `python -m tests.chaos ROOM… --record FILE`.

Each kind is injected --count times, at moments drawn from the seeds 0, 1, …. FILE keeps a JSON line per injection;
a later call injects only what is missing there. --table prints the table of benchmarks/measured/faults.md from it.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from tests.chaos.injection import Kind, NotStartedError, markdown, record, recorded

ROOMS = {
    "checkpoints": True,
    "records": True,
    "processes": True,
    "rewards": find_spec("psutil") is not None,
    "disks": os.geteuid() == 0 and which("mount") is not None,
    "slow_disks": os.geteuid() == 0 and None not in map(which, ("docker", "mkfs.ext4", "mount")),
    "networks": os.geteuid() == 0 and None not in map(which, ("docker", "ip", "iptables", "nsenter")),
    "nodes": find_spec("ray") is not None,  # in a container: what a job leaves in /tmp must not be another program's
    "jobs": find_spec("ray") is not None,
    "mirrors": find_spec("buildkit") is not None and None not in (which("docker"), which("mmdebstrap")),
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
    kinds = [kind for kind in kinds if given.kind in kind.name]
    failed = inject(kinds, given.record, given.count) + inject(kinds, given.record, given.count)  # what did not start
    if absent := len(in_turn(kinds, given.record, given.count)):
        say(f"{absent} were not injected: run it again on a machine that is less busy")
    return 1 if failed or absent else 0


def inject(kinds: Sequence[Kind], file: Path, count: int) -> int:
    """Injects what is missing in the file; how many broke a promise."""
    failed = 0
    for kind, seed in in_turn(kinds, file, count):
        try:
            injection = kind.inject(seed)
        except NotStartedError as error:
            say(f"{kind.name}, seed {seed}: not injected: {error}")
            continue
        record(file, injection)
        failed += bool(injection.problems)
        say(f"{kind.name}, seed {seed}: {'; '.join(injection.problems) or injection.cause or 'passed'}")
    return failed


def in_turn(kinds: Sequence[Kind], file: Path, count: int) -> list[tuple[Kind, int]]:
    """The missing seeds of each kind: the first of every kind, then the second, and so on."""
    done = {(injection.kind, injection.seed) for injection in recorded(file)}
    return [(kind, seed) for seed in range(count) for kind in kinds if (kind.name, seed) not in done]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
