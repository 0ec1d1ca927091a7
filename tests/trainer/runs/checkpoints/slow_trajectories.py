"""The trainer with a mock of a slow disk: `slow_trajectories.py SECONDS ARGUMENTS` runs `trainer ARGUMENTS`.

Each file of trajectories takes so many seconds.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.cli import main
from trainer.records import trajectories
from trainer.records.files.atomic import atomic_file


@contextmanager
def slow_file(path: Path) -> Iterator[Path]:
    with atomic_file(path) as temporary:
        yield temporary
        time.sleep(float(sys.argv[1]))


if __name__ == "__main__":
    trajectories.atomic_file = slow_file
    main(sys.argv[2:])
