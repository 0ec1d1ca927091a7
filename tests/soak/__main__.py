"""Trains on two nodes for hours, breaks a part every few minutes, and looks for what grows: `python -m tests.soak DIR`.

Runs in the image, with Ray and vLLM; the nodes are processes of one machine:

    docker run --rm --init --shm-size 4g -v $PWD:/src:ro -v $PWD/runs:/runs -e PYTHONPATH=/src --entrypoint python \\
        slipway:cpu -m tests.soak /runs/soak --minutes 180

The modes take turns, each with a run of its own; --modes chooses among them, for longer stretches. A job that a fault
ends is started again, and its run resumes. At the end each run is repeated from the beginning without faults, up to
--compare steps. `--table` prints what DIR holds.
"""

import argparse
import sys
from pathlib import Path

from tests.soak.faults import FAULTS
from tests.soak.report import report
from tests.soak.run import MODES, Soak, prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="gets data, runs and samples")
    parser.add_argument("--minutes", type=float, default=180.0, help="of all modes together")
    parser.add_argument("--fault-every", type=float, default=10.0, metavar="MINUTES")
    parser.add_argument("--compare", type=int, default=200, metavar="STEPS", help="steps of a run without faults")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--table", action="store_true", help="only print the tables")
    given = parser.parse_args()
    directory = given.directory.resolve()
    if not given.table:
        soak = Soak(directory, prepare(directory))
        for number, mode in enumerate(given.modes):
            soak.disturbed(mode, given.minutes * 60 / len(given.modes), given.fault_every * 60, FAULTS, first=number)
        for mode in given.modes:
            soak.undisturbed(mode, given.compare)
    text, kept = report(directory)
    sys.stdout.write(text)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
