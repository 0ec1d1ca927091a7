"""The part of `tests.stalls.nodes` that runs on the head: phases over and over, until a stall is explained."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.stalls.injecting import Job, Releasing
from trainer.cluster import calls
from trainer.cluster.stalls.explanation import Asked

STALL_SECONDS, LONGEST = 3.0, 90.0


class Printing(Releasing):
    """Ends this process once a stall is explained; what is said goes to standard output."""

    def stalled(self, asked: Sequence[Asked], seconds: float, ended: Sequence[Asked] = ()) -> None:
        super().stalled(asked, seconds, ended)
        say(*job.said.lines)
        os._exit(0)


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    nodes, phase = int(sys.argv[1]), sys.argv[2]
    with Job(Path("/shared"), nodes, STALL_SECONDS, nodes) as job:
        say(f"ready {' '.join(slot.node.address for slot in job._slots)}")
        end = time.monotonic() + LONGEST
        with calls.watched(Printing(STALL_SECONDS, Path("/shared"), lambda: None)):
            while time.monotonic() < end:
                job.run(phase)
        os._exit(1)
