"""Times for 10,000 host names and for `launch explain`: python benchmarks/hostlist.py in ci/setup's .venv."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entrypoints.hostlist import compress, expand

REPOSITORY = Path(__file__).parents[1]
ROUNDS = 20


def best(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Milliseconds of the fastest of several rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times) * 1000


def main() -> None:
    names = expand("n[0001-10000]")
    listed = ",".join(names)
    explain = [sys.executable, "-m", "entrypoints", "explain"]
    rows = {
        "expand `n[0001-10000]`": best(lambda: expand("n[0001-10000]")),
        "expand `r[1-100]n[001-100]-ib`": best(lambda: expand("r[1-100]n[001-100]-ib")),
        "expand 10,000 names with commas": best(lambda: expand(listed)),
        "compress 10,000 names": best(lambda: compress(names)),
        "`launch explain`, the whole process": best(
            lambda: subprocess.run(explain, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
        ),
    }
    for operation, milliseconds in rows.items():
        print(f"| {operation} | {milliseconds:.1f} |")  # noqa: T201


if __name__ == "__main__":
    main()
